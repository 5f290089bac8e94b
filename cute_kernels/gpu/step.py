"""The whole decode step as one persistent kernel: the structure that the hand-off study measures.

Per step and CTA: `layers` x [qkv | o + residual | gate/up, SiLU x up | down + residual], then the
head. The producer warp streams this CTA's weights; consumer warps run the phases in order; the
janitor warp sets activation words back to EMPTY.

Activation buffers have COPIES = 3 copies, by layer. When a CTA's gather of gate/up in layer l has
seen words of `o`, every CTA has finished qkv of layer l and with it every read of layer l - 1:
the janitor clears this CTA's next words in that copy and fences. Consumers wait for that clearing
before they report the gather of layer l + 1, so it is ordered before every word this CTA publishes
after that; and the copy is not awaited again before layer l + 2, by readers that have seen such
words. The clearing has a whole layer to complete, off the critical path.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.gpu import gemm, sync
from cute_kernels.gpu.config import COPIES, LAYER_KINDS, TILE, Buffers, Config, tile_stride
from cute_kernels.gpu.gemm import Core, plan_entry, run_phase
from cute_kernels.gpu.ring import Ring, init_ring, produce


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
def clear_tile(k: cutlass.Constexpr, base: Int64, col: Int32, wide: cutlass.Constexpr):
    """EMPTY into columns col .. col + 7 (wide) or col .. col + 3 of all rows, by one warp."""
    c = k.c
    ts = 2 if wide else 1
    chunk, step, t0 = col >> 5, (col >> 4) & 1, (col >> 2) & 3
    empty = Uint32(sync.EMPTY)
    for i in cutlass.range_constexpr(-(-8 * ts * c.m_tiles // 32)):
        v = k.lane + 32 * i  # row tile, g, t
        m, lane = v // (8 * ts), (v % (8 * ts)) // ts * 4 + t0 + v % ts
        if v < 8 * ts * c.m_tiles:
            if cutlass.const_expr(c.half):
                at = chunk * c.chunk_bytes + lane * 16 + step * 8
                sync.st_words(base + Int64(at), [empty] * 2)
            else:
                at = chunk * c.chunk_bytes + (step * c.m_tiles + m) * 512 + lane * 16
                sync.st_words(base + Int64(at), [empty] * 4)


@cute.jit
def clear_parts(k: cutlass.Constexpr, parts: Int64, first: Int32, n: Int32):
    """EMPTY into the partial sums this CTA sends to the owners of its team's tiles."""
    c = k.c
    for i in cutlass.range(n, unroll=1):
        if (i & (c.team - 1)) != k.rank:
            for m in cutlass.range_constexpr(c.m_tiles):
                at = (((first + i) * c.team + k.rank) * c.m_tiles + m) * 512 + k.lane * 16
                sync.st_words(parts + Int64(at), [Uint32(sync.EMPTY)] * 4)


@cute.jit
def clear_copy(k: cutlass.Constexpr, act: Int64, layer: Int32):
    """Everything this CTA will publish in `layer`, in the copy that begins at act."""
    c = k.c
    b = Buffers.of(c)
    for i in cutlass.range_constexpr(len(LAYER_KINDS)):
        g = c.gemm(LAYER_KINDS[i])
        first, n, _, _ = plan_entry(k, layer * 4 + i)
        stride = tile_stride(c, g.name)
        if cutlass.const_expr(g.split > 1 and c.cluster > 1):
            first, n = first + k.rank, (n - k.rank + g.split - 1) // g.split
            stride = g.split
        if cutlass.const_expr(g.name == "down" and c.team > 1 and c.cluster == 1):
            clear_parts(k, act + b.parts, first, n)
            first, n = first + k.rank, (n - k.rank + c.team - 1) // c.team
            stride = c.team
        base = act + (b.q, b.y, b.h, b.x)[i]
        for t in cutlass.range(n, unroll=1):
            tile = first + t * stride
            if cutlass.const_expr(g.name == "gu"):
                clear_tile(k, base, tile * 4, False)
            else:
                clear_tile(k, base, tile * TILE, True)


