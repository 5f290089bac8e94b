"""The persistent kernel: who does what, and how a token goes through it.

One CTA per SM. In each, consumer warps compute, the producer warp streams this CTA's weights and KV
blocks into the ring, the janitor sets activation words back to EMPTY; in CTA 0 the service warp
decides what the next step is.

A DECODE step of up to 16 rows. The service warp writes the descriptor and its tag (board.py). Warp
0 of every CTA sees the tag, copies the descriptor into shared memory and tells the others (`told`).
The first layer's qkv takes the tokens' embeddings from the packed head; then per layer qkv,
attention and o + residual, gate/up and SiLU x up, down + residual: every CTA computes its own
columns (tiles.py) and publishes them as words that the next phase's readers poll (sync.py). The
head leaves logits and every CTA its results; the service warp merges them: the next token.

Weights do not depend on tokens: the producer issues the first phase of the next step, as far as the
ring goes, before it is told what the step is. KV and everything else only after. On LEAVE it waits
for what it issued.

Activation buffers rotate, and what was read is set back to EMPTY: janitor.py.

Steps that start after or stop before a phase are for tests: [FIRST_PHASE, LAST_PHASE) runs, the
residual begins with the rows' embeddings, the first layer that runs uses copy 0 (and reads x of a
layer before it from copy 2). Such a step is the only one of its launch, nothing is cleared, and act
must be set to EMPTY before the next.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from cute_kernels.gpu import head, sync
from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.board import Board, Desc, Segment
from cute_kernels.gpu.config import KINDS, Config
from cute_kernels.gpu.core import (
    Core,
    arg,
    carve,
    desc_word,
    init_barriers,
    memory,
    note_phase,
    places,
)
from cute_kernels.gpu.embed import load_residual
from cute_kernels.gpu.gemm import plan_entry, run_phase
from cute_kernels.gpu.janitor import LEAVING, last_copy, next_copy, run_janitor, tell_janitor
from cute_kernels.gpu.ring import produce, skip, wait_landed
from cute_kernels.gpu.sync import ptx_read
from cute_kernels.gpu.tiles import Buffers

QKV, O, GU, DOWN, LM = range(5)


# -- the gate ----------------------------------------------------------------------------------
def call(module, name, *args):
    """A method call on `module` inside a run-time loop would make the loop carry it."""
    return getattr(module, name)(*args)


def first_tag(k):
    """Of this launch: one more than the last of the launch before."""
    return sync.ld_acquire(k.board + Int64(int(Board.FIRST_TAG) * 4)) + 1


@cute.jit
def pass_gate(k: cutlass.Constexpr, tag: Int32, turn: Int32):
    """Consumer warps: wait, without a limit, for the descriptor with that tag."""
    if k.wid == 0:
        sync.wait_tag(k.board + Int64(int(Board.DESC) * 4), tag)
        if k.lane < 24:
            words = sync.ld_words(k.board + Int64(int(Board.DESC) * 4) + Int64(k.lane * 16))
            sync.sts_words(k.desc + k.lane * 16, words)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            sync.arrive(k.told)
    sync.wait_parity_idle(k.told, turn & 1)


def prefetched(k):
    """Copies of the first phase that the producer issues before the gate."""
    _, _, copies, _ = plan_entry(k, Int32(0))
    return cutlass.min(copies, k.ring.n)


# -- the producer ------------------------------------------------------------------------------
@cute.jit
def run_producer(k: cutlass.Constexpr, attention: cutlass.Constexpr, prompt: cutlass.Constexpr):
    stream = arg(k, Arg.STREAM)
    start = stream + ptx_read("ld.global.nc.b64 {$w0}, [{$r0}];", [Int64], k.offsets)
    stage, parity, issued = Int32(0), Int32(0), Int32(0)
    landed, landed_parity, turn = Int32(0), Int32(0), Int32(0)
    ahead, running = prefetched(k), Boolean(True)
    while running:
        _, _, copies, n_bytes = plan_entry(k, Int32(0))
        first_stage, first_parity = stage, parity
        at, stage, parity, issued, landed, landed_parity = produce(
            k.ring, start, ahead, n_bytes, stage, parity, issued, landed, landed_parity
        )
        sync.wait_parity_idle(k.told, turn)
        turn = turn ^ 1
        kind = desc_word(k, Desc.KIND)
        if kind == int(Segment.LEAVE):
            wait_landed(k.ring, first_stage, first_parity, ahead)
            running = Boolean(False)
        else:
            sync.fence_async()  # the step before wrote keys and values
            if kind == int(Segment.DECODE):
                stage, parity, issued, landed, landed_parity = produce_step(
                    k, attention, at, stream, copies - ahead, n_bytes,
                    stage, parity, issued, landed, landed_parity,
                )  # fmt: skip
            else:
                if cutlass.const_expr(prompt is not None):
                    stage, parity, issued, landed, landed_parity = call(
                        prompt, "produce_prompt",
                        k, kind, stage, parity, issued, landed, landed_parity,
                    )  # fmt: skip


@cute.jit
def produce_step(
    k: cutlass.Constexpr,
    attention: cutlass.Constexpr,
    at: Int64,
    stream: Int64,
    copies: Int32,
    n_bytes: Int32,
    stage: Int32,
    parity: Int32,
    issued: Int32,
    landed: Int32,
    landed_parity: Int32,
):
    """What a DECODE step streams behind the `ahead` first copies; `copies` of phase 0 are left."""
    first, last = desc_word(k, Desc.FIRST_PHASE), desc_word(k, Desc.LAST_PHASE)
    step = ()
    if cutlass.const_expr(attention is not None):
        step = call(attention, "begin_produce", k)
    if first > 0:
        at = stream + ptx_read(
            "ld.global.nc.b64 {$w0}, [{$r0}];", [Int64], k.offsets + Int64(first) * 8
        )
        _, _, copies, n_bytes = plan_entry(k, first)
    for phase in cutlass.range(first, last, unroll=1):
        # one phase ahead, so that the look-up never holds up the stream
        _, _, more, more_bytes = plan_entry(k, cutlass.min(phase + 1, k.layers * 4))
        if cutlass.const_expr(attention is not None):
            if (phase & 3) == O:
                stage, parity, issued, landed, landed_parity = call(
                    attention, "produce_kv",
                    k, step, phase >> 2, stage, parity, issued, landed, landed_parity,
                )  # fmt: skip
        at, stage, parity, issued, landed, landed_parity = produce(
            k.ring, at, copies, n_bytes, stage, parity, issued, landed, landed_parity
        )
        copies, n_bytes = more, more_bytes
    return stage, parity, issued, landed, landed_parity


# -- the consumers -----------------------------------------------------------------------------
@cute.jit
def run_consumers(k: cutlass.Constexpr, attention: cutlass.Constexpr, prompt: cutlass.Constexpr):
    """Steps until LEAVE. Carried from step to step: the place in the ring, the partial-sum buffer,
    commands given to the janitor, rows of the last layer that ran, its copy and the next."""
    tag, turn, running = first_tag(k), Int32(0), Boolean(True)
    stage, parity, which = Int32(0), Int32(0), Int32(0)
    count, dirty, before, cur = Int32(0), Int32(0), last_copy(k), k.act
    while running:
        pass_gate(k, tag, turn)
        tag, turn = tag + 1, turn ^ 1
        kind = desc_word(k, Desc.KIND)
        if kind == int(Segment.DECODE):
            stage, parity, which, count, dirty, before, cur = decode_step(
                k, attention, stage, parity, which, count, dirty, before, cur
            )
        elif kind == int(Segment.LEAVE):
            tell_janitor(k, dirty | LEAVING, count)
            sync.wait_parity(k.cleared, count & 1)
            running = Boolean(False)
        else:
            if cutlass.const_expr(prompt is not None):
                stage, parity = skip(k.ring, stage, parity, prefetched(k))
                stage, parity = call(prompt, "run_prompt", k, kind, stage, parity)
        note_phase(k, Int32(0))
        if (kind != int(Segment.DECODE)) & (kind != int(Segment.ROWS)):
            sync.consumer_sync(k.c.warps * 32)
            if k.tid == 0:
                sync.red_release(k.board + Int64(int(Board.DONE) * 4), Uint32(1))


@cute.jit
def decode_step(
    k: cutlass.Constexpr,
    attention: cutlass.Constexpr,
    stage: Int32,
    parity: Int32,
    which: Int32,
    count: Int32,
    dirty: Int32,
    before: Int64,
    cur: Int64,
):
    """See the module's docstring. before, cur: copies of the layer before and of this one."""
    c, b = k.c, Buffers.of(k.c)
    qkv, o, gu, down, lm = c.gemms
    rows = desc_word(k, Desc.ROWS)
    first, last = desc_word(k, Desc.FIRST_PHASE), desc_word(k, Desc.LAST_PHASE)
    if first > 0:
        stage, parity = skip(k.ring, stage, parity, prefetched(k))
    tile0, n, _, _ = plan_entry(k, Int32(O))
    load_residual(k, rows, tile0, n)
    if cutlass.const_expr(attention is not None):
        call(attention, "begin_step", k, rows)
    sync.consumer_sync(c.warps * 32)
    stats, logits = head.new_stats(), arg(k, Arg.LOGITS)

    for phase in cutlass.range(first, last, unroll=1):
        note_phase(k, phase + 1)
        kind, layer = phase & 3, phase >> 2
        if layer == k.layers:
            stage, parity, which = run_phase(
                k, lm, rows, phase, before + b.x, logits, cur, stats, dirty, count,
                stage, parity, which,
            )  # fmt: skip
        elif kind == QKV:
            stage, parity, which = run_phase(
                k, qkv, rows, phase, before + b.x, cur + b.q, cur, stats, dirty, count,
                stage, parity, which,
            )  # fmt: skip
        elif kind == O:
            if cutlass.const_expr(attention is not None):
                stage, parity = call(attention, "run_attention", k, rows, layer, cur, stage, parity)
            src = cur + (b.a if c.attention else b.q)
            stage, parity, which = run_phase(
                k, o, rows, phase, src, cur + b.y, cur, stats, dirty, count,
                stage, parity, which,
            )  # fmt: skip
        elif kind == GU:
            stage, parity, which = run_phase(
                k, gu, rows, phase, cur + b.y, cur + b.h, cur, stats, dirty, count,
                stage, parity, which,
            )  # fmt: skip
            count, dirty = (count & 1) + 1, rows
        else:
            stage, parity, which = run_phase(
                k, down, rows, phase, cur + b.h, cur + b.x, cur + b.parts, stats, dirty, count,
                stage, parity, which,
            )  # fmt: skip
            before, cur = cur, next_copy(k, cur)
    sync.consumer_sync(c.warps * 32)
    whole = (first == 0) & (last == k.layers * 4 + 1)
    if whole == False:  # noqa: E712 - a run-time value; a test reads the buffers
        dirty = Int32(0)
    if count > 0:
        sync.wait_parity(k.cleared, (count - 1) & 1)
    head.publish_results(k, rows, stats)
    return stage, parity, which, count, dirty, before, cur


