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

A DRAFT step: compaction, the drafter's context (context.py), then its layers through the same code
as the target's, only attention is another, and its head; the tree of its candidates. Behind it, and
behind every step whose rows are to be decided, CTA r takes the results of row r. PROMPT and ROWS:
prompt.py. What the producer begins before it is told what the step is: producer.py.

Activation buffers rotate, and what was read is set back to EMPTY: janitor.py.

Steps that start after or stop before a phase are for tests: [FIRST_PHASE, LAST_PHASE) runs, the
residual begins with the rows' embeddings, the first layer that runs uses copy 0 (and reads x of a
layer before it from copy 2). Such a step is the only one of its launch, nothing is cleared, and act
must be set to EMPTY before the next.
"""

import importlib

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from cute_kernels.gpu import head, sync
from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.board import Board, Desc, Segment, Stamp
from cute_kernels.gpu.config import KINDS, Config
from cute_kernels.gpu.context import feature_address, tap_of
from cute_kernels.gpu.core import (
    arg,
    block_phase,
    call,
    desc_word,
    init_barriers,
    memory,
    note_phase,
    note_time,
)
from cute_kernels.gpu.embed import load_residual
from cute_kernels.gpu.entry import enter, launcher, register_split
from cute_kernels.gpu.gemm import plan_entry, run_phase
from cute_kernels.gpu.janitor import LEAVING, last_copy, next_copy, run_janitor, tell_janitor
from cute_kernels.gpu.producer import guess, prefetched, run_producer, start_of
from cute_kernels.gpu.ring import skip
from cute_kernels.gpu.tiles import Buffers

QKV, O, GU, DOWN, LM = range(5)


# -- the gate ----------------------------------------------------------------------------------
def first_tag(k):
    """Of this launch: one more than the last of the launch before."""
    return sync.ld_acquire(k.board + Int64(int(Board.FIRST_TAG) * 4)) + 1


@cute.jit
def pass_gate(k: cutlass.Constexpr, tag: Int32, turn: Int32):
    """Consumer warps: wait, without a limit, for the descriptor with that tag. Not before all of
    them are done with the last one, which this overwrites: a late warp would decide rows of the
    next step, and be missing where that begins."""
    sync.consumer_sync(k.c.warps * 32)
    if k.wid == 0:
        sync.wait_tag(k.board + Int64(int(Board.DESC) * 4), tag)
        if k.lane < 24:
            words = sync.ld_words(k.board + Int64(int(Board.DESC) * 4) + Int64(k.lane * 16))
            sync.sts_words(k.desc + k.lane * 16, words)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            sync.arrive(k.told)
    sync.wait_parity_idle(k.told, turn & 1)
    note_time(k, Int32(int(Stamp.GATE)))


# -- the consumers -----------------------------------------------------------------------------
@cute.jit
def run_consumers(k: cutlass.Constexpr, parts: cutlass.Constexpr):
    """Steps until LEAVE. Carried from step to step: the phase whose first copies the producer has
    begun, the place in the ring, the partial-sum buffer, commands given to the janitor, rows of the
    last layer that ran, its copy and the next."""
    tag, turn, running, ahead = first_tag(k), Int32(0), Boolean(True), Int32(0)
    stage, parity, which = Int32(0), Int32(0), Int32(0)
    count, dirty, before, cur = Int32(0), Int32(0), last_copy(k), k.act
    while running:
        pass_gate(k, tag, turn)
        tag, turn = tag + 1, turn ^ 1
        kind, rows = desc_word(k, Desc.KIND), desc_word(k, Desc.ROWS)
        if start_of(k, kind, desc_word(k, Desc.FIRST_PHASE)) != ahead:
            stage, parity = skip(k.ring, stage, parity, prefetched(k, ahead))
        ahead = guess(k)
        drafts, has_results = Boolean(False), kind == int(Segment.DECODE)
        if cutlass.const_expr(k.c.draft):
            drafts = kind == int(Segment.DRAFT)
            if drafts:
                stage, parity, which = prepare_draft(k, parts, stage, parity, which)
            has_results = has_results | (drafts & (rows > 0))
        if has_results:
            stage, parity, which, count, dirty, before, cur = decode_step(
                k, parts, drafts, stage, parity, which, count, dirty, before, cur
            )
            if cutlass.const_expr(k.c.draft):
                if drafts:
                    grow_tree(k, parts)
        elif kind == int(Segment.LEAVE):
            tell_janitor(k, dirty | LEAVING, count)
            sync.wait_parity(k.cleared, count & 1)
            running = Boolean(False)
        else:
            if cutlass.const_expr(parts.prompt is not None):
                if drafts == False:  # noqa: E712 - a run-time value
                    stage, parity = call(parts.prompt, "run_prompt", k, kind, stage, parity)
        # of DECODE and ROWS; what stands there in a LEAVE step is the last step's
        if (desc_word(k, Desc.DECIDE) != 0) & (kind != int(Segment.LEAVE)):
            call(parts.decide, "decide_rows", k)
        note_phase(k, Int32(0))
        if (has_results == False) & (kind != int(Segment.ROWS)):  # noqa: E712
            sync.consumer_sync(k.c.warps * 32)
            if k.tid == 0:
                sync.red_release(k.board + Int64(int(Board.DONE) * 4), Uint32(1))


@cute.jit
def prepare_draft(k: cutlass.Constexpr, parts: cutlass.Constexpr, stage: Int32, parity: Int32,
                  which: Int32):  # fmt: skip
    """What comes before the block: accepted rows to their places, the drafter's context."""
    call(parts.compact, "compact", k)
    note_time(k, Int32(int(Stamp.COMPACTED)))
    stage, parity, which = call(parts.context, "run_context", k, stage, parity, which)
    note_time(k, Int32(int(Stamp.CONTEXT)))
    return stage, parity, which


