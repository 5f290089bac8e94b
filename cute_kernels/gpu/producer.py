"""The producer warp: weights and KV blocks into the ring, in the order in which a step takes them.

Weights do not depend on tokens: before it is told what the next step is, the producer issues the
first copies of the kind that the step before has guessed (Desc.NEXT; after a launch DECODE), as far
as the ring goes. KV and everything else only after. Where the guess was wrong the consumers give
those stages back unread; on LEAVE what was issued is waited for.

It reads all that it needs of a descriptor before its last copies of the step, or, in a DRAFT step,
before the consumers are told that it has (context.draft_begins): they overwrite it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_kernels.gpu import sync
from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.board import Desc, Segment
from cute_kernels.gpu.core import arg, block_phase, call, desc_word, draft_phase
from cute_kernels.gpu.gemm import plan_entry
from cute_kernels.gpu.ring import produce, wait_landed
from cute_kernels.gpu.sync import ptx_read

O = 1  # the phase of a layer before which its KV comes
NOTHING = -1  # in the place of a phase


# -- prefetch ------------------------------------------------------------------------------------
@cute.jit
def start_of(k: cutlass.Constexpr, kind: Int32, first: Int32):
    """The phase with whose copies a step of that kind begins, `first` of DECODE; NOTHING where they
    come in another order than the decode form's. A kind of 0 says nothing: DECODE."""
    start = Int32(NOTHING)
    if kind <= int(Segment.DECODE):
        start = first
    if cutlass.const_expr(k.c.draft):
        if kind == int(Segment.DRAFT):
            start = draft_phase(k)
    return start


def guess(k):
    """The phase that this step's descriptor lets the producer begin after the step."""
    return start_of(k, desc_word(k, Desc.NEXT), Int32(0))


@cute.jit
def prefetched(k: cutlass.Constexpr, phase: Int32):
    """Copies of a phase that are issued before the tag."""
    copies = Int32(0)
    if phase >= 0:
        _, _, copies, _ = plan_entry(k, phase)
    return cutlass.min(copies, k.ring.n)


def phase_copies(k, stream, phase):
    """(address of this CTA's weights of a phase, copies, bytes a copy)."""
    offset = ptx_read("ld.global.nc.b64 {$w0}, [{$r0}];", [Int64], k.offsets + Int64(phase) * 8)
    _, _, copies, n_bytes = plan_entry(k, phase)
    return stream + offset, copies, n_bytes


# -- the warp's life -----------------------------------------------------------------------------
@cute.jit
def run_producer(k: cutlass.Constexpr, parts: cutlass.Constexpr):
    stream = arg(k, Arg.STREAM)
    stage, parity, issued = Int32(0), Int32(0), Int32(0)
    landed, landed_parity, turn = Int32(0), Int32(0), Int32(0)
    ahead, running = Int32(0), Boolean(True)
    while running:
        at, copies, n_bytes = phase_copies(k, stream, cutlass.max(ahead, 0))
        early = prefetched(k, ahead)
        first_stage, first_parity = stage, parity
        at, stage, parity, issued, landed, landed_parity = produce(
            k.ring, at, early, n_bytes, stage, parity, issued, landed, landed_parity
        )
        copies = copies - early
        sync.wait_parity_idle(k.told, turn)
        turn = turn ^ 1
        kind = desc_word(k, Desc.KIND)
        start = start_of(k, kind, desc_word(k, Desc.FIRST_PHASE))
        if start != ahead:
            at, copies, n_bytes = phase_copies(k, stream, cutlass.max(start, 0))
        ahead = guess(k)
        if kind == int(Segment.LEAVE):
            wait_landed(k.ring, first_stage, first_parity, early)
            running = Boolean(False)
        else:
            sync.fence_async()  # the step before wrote keys and values
            if kind == int(Segment.DECODE):
                stage, parity, issued, landed, landed_parity = produce_decode(
                    k, parts, stream, start, at, copies, n_bytes,
                    stage, parity, issued, landed, landed_parity,
                )  # fmt: skip
            else:
                stage, parity, issued, landed, landed_parity = produce_other(
                    k, parts, kind, stream, at, copies, n_bytes,
                    stage, parity, issued, landed, landed_parity,
                )  # fmt: skip