# -- the kernel --------------------------------------------------------------------------------
def parts_of(c: Config, service: str):
    """The modules that a build is made of: (attention, prompt, service)."""
    import importlib

    def module(name):
        return importlib.import_module(f"cute_kernels.gpu.{name}")

    return (
        module("attention") if c.attention else None,
        module("prompt") if c.prompt else None,
        module({"wire": "service", "script": "scripted"}[service]),
    )


def register_split(c: Config) -> tuple[int, int]:
    """(registers a thread of the others, of the consumers). They share what the block is launched
    with, no more: an increase beyond it would wait for ever."""
    at_launch, many = 65536 // c.block // 8 * 8, 224
    few = (at_launch * c.block - many * c.warps * 32) // (c.block - c.warps * 32) // 8 * 8
    return few, many


def make_kernel(c: Config, service: str = "script"):
    """Returns (jit launcher, example arguments, launch geometry).

    service: "wire" (service.py, the engine's) or "script" (scripted.py, for tests and timings).
    The one argument is the address of the table arguments.Arg.
    """
    attention, prompt, serving = parts_of(c, service)
    few, many = register_split(c)

    @cute.kernel
    def kernel(args: Int64):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        smem, k = cutlass.memory.SmemAllocator(), Core()
        block = smem.allocate_tensor(
            cutlass.Uint8, cute.make_layout(c.smem_bytes), byte_alignment=1024
        )
        places(c, k, tid, bid)
        carve(c, block.iterator.toint(), k)
        memory(c, k, args)
        init_barriers(k)
        if k.wid >= c.warps:
            if cutlass.const_expr(c.setmaxnreg):
                cute.arch.setmaxregister_decrease(few)
            if k.wid == c.warps:
                run_producer(k, attention, prompt)
            elif k.wid == c.warps + 1:
                run_janitor(k)
            elif k.wid == c.warps + 2:
                if bid == 0:
                    serving.run_service(k)
        else:
            if cutlass.const_expr(c.setmaxnreg):
                cute.arch.setmaxregister_increase(many)
            run_consumers(k, attention, prompt)

    kernel.set_name_prefix("md_kernel", keep_mangled_name=False, remove_cutlass_symbol=True)
    geometry = dict(grid=c.ctas, block=c.block, cluster=1, smem=c.smem_bytes)

    @cute.jit
    def launch(args: Int64):
        kernel(args).launch(
            grid=(c.ctas, 1, 1), block=(c.block, 1, 1), cooperative=True, min_blocks_per_mp=1,
            smem=c.smem_bytes,
        )  # fmt: skip

    return launch, [Int64(0)], geometry


assert KINDS[LM] == "lm" and KINDS[O] == "o"
