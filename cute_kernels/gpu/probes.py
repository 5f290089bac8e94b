"""Small kernels that show whether `sync` and `ring` keep their contracts. Built for the tests.

Each probe: make(...) -> (launcher, example arguments, geometry), like step.make_step.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.ring import Ring, advance, fetch, init_ring

GMEM = cute.AddressSpace.gmem


def _words(address, n):
    return cute.make_tensor(
        cute.make_ptr(Uint32, address, GMEM, assumed_align=4), cute.make_layout(n)
    )


def _geometry(grid, block, smem=0, cluster=1):
    return dict(grid=grid, block=block, smem=smem, cluster=cluster)


def make_turnstile(ctas: int, threads: int = 128):
    """A value handed from CTA to CTA with plain loads and stores around acquire and release.

    v = 5 v + 7 cta + thread is not commutative: only the right order with every store visible
    gives the expected number. Arguments: payload (uint32 [threads]), flag (int32), first, rounds.
    The flag starts at `first`, which tests put just below the wrap of int32.
    """

    @cute.kernel
    def kernel(payload: Int64, flag: Int64, first: Int32, rounds: Int32):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        words = _words(payload, threads)
        for r in cutlass.range(rounds, unroll=1):
            mine = first + r * ctas + bid
            if tid == 0:
                sync.wait_counter(flag, mine)
            cute.arch.sync_threads()
            words[tid] = words[tid] * Uint32(5) + Uint32(bid * 7 + tid)
            cute.arch.sync_threads()
            if tid == 0:
                sync.st_release(flag, mine + 1)

    kernel.set_name_prefix("md_turnstile", keep_mangled_name=False, remove_cutlass_symbol=True)

    @cute.jit
    def launch(payload: Int64, flag: Int64, first: Int32, rounds: Int32):
        kernel(payload, flag, first, rounds).launch(
            grid=(ctas, 1, 1), block=(threads, 1, 1), cooperative=True, min_blocks_per_mp=1
        )

    return launch, [Int64(0)] * 2 + [Int32(0)] * 2, _geometry(ctas, threads)


def make_barrier(ctas: int, threads: int = 128):
    """Rounds of a counter barrier; after each, every CTA checks what all others wrote before it.

    Arguments: slots (uint32 [ctas]), counter (int32, starts at first), errors (uint32), first,
    rounds.
    """

    @cute.kernel
    def kernel(slots: Int64, counter: Int64, errors: Int64, first: Int32, rounds: Int32):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        words, bad = _words(slots, ctas), Uint32(0)
        target = first
        for r in cutlass.range(rounds, unroll=1):
            for half in cutlass.range_constexpr(2):  # write, then read: a barrier behind each
                if cutlass.const_expr(half == 0):
                    if tid == 0:
                        words[bid] = Uint32(r + 1)
                else:
                    i = tid
                    while i < ctas:
                        if words[i] != Uint32(r + 1):
                            bad = bad + 1
                        i = i + threads
                target = target + ctas
                cute.arch.sync_threads()
                if tid == 0:
                    sync.red_release(counter, Uint32(1))
                    sync.wait_counter(counter, target)
                cute.arch.sync_threads()
        if bad != 0:
            sync.red_release(errors, bad)

    kernel.set_name_prefix("md_barrier", keep_mangled_name=False, remove_cutlass_symbol=True)

    @cute.jit
    def launch(slots: Int64, counter: Int64, errors: Int64, first: Int32, rounds: Int32):
        kernel(slots, counter, errors, first, rounds).launch(
            grid=(ctas, 1, 1), block=(threads, 1, 1), cooperative=True, min_blocks_per_mp=1
        )

    return launch, [Int64(0)] * 3 + [Int32(0)] * 2, _geometry(ctas, threads)


RACE_WARPS, RACE_STAGES, RACE_VECTORS, RACE_LOADS = 8, 1, 4, 32


def make_ring_race(ctas: int, dependent: bool):
    """Does a stage come back before it was read?

    Consumers queue scattered global loads in front of their shared loads, as a gather of
    activations does, and give each stage back at once. Word i of a CTA's stream is
    i * 2654435761 + cta; every lane compares what it loaded. dependent=False releases without
    `release_after`'s dependence: the fault the ring must not have.
    Arguments: stream (uint32), noise (uint32 [2^22]), errors (uint32), copies (stages per CTA).
    """
    stage_bytes = RACE_WARPS * RACE_VECTORS * 512
    smem_bytes = RACE_STAGES * stage_bytes + 1024

    @cute.jit
    def consume(ring: cutlass.Constexpr, tid: Int32, bid: Int32, zero: Uint32,
                noise: Int64, errors: Int64, copies: Int32):  # fmt: skip
        wid, lane = cute.arch.make_warp_uniform(tid >> 5), tid & 31
        stage, parity, bad, sink = Int32(0), Int32(0), Uint32(0), Uint32(0)
        at = Uint32(tid * 7919 + bid * 104729)
        for i in cutlass.range(copies, unroll=1):
            sync.wait_parity(ring.full + stage * 8, parity)
            loads = []
            for _ in cutlass.range_constexpr(RACE_LOADS):
                at = at * Uint32(1664525) + Uint32(1013904223)
                loads.append(sync.ld_word(noise + Int64(at >> 10) * 4))
            base = ring.base + stage * stage_bytes + wid * 512 + lane * 16
            words = [sync.lds_words(base + v * (RACE_WARPS * 512)) for v in range(RACE_VECTORS)]
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                kept = [w[0] for w in words] if dependent else []
                sync.release_after(ring.empty + stage * 8, kept, zero)
            first = Uint32(i * (stage_bytes // 4) + wid * 128 + lane * 4)
            for v in cutlass.range_constexpr(RACE_VECTORS):
                for e in cutlass.range_constexpr(4):
                    want = (first + v * (RACE_WARPS * 128) + e) * Uint32(2654435761) + Uint32(bid)
                    if words[v][e] != want:
                        bad = bad + 1
            for w in cutlass.range_constexpr(RACE_LOADS):
                sink = sink | loads[w]
            stage, parity = advance(ring, stage, parity)
        if sink == Uint32(1):  # never: noise is zero; keeps the loads alive
            bad = bad + 1
        if bad != 0:
            sync.red_release(errors, bad)

    @cute.kernel
    def kernel(stream: Int64, noise: Int64, errors: Int64, copies: Int32):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        block = smem.allocate_tensor(
            cutlass.Uint8, cute.make_layout(smem_bytes), byte_alignment=1024
        )
        base = block.iterator.toint()
        ring = Ring(base, base + RACE_STAGES * stage_bytes, RACE_STAGES, stage_bytes)
        if tid == 0:
            init_ring(ring, RACE_WARPS)
            sync.fence_barrier_init()
        cute.arch.sync_threads()
        if tid >= RACE_WARPS * 32:
            stage, parity = Int32(0), Int32(0)
            at = stream + Int64(bid) * Int64(copies) * stage_bytes
            for _ in cutlass.range(copies, unroll=1):
                sync.wait_parity(ring.empty + stage * 8, parity ^ 1)
                fetch(ring, at, Int32(stage_bytes), stage)
                at = at + stage_bytes
                stage, parity = advance(ring, stage, parity)
        else:
            consume(ring, tid, bid, Uint32(copies >> 30), noise, errors, copies)

    kernel.set_name_prefix("md_ring", keep_mangled_name=False, remove_cutlass_symbol=True)
    threads = (RACE_WARPS + 1) * 32

    @cute.jit
    def launch(stream: Int64, noise: Int64, errors: Int64, copies: Int32):
        kernel(stream, noise, errors, copies).launch(
            grid=(ctas, 1, 1), block=(threads, 1, 1), cooperative=True, min_blocks_per_mp=1,
            smem=smem_bytes,
        )  # fmt: skip

    return launch, [Int64(0)] * 3 + [Int32(0)], _geometry(ctas, threads, smem_bytes)