@cute.jit
def grow_tree(k: cutlass.Constexpr, parts: cutlass.Constexpr):
    """What comes behind the block's head."""
    call(parts.rank, "rank_rows", k)
    call(parts.tree, "grow_tree", k)


@cute.jit
def decode_step(
    k: cutlass.Constexpr,
    parts: cutlass.Constexpr,
    drafts: Boolean,
    stage: Int32,
    parity: Int32,
    which: Int32,
    count: Int32,
    dirty: Int32,
    before: Int64,
    cur: Int64,
):
    """Up to 16 rows through the target's layers and its head, or (drafts) through the drafter's;
    see the module's docstring. before, cur: copies of the layer before and of this one."""
    c, b = k.c, Buffers.of(k.c)
    qkv, o, gu, down, lm = c.gemms
    rows = desc_word(k, Desc.ROWS)
    first, last = desc_word(k, Desc.FIRST_PHASE), desc_word(k, Desc.LAST_PHASE)
    base, layers = Int32(0), k.layers
    tap, features, tap_table = Int32(-1), Int64(0), Int64(0)
    if cutlass.const_expr(c.draft):
        features, tap_table = arg(k, Arg.FEATURES), arg(k, Arg.TAP_OF)
        if drafts:
            base, layers = block_phase(k), k.draft_layers
            first = base
    tile0, n, _, _ = plan_entry(k, Int32(O))
    load_residual(k, rows, tile0, n)
    begin_attention(k, parts, drafts, rows)
    sync.consumer_sync(c.warps * 32)
    stats = head.new_stats()

    for phase in cutlass.range(first, last, unroll=1):
        note_phase(k, phase + 1)
        kind, layer = (phase - base) & 3, (phase - base) >> 2
        if layer == layers:
            logits, norm = head_ends(k, drafts)
            stage, parity, which = run_phase(
                k, lm, rows, phase, before + b.x, logits, norm, stats, dirty, count,
                stage, parity, which,
            )  # fmt: skip
        elif kind == QKV:
            src = before + b.x
            if layer == 0:
                src = Int64(0)
            stage, parity, which = run_phase(
                k, qkv, rows, phase, src, cur + b.q, cur, stats, dirty, count,
                stage, parity, which,
            )  # fmt: skip
        elif kind == O:
            stage, parity = attend(k, parts, drafts, rows, layer, cur, stage, parity)
            src = cur + (b.a if c.attention else b.q)
            stage, parity, which = run_phase(
                k, o, rows, phase, src, cur + b.y, cur, stats, dirty, count,
                stage, parity, which,
            )  # fmt: skip
        elif kind == GU:
            if cutlass.const_expr(c.draft):  # early: its latency is hidden behind the phase
                tap = Int32(-1)
                if drafts == False:  # noqa: E712 - a run-time value
                    tap = tap_of(k, layer, tap_table)
            stage, parity, which = run_phase(
                k, gu, rows, phase, cur + b.y, cur + b.h, cur, stats, dirty, count,
                stage, parity, which,
            )  # fmt: skip
            count, dirty = (count & 1) + 1, rows
        else:
            to = feature_address(k, features, tap)
            stage, parity, which = run_phase(
                k, down, rows, phase, cur + b.h, cur + b.x, cur + b.parts, stats, dirty, count,
                stage, parity, which, to,
            )  # fmt: skip
            before, cur = cur, next_copy(k, cur)
    sync.consumer_sync(c.warps * 32)
    whole = (first == base) & (last == base + layers * 4 + 1)
    if whole == False:  # noqa: E712 - a run-time value; a test reads the buffers
        dirty = Int32(0)
    if count > 0:
        sync.wait_parity(k.cleared, (count - 1) & 1)
    note_time(k, sync.select_int(drafts, Int32(int(Stamp.DRAFTED)), Int32(int(Stamp.HEAD))))
    head.publish_results(k, rows, stats)
    return stage, parity, which, count, dirty, before, cur