@cute.jit
def run_janitor(k: cutlass.Constexpr, act: Int64, layers: Int32, steps: Int32):
    count, old = Int32(0), act + (COPIES - 1) * Buffers.of(k.c).bytes
    for step in cutlass.range(steps, unroll=1):
        for layer in cutlass.range(layers, unroll=1):
            sync.wait_parity(k.gathered, count & 1)
            if count > 0:  # before the first layer there is nothing to clear
                again = layer + (COPIES - 1)
                while again >= layers:
                    again = again - layers
                clear_copy(k, old, again)
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
@cute.jit
def run_producer(
    k: cutlass.Constexpr, stream: Int64, offsets: Int64, bid: Int32, layers: Int32, steps: Int32
):
    phases = layers * 4 + 1
    first = gemm.ptx_read(
        "ld.global.nc.b64 {$w0}, [{$r0}];", [Int64], offsets + Int64(bid * phases) * 8
    )
    stage, parity, issued = Int32(0), Int32(0), Int32(0)
    landed, landed_parity = Int32(0), Int32(0)
    for step in cutlass.range(steps, unroll=1):
        at = stream + first
        _, _, copies, n_bytes = plan_entry(k, Int32(0))
        for phase in cutlass.range(phases, unroll=1):
            # one phase ahead, so that the look-up never holds up the stream
            _, _, more, more_bytes = plan_entry(k, cutlass.min(phase + 1, phases - 1))
            at, stage, parity, issued, landed, landed_parity = produce(
                k.ring, k.c, at, copies, n_bytes,
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
    count, norms, cur, none = Int32(0), Int32(0), act, Int64(0)
    for step in cutlass.range(steps, unroll=1):
        if k.tid == 0:  # the last step is finished everywhere
            sync.wait_counter(k.counter, step * c.ctas)
        sync.consumer_sync(c.warps * 32)
        load_residual(k, r0, Int32(1))
        sync.consumer_sync(c.warps * 32)
        x = x0
        for layer in cutlass.range(layers, unroll=1):
            at = layer * 4
            stage, parity, turn, which = run_phase(
                k, "qkv", at, x, cur + b.q, none, count, norms, stage, parity, turn, which
            )
            stage, parity, turn, which = run_phase(
                k, "o", at + 1, cur + b.q, cur + b.y, none, count, norms, stage, parity, turn, which
            )
            stage, parity, turn, which = run_phase(
                k, "gu", at + 2, cur + b.y, cur + b.h, none, count, count, stage, parity, turn, which
            )
            stage, parity, turn, which = run_phase(
                k, "down", at + 3, cur + b.h, cur + b.x, cur + b.parts, count, norms, stage, parity, turn, which
            )
            x = cur + b.x
            count, norms = count + 1, norms + 1
            cur = next_copy(k, act, cur)
        stage, parity, turn, which = run_phase(
            k, "lm", layers * 4, x, logits, none, count, norms, stage, parity, turn, which
        )
        norms = norms + 1
        sync.consumer_sync(c.warps * 32)
        if k.tid == 0:
            sync.red_release(k.counter, Uint32(1))


def make_step(c: Config):
    """Returns (jit launcher, example arguments, launch geometry) of the persistent step kernel.

    Arguments: stream (packed weights), offsets [ctas, phases] int64, plan [ctas, phases, 4] int32,
    x0 (bf16 fragments), r0 (fp32 residual), act (COPIES x Buffers.bytes, all EMPTY at first),
    logits [rows, vocab] fp32, counter (int32 [32 + ctas], 0; with `timing` the SM of each CTA from
    32 on), times [ctas, phases, 4] int64 ns, layers, steps.
    """

    @cute.kernel
    def kernel(
        stream: Int64, offsets: Int64, plan: Int64, x0: Int64, r0: Int64, act: Int64,
        logits: Int64, counter: Int64, times: Int64, layers: Int32, steps: Int32,
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
        init_barriers(k)
        if cutlass.const_expr(c.timing):
            if tid == 0:
                sync.ptx_do("st.global.b32 [{$r0}], {$r1};", counter + Int64(bid * 4 + 128),
                            cute.arch.smid())  # fmt: skip
        if k.wid >= c.warps:
            if cutlass.const_expr(c.setmaxnreg):
                cute.arch.setmaxregister_decrease(40)
            if k.wid == c.warps:
                run_producer(k, stream, offsets, bid, layers, steps)
            elif k.wid == c.warps + 1:
                run_janitor(k, act, layers, steps)
        else:
            if cutlass.const_expr(c.setmaxnreg):
                cute.arch.setmaxregister_increase(232)
            run_consumers(k, x0, r0, act, logits, layers, steps)
        if cutlass.const_expr(c.cluster > 1):
            sync.cluster_sync()

    kernel.set_name_prefix("md_step", keep_mangled_name=False, remove_cutlass_symbol=True)
    geometry = dict(grid=c.ctas, block=c.block, cluster=c.cluster, smem=c.smem_bytes)

    @cute.jit
    def launch(
        stream: Int64, offsets: Int64, plan: Int64, x0: Int64, r0: Int64, act: Int64,
        logits: Int64, counter: Int64, times: Int64, layers: Int32, steps: Int32,
    ):  # fmt: skip
        kernel(
            stream, offsets, plan, x0, r0, act, logits, counter, times, layers, steps
        ).launch(
            grid=(c.ctas, 1, 1), block=(c.block, 1, 1), cluster=(c.cluster, 1, 1),
            cooperative=True, min_blocks_per_mp=1, smem=c.smem_bytes,
        )  # fmt: skip

    return launch, [Int64(0)] * 9 + [Int32(0)] * 2, geometry
