"""The whole decode step as one persistent kernel: the structure that the hand-off study measures.

Per step and CTA: `layers` x [qkv | o + residual | gate/up, SiLU x up | down + residual], then the
head. The producer warp streams this CTA's weights; consumer warps run the phases in order; the
janitor warp sets activation words back to EMPTY.

Activation buffers have COPIES = 3 copies, by layer. When a CTA's gather of gate/up in layer l has
seen words of `o`, every CTA has finished qkv of layer l and with it every read of layer l - 1:
the janitor clears this CTA's share of that copy and fences. Consumers wait for that clearing
before they report the gather of layer l + 1, so it is ordered before every word this CTA publishes
after that; and the copy is not awaited again before layer l + 2, by readers that have seen such
words. The clearing has a whole layer to complete, off the critical path.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.gpu import attention, gemm, sync
from cute_kernels.gpu.config import BLOCK_BYTES, COPIES, KINDS, TILE, Config
from cute_kernels.gpu.epilogue import DOWN, GU, LM, O, is_any
from cute_kernels.gpu.gemm import Core, plan_entry, run_phase
from cute_kernels.gpu.ring import Ring, init_ring, issue, produce
from cute_kernels.gpu.tiles import Buffers, tile_stride


def carve(c: Config, base, k: Core):
    """Shared addresses of every part of the plan, in its order."""
    at, where = 0, {}
    for name, n_bytes in c.smem_plan().items():
        where[name] = base + at
        at += n_bytes
    k.red, k.squares = where["partial sums"], where["row squares"]
    k.residual = where["residual"]
    k.inbox, k.own = where.get("inbox", base), where.get("own parts", base)
    k.squares_inbox = where.get("squares inbox", base)
    k.squares_inbox_bytes = c.split * c.k_warps * c.tile_rows * 4
    k.attention = where.get("attention", base)
    k.factors, k.pass_sums = where.get("row factors", base), where.get("pass sums", base)
    k.ring = Ring(where["ring"], where["barriers"], c.stages, c.stage_bytes)
    k.gathered = where["barriers"] + 16 * c.stages
    k.cleared = k.gathered + 8
    k.inbox_bar = k.gathered + 16
    k.squares_bar = k.inbox_bar + 8 * 4


def places(c: Config, k: Core, tid, bid):
    k.c, k.tid, k.lane = c, tid, tid & 31
    k.wid = cute.arch.make_warp_uniform(tid >> 5)
    k.warp_row, k.warp_k = k.wid % c.row_warps, k.wid // c.row_warps
    k.j, k.t, k.pair = tid >> 6, (tid >> 1) & 3, (tid & 63) * 8
    k.row = ((tid & 63) >> 3) + 8 * (tid & 1)
    k.rank = bid & (c.team - 1)


@cute.jit
def init_barriers(k: cutlass.Constexpr):
    c = k.c
    if k.tid == 0:
        init_ring(k.ring, c.warps)
        sync.init_barrier(k.gathered, c.warps)
        sync.init_barrier(k.cleared, 1)
        for i in cutlass.range_constexpr(4):
            sync.init_barrier(k.inbox_bar + 8 * i, 1)
        sync.init_barrier(k.squares_bar, 1)
        sync.init_barrier(k.squares_bar + 8, 1)
        sync.fence_barrier_init()
    cute.arch.sync_threads()
    if cutlass.const_expr(c.cluster > 1):
        sync.cluster_sync()


@cute.jit
def load_residual(k: cutlass.Constexpr, r0: Int64, phase: Int32):
    """This CTA's own columns of the residual, fp32 [hidden / 8, tile_rows, 8] in global memory."""
    c = k.c
    tile0, n, _, _ = plan_entry(k, phase)
    g = c.gemm("o")
    if cutlass.const_expr(g.split > 1):
        tile0, n = tile0 + k.rank, (n - k.rank + g.split - 1) // g.split
    stride = g.split if g.split > 1 else tile_stride(c, "o")
    own = k.j
    while own < n:
        for m in cutlass.range_constexpr(c.m_tiles):
            at = ((tile0 + own * stride) * c.tile_rows + m * 16 + k.row) * TILE + 2 * k.t
            v0, v1 = gemm.ptx_read(
                "ld.global.v2.f32 {{$w0},{$w1}}, [{$r0}];", [Float32] * 2, r0 + Int64(at * 4)
            )
            sync.sts_pair(k.residual + (own * c.m_tiles + m) * 512 + k.pair, v0, v1)
        own = own + c.group