@cute.jit
def head_ends(k: cutlass.Constexpr, drafts: Boolean):
    """(logits, final norm) of the target or of the drafter. Here, not carried through the layers:
    registers are short."""
    logits, norm = arg(k, Arg.LOGITS), arg(k, Arg.FINAL_NORM)
    if cutlass.const_expr(k.c.draft):
        if drafts:
            logits, norm = arg(k, Arg.DRAFT_LOGITS), arg(k, Arg.DRAFT_NORM)
    return logits, norm


@cute.jit
def begin_attention(k: cutlass.Constexpr, parts: cutlass.Constexpr, drafts: Boolean, rows: Int32):
    if cutlass.const_expr(parts.attention is not None):
        if drafts == False:  # noqa: E712 - a run-time value
            call(parts.attention, "begin_step", k, rows)
    if cutlass.const_expr(k.c.draft):
        if drafts:
            call(parts.draft_attention, "begin_step", k, rows)


@cute.jit
def attend(k: cutlass.Constexpr, parts: cutlass.Constexpr, drafts: Boolean, rows: Int32,
           layer: Int32, cur: Int64, stage: Int32, parity: Int32):  # fmt: skip
    """Between qkv and o."""
    if cutlass.const_expr(parts.attention is not None):
        if drafts == False:  # noqa: E712 - a run-time value
            stage, parity = call(
                parts.attention, "run_attention", k, rows, layer, cur, stage, parity
            )
    if cutlass.const_expr(k.c.draft):
        if drafts:
            stage, parity = call(
                parts.draft_attention, "run_attention", k, rows, layer, cur, stage, parity
            )
    return stage, parity


# -- the kernel --------------------------------------------------------------------------------
class Parts:
    """The modules that a build is made of; None where it does without."""

    def __init__(self, c: Config, service: str) -> None:
        def module(name: str, wanted: bool = True):
            return importlib.import_module(f"cute_kernels.gpu.{name}") if wanted else None

        self.attention, self.prompt = module("attention", c.attention), module("prompt", c.prompt)
        self.decide = module("decide")
        self.context, self.draft_attention, self.compact, self.rank, self.tree = (
            module(name, c.draft)
            for name in ("context", "draft_attention", "compact", "rank", "tree")
        )
        self.service = module({"wire": "service", "script": "scripted"}[service])


def make_kernel(c: Config, service: str = "script"):
    """Returns (jit launcher, example arguments, launch geometry).

    service: "wire" (service.py, the engine's) or "script" (scripted.py, for tests and timings).
    The one argument is the address of the table arguments.Arg.
    """
    parts = Parts(c, service)
    few, many = register_split(c)

    @cute.kernel
    def kernel(args: Int64):
        k = enter(c)
        memory(c, k, args)
        init_barriers(k)
        if k.wid >= c.warps:
            if cutlass.const_expr(c.setmaxnreg):
                cute.arch.setmaxregister_decrease(few)
            if k.wid == c.warps:
                run_producer(k, parts)
            elif k.wid == c.warps + 1:
                run_janitor(k)
            elif k.wid == c.warps + 2:
                if k.bid == 0:
                    parts.service.run_service(k)
        else:
            if cutlass.const_expr(c.setmaxnreg):
                cute.arch.setmaxregister_increase(many)
            run_consumers(k, parts)

    return launcher(c, kernel, "md_kernel")


assert KINDS[LM] == "lm" and KINDS[O] == "o"