@cute.jit
def produce_other(
    k: cutlass.Constexpr, parts: cutlass.Constexpr, kind: Int32, stream: Int64, at: Int64,
    copies: Int32, n_bytes: Int32, stage: Int32, parity: Int32, issued: Int32, landed: Int32,
    landed_parity: Int32,
):  # fmt: skip
    """A DRAFT, PROMPT or ROWS step."""
    drafts = Boolean(False)
    if cutlass.const_expr(k.c.draft):
        drafts = kind == int(Segment.DRAFT)
        if drafts:
            stage, parity, issued, landed, landed_parity = produce_draft(
                k, parts, stream, at, copies, n_bytes,
                stage, parity, issued, landed, landed_parity,
            )  # fmt: skip
    if cutlass.const_expr(parts.prompt is not None):
        if drafts == False:  # noqa: E712 - a run-time value
            stage, parity, issued, landed, landed_parity = call(
                parts.prompt, "produce_prompt",
                k, kind, stage, parity, issued, landed, landed_parity,
            )  # fmt: skip
    return stage, parity, issued, landed, landed_parity


# -- steps in the decode form --------------------------------------------------------------------
@cute.jit
def produce_decode(
    k: cutlass.Constexpr, parts: cutlass.Constexpr, stream: Int64, first: Int32, at: Int64,
    copies: Int32, n_bytes: Int32, stage: Int32, parity: Int32, issued: Int32, landed: Int32,
    landed_parity: Int32,
):  # fmt: skip
    """A DECODE step from phase `first` on, of which `copies` copies from `at` are left."""
    last, step = desc_word(k, Desc.LAST_PHASE), ()
    if cutlass.const_expr(parts.attention is not None):
        step = call(parts.attention, "begin_produce", k)
    for phase in cutlass.range(first, last, unroll=1):
        # one phase ahead, so that the look-up never holds up the stream
        after = phase_copies(k, stream, cutlass.min(phase + 1, last - 1))
        if cutlass.const_expr(parts.attention is not None):
            if (phase & 3) == O:
                stage, parity, issued, landed, landed_parity = call(
                    parts.attention, "produce_kv",
                    k, step, phase >> 2, stage, parity, issued, landed, landed_parity,
                )  # fmt: skip
        _, stage, parity, issued, landed, landed_parity = produce(
            k.ring, at, copies, n_bytes, stage, parity, issued, landed, landed_parity
        )
        at, copies, n_bytes = after
    return stage, parity, issued, landed, landed_parity


@cute.jit
def produce_draft(
    k: cutlass.Constexpr, parts: cutlass.Constexpr, stream: Int64, at: Int64, copies: Int32,
    n_bytes: Int32, stage: Int32, parity: Int32, issued: Int32, landed: Int32,
    landed_parity: Int32,
):  # fmt: skip
    """A DRAFT step: weights of the context, then of the block's layers and the head, with KV from
    the drafter's pages behind qkv (layer 0's waits for the new keys: context.wait_keys)."""
    block, rows = block_phase(k), desc_word(k, Desc.ROWS)
    last = cutlass.max(desc_word(k, Desc.LAST_PHASE), block + O + 1)
    call(parts.context, "draft_begins", k)
    for phase in cutlass.range(draft_phase(k), block, unroll=1):
        after = phase_copies(k, stream, phase + 1)
        _, stage, parity, issued, landed, landed_parity = produce(
            k.ring, at, copies, n_bytes, stage, parity, issued, landed, landed_parity
        )
        at, copies, n_bytes = after
    if rows > 0:
        step = call(parts.draft_attention, "begin_produce", k)
        for phase in cutlass.range(block, last, unroll=1):
            after = phase_copies(k, stream, cutlass.min(phase + 1, last - 1))
            if ((phase - block) & 3) == O:
                stage, parity, issued, landed, landed_parity = call(
                    parts.draft_attention, "produce_kv",
                    k, step, (phase - block) >> 2, stage, parity, issued, landed, landed_parity,
                )  # fmt: skip
            _, stage, parity, issued, landed, landed_parity = produce(
                k.ring, at, copies, n_bytes, stage, parity, issued, landed, landed_parity
            )
            at, copies, n_bytes = after
    return stage, parity, issued, landed, landed_parity