@cute.jit
def store_residual(k: cutlass.Constexpr, r0: Int64, phase: Int32):
    """The inverse of `load_residual`, where the residual must outlive the kernel."""
    c = k.c
    tile0, n, _, _ = plan_entry(k, phase)
    g = c.gemm("o")
    if cutlass.const_expr(g.split > 1):
        tile0, n = tile0 + k.rank, (n - k.rank + g.split - 1) // g.split
    stride = g.split if g.split > 1 else tile_stride(c, "o")
    own = k.j
    while own < n:
        for m in cutlass.range_constexpr(c.m_tiles):
            at = ((tile0 + own * stride) * c.tile_rows + m * 16 + k.row) * TILE + 2 * k.t
            v0, v1 = sync.lds_pair(k.residual + (own * c.m_tiles + m) * 512 + k.pair)
            sync.ptx_do("st.global.v2.f32 [{$r0}], {{$r1},{$r2}};", r0 + Int64(at * 4), v0, v1)
        own = own + c.group


# -- the janitor -------------------------------------------------------------------------------
@cute.jit
def run_janitor(k: cutlass.Constexpr, act: Int64, bid: Int32, layers: Int32, steps: Int32):
    size = Buffers.of(k.c).bytes
    share = -(-size // (16 * k.c.ctas)) * 16  # bytes of a copy that this CTA clears
    first, count, old = bid * share, Int32(0), act + (COPIES - 1) * size
    end = cutlass.min(first + share, size)
    for _ in cutlass.range(layers * steps, unroll=1):
        sync.wait_parity(k.gathered, count & 1)
        if count > 0:  # before the first layer there is nothing to clear
            at = first + k.lane * 16
            while at < end:
                sync.st_words(old + Int64(at), [Uint32(sync.EMPTY)] * 4)
                at = at + 512
        sync.fence_gpu()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            sync.arrive(k.cleared)
        count = count + 1
        old = next_copy(k, act, old)


@cute.jit
def next_copy(k: cutlass.Constexpr, act: Int64, at: Int64):
    size = Buffers.of(k.c).bytes
    at = at + size
    if at == act + COPIES * size:
        at = act
    return at


# -- the roles ---------------------------------------------------------------------------------
def page_of(k, block):
    return gemm.ptx_read("ld.global.nc.b32 {$w0}, [{$r0}];", [Int32], k.pages + Int64(block) * 4)


def block_address(k, page, layer):
    at = (Int64(page) * k.layers + layer) * k.c.shape.kv_heads + k.kv_head
    return k.kv_pool + at * BLOCK_BYTES


def main_share(k):
    """Blocks below the largest c(p) that are this CTA's."""
    return (k.main_blocks - k.split + k.c.splits - 1) // k.c.splits


@cute.jit
def block_of(k: cutlass.Constexpr, n_main: Int32, i: Int32):
    """The i-th block this CTA reads: its share of the context, then the tail; the last, beyond."""
    block = k.split + i * k.c.splits
    if i >= n_main:
        block = k.tail_first + (i - n_main)
    return cutlass.max(cutlass.min(block, k.page_count - 1), 0)


@cute.jit
def produce_kv(
    k: cutlass.Constexpr,
    layer: Int32,
    page0: Int32,
    page1: Int32,
    stage: Int32,
    parity: Int32,
    issued: Int32,
    landed: Int32,
    landed_parity: Int32,
):
    """This CTA's committed KV blocks of a layer, then those of the tail. All lie below the
    committed length, so they may be fetched before this step's own keys exist. page0, page1: of
    the first two blocks; the others are looked up two blocks ahead, out of the stream's way."""
    c = k.c
    if k.kv_head < c.shape.kv_heads:
        tail = k.tail_count
        if k.split >= 16:
            tail = Int32(0)
        n_main = main_share(k)
        for i in cutlass.range(n_main + tail, unroll=1):
            now, page0 = page0, page1
            page1 = page_of(k, block_of(k, n_main, i + 2))
            stage, parity, issued, landed, landed_parity = issue(
                k.ring, c, block_address(k, now, layer), Int32(BLOCK_BYTES),
                stage, parity, issued, landed, landed_parity,
            )  # fmt: skip
    return stage, parity, issued, landed, landed_parity


@cute.jit
def run_producer(
    k: cutlass.Constexpr, stream: Int64, offsets: Int64, bid: Int32, layers: Int32, steps: Int32
):
    phases = layers * 4 + 1
    first = gemm.ptx_read(
        "ld.global.nc.b64 {$w0}, [{$r0}];", [Int64], offsets + Int64(bid * phases) * 8
    )
    stage, parity, issued = Int32(0), Int32(0), Int32(0)
    landed, landed_parity, ahead = Int32(0), Int32(0), Int32(0)
    page0, page1 = Int32(0), Int32(0)
    for _ in cutlass.range(steps, unroll=1):
        at = stream + first
        _, _, copies, n_bytes = plan_entry(k, Int32(0))
        if cutlass.const_expr(k.c.attention):
            page0 = page_of(k, block_of(k, main_share(k), Int32(0)))
            page1 = page_of(k, block_of(k, main_share(k), Int32(1)))
        for phase in cutlass.range(phases, unroll=1):
            # one phase ahead, so that the look-up never holds up the stream
            _, _, more, more_bytes = plan_entry(k, cutlass.min(phase + 1, phases - 1))
            at, stage, parity, issued, landed, landed_parity, ahead = produce(
                k.ring, k.c, at, copies, n_bytes,
                stage, parity, issued, landed, landed_parity, ahead, phase < layers * 4,
            )  # fmt: skip
            if cutlass.const_expr(k.c.attention):
                if (phase & 3) == 0:
                    if phase < layers * 4:
                        stage, parity, issued, landed, landed_parity = produce_kv(
                            k, phase >> 2, page0, page1,
                            stage, parity, issued, landed, landed_parity,
                        )  # fmt: skip
            copies, n_bytes = more, more_bytes


@cute.jit
def run_consumers(
    k: cutlass.Constexpr,
    x0: Int64,
    r0: Int64,
    act: Int64,
    logits: Int64,
    layers: Int32,
    steps: Int32,
):
    c = k.c
    b = Buffers.of(c)
    stage, parity, turn, which = Int32(0), Int32(0), Int32(0), Int32(0)
    count, norms, cur, families = Int32(0), Int32(0), act, c.families
    for step in cutlass.range(steps, unroll=1):
        if k.tid == 0:  # the last step is finished everywhere
            sync.wait_counter(k.counter, step * c.ctas)
        sync.consumer_sync(c.warps * 32)
        load_residual(k, r0, Int32(1))
        sync.consumer_sync(c.warps * 32)
        x = x0
        for phase in cutlass.range(layers * 4 + 1, unroll=1):
            kind = phase & 3
            src, dst = x, cur + b.q
            if phase == layers * 4:
                kind, dst = Int32(LM), logits
            if kind == O:
                src, dst = cur + (b.a if c.attention else b.q), cur + b.y
            if kind == GU:
                src, dst = cur + b.y, cur + b.h
            if kind == DOWN:
                src, dst = cur + b.h, cur + b.x
            if cutlass.const_expr(c.attention):
                if kind == O:
                    stage, parity = attention.run_attention(k, cur, stage, parity)
            for i in cutlass.range_constexpr(len(families)):
                if is_any(KINDS, families[i].names, kind):
                    stage, parity, turn, which = run_phase(
                        k, families[i], kind, phase, src, dst, cur + b.parts, count, norms,
                        stage, parity, turn, which,
                    )  # fmt: skip
            if kind == DOWN:
                x = dst
                count, norms = count + 1, norms + 1
                cur = next_copy(k, act, cur)
        norms = norms + 1
        sync.consumer_sync(c.warps * 32)
        if k.tid == 0:
            sync.red_release(k.counter, Uint32(1))


def note_clock(at):
    now, ns = Int64(cute.arch.clock64()), Int64(cute.arch.globaltimer())
    sync.ptx_do("st.global.v2.b64 [{$r0}], {{$r1},{$r2}};", at, now, ns)


def make_step(c: Config):
    """Returns (jit launcher, example arguments, launch geometry) of the persistent step kernel.

    Arguments: stream (packed weights), offsets [ctas, phases] int64, plan [ctas, phases, 4] int32,
    x0 (bf16 fragments), r0 (fp32 residual), act (COPIES x Buffers.bytes, all EMPTY at first),
    logits [rows, vocab] fp32, counter (int32 [32 + ctas], 0; with `timing` the SM of each CTA from
    32 on), times [ctas, phases, 4] int64 ns; with attention: kv pool [pages, layers, kv heads] of
    blocks, page table int32, rope and row tables (attention.load_step_tables); then layers, steps,
    committed positions, first position block that some row has in its tail, and the number of
    blocks below the largest c(p).
    """
    attended = c.attention

    @cute.kernel
    def kernel(
        stream: Int64, offsets: Int64, plan: Int64, x0: Int64, r0: Int64, act: Int64,
        logits: Int64, counter: Int64, times: Int64, kv_pool: Int64, pages: Int64, rope: Int64,
        rows: Int64, layers: Int32, steps: Int32, committed: Int32, tail_first: Int32,
        main_blocks: Int32,
    ):  # fmt: skip
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        smem, k = cutlass.memory.SmemAllocator(), Core()
        block = smem.allocate_tensor(
            cutlass.Uint8, cute.make_layout(c.smem_bytes), byte_alignment=1024
        )
        carve(c, block.iterator.toint(), k)
        places(c, k, tid, bid)
        k.zero = Uint32(steps >> 30)
        phases = layers * 4 + 1
        k.plan = plan + Int64(bid * phases) * 16
        k.times = times + Int64(bid * phases) * 32
        k.counter = counter
        if cutlass.const_expr(attended):
            attention.attention_places(k, k.attention, bid)
            k.layers = layers
            k.kv_pool, k.pages, k.committed = kv_pool, pages, committed
            k.tail_first, k.main_blocks = tail_first, main_blocks
            k.page_count = (committed + 63) >> 6
            k.tail_count = k.page_count - tail_first
            # of the last layer that runs: [ctas, 2, STAMPS] behind the phases' times
            k.stamps = times + Int64(c.ctas * phases * 32 + bid * (2 * attention.STAMPS * 8))
        init_barriers(k)
        # behind all other times: (clock64, globaltimer) of one thread at its start and end
        clock_at = times + Int64(c.ctas * (phases * 32 + 2 * attention.STAMPS * 8))
        if cutlass.const_expr(c.timing):
            if tid == 0:
                sync.ptx_do("st.global.b32 [{$r0}], {$r1};", counter + Int64(bid * 4 + 128),
                            cute.arch.smid())  # fmt: skip
                if bid == 0:
                    note_clock(clock_at)
        if k.wid >= c.warps:
            if cutlass.const_expr(c.setmaxnreg):
                cute.arch.setmaxregister_decrease(40)
            if k.wid == c.warps:
                run_producer(k, stream, offsets, bid, layers, steps)
            elif k.wid == c.warps + 1:
                run_janitor(k, act, bid, layers, steps)
        else:
            if cutlass.const_expr(c.setmaxnreg):
                cute.arch.setmaxregister_increase(232)
            if cutlass.const_expr(attended):
                attention.load_step_tables(k, rope, rows)
            run_consumers(k, x0, r0, act, logits, layers, steps)
        if cutlass.const_expr(c.timing):
            if (tid == 0) & (bid == 0):
                note_clock(clock_at + 16)
        if cutlass.const_expr(c.cluster > 1):
            sync.cluster_sync()

    kernel.set_name_prefix("md_step", keep_mangled_name=False, remove_cutlass_symbol=True)
    geometry = dict(grid=c.ctas, block=c.block, cluster=c.cluster, smem=c.smem_bytes)

    @cute.jit
    def launch(
        stream: Int64, offsets: Int64, plan: Int64, x0: Int64, r0: Int64, act: Int64,
        logits: Int64, counter: Int64, times: Int64, kv_pool: Int64, pages: Int64, rope: Int64,
        rows: Int64, layers: Int32, steps: Int32, committed: Int32, tail_first: Int32,
        main_blocks: Int32,
    ):  # fmt: skip
        kernel(
            stream, offsets, plan, x0, r0, act, logits, counter, times, kv_pool, pages, rope,
            rows, layers, steps, committed, tail_first, main_blocks,
        ).launch(
            grid=(c.ctas, 1, 1), block=(c.block, 1, 1), cluster=(c.cluster, 1, 1),
            cooperative=True, min_blocks_per_mp=1, smem=c.smem_bytes,
        )  # fmt: skip

    return launch, [Int64(0)] * 13 + [Int32(0)] * 5, geometry
