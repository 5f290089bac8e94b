"""What the CPU device remembers between steps: slots, the pending list, free pages, counters.

All of it is device state: the host never reads or writes these arrays. It survives parking.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from cute_kernels.cpu.state import MAX_DEPTH, Batch
from host.wire import MAX_ALTERNATIVES, MAX_STOP_IDS, REQUEST, SAMPLING

STEP_TOKENS = MAX_DEPTH + 1
"""Most tokens one step can commit for a slot: a whole path and the token after it."""


class Stage(IntEnum):
    """What a slot is doing."""

    FREE = 0
    PREFILL = 1
    DECODE = 2


SLOT = np.dtype(
    [
        ("request_id", "i8"),
        ("order", "i8"),  # admission number: prefill is first come, first served
        ("stage", "i4"),
        ("prompt_tokens", "i4"),
        ("copied_tokens", "i4"),  # of the prompt, from the request pool into `tokens`
        ("kv_tokens", "i4"),  # committed positions: tokens - 1 once the first token is out
        ("new_tokens", "i4"),  # emitted
        ("max_new_tokens", "i4"),  # already cut to the context length
        ("min_new_tokens", "i4"),
        ("block", "i4"),
        ("pages", "i4"),
        ("steps", "i4"),  # steps that gave this request tokens
        ("pauses", "i4"),  # times the loop stood still because the completion ring was full
        ("stop_count", "i4"),
        ("stop_ids", "i4", (MAX_STOP_IDS,)),
        # Speculation, of the current step
        ("drafts", "i4"),  # 1: this step drafts for the slot
        ("budget", "i4"),  # nodes the step may verify, the root not counted
        ("depth", "i4"),  # deepest node allowed: no token beyond the request's last is verified
        ("nodes", "i4"),  # nodes the tree got
        ("first_row", "i4"),  # of the slot's rows in the step, -1: none
        ("first_head", "i4"),  # of its rows of logits
        # and over steps
        ("rest", "i4"),  # steps for which drafting is suspended because it did not pay
        ("idle_rounds", "i4"),  # how often it was suspended in a row
        ("cost", "f4"),  # of this step's draft and nodes, in tokens
        ("profit", "f4"),  # accepted tokens less that, averaged over the last steps that drafted
        ("promised", "f4"),  # accepted nodes of late: what the drafter's probabilities promised,
        ("accepted", "f4"),  # and what came
    ]
)


class Count(IntEnum):
    """Index into `Sched.count`: the loop's own numbers."""

    COMPLETION_TAIL = 0
    REQUEST_HEAD = 1
    ABORT_HEAD = 2
    PENDING_HEAD = 3
    PENDING_TAIL = 4
    ABORTS_SEEN = 5  # abort marks not yet looked for in slots and pending list
    FREE_PAGES = 6
    ADMITTED = 7
    STEP = 8
    FIRST_SLOT = 9  # where the next step starts to look for decoding slots
    PREFILL_SLOT = 10  # of the current step, -1: none
    PAUSED = 11
    ENTRIES = 12  # completion entries the current step may write


class Limits(NamedTuple):
    """Parameters of the loop."""

    ctx: int  # positions a request may use
    decode_rows: int  # decode rows per step
    chunk_rows: int  # prefill rows per step, a multiple of PAGE
    reserve_rows: int  # positions beyond the last token that a step may write
    park_after_ns: int  # idle time before the loop leaves; negative: never
    deadline_ns: int  # for every wait inside a step
    block: int  # rows of a draft block, the anchor included; 0: no drafter
    drafted: int  # positions a block predicts
    mask_token: int  # what the drafted positions of a block hold
    first_drafted: int  # first row of a block that predicts: 1, or 0 where the anchor does too
    budget: int  # nodes per slot and step; AUTO: chosen each step
    chain: int  # 1: chains only


AUTO = -1
"""Budget chosen by the loop itself."""


class Sched(NamedTuple):
    """The scheduler's arrays. S slots, P pages, C requests in flight at most."""

    slot: np.ndarray  # [S] SLOT
    tokens: np.ndarray  # [S, ctx + 1] int32: prompt, then what was generated
    sampling: np.ndarray  # [S] SAMPLING: how the slot's tokens are chosen
    pending: np.ndarray  # [C] REQUEST: admitted in order
    marks: np.ndarray  # [C] int64: request id to abort, by id modulo C
    free_pages: np.ndarray  # [P] int32 stack
    count: np.ndarray  # type: ignore[assignment]  # [Count] int64
    plant: np.ndarray  # [2] int64: operation and worker of a planted hang, -1: none (tests)


class Context(NamedTuple):
    """Rows whose features the drafter has yet to make keys and values of, one segment a slot."""

    rows: Batch  # `token` is the row of the target's step whose features a position has
    request_id: np.ndarray  # [rows] int64; of length 0 without a drafter


class Decision(NamedTuple):
    """What the step decided for each slot; row k is the k-th token of the step."""

    count: np.ndarray  # type: ignore[assignment]  # [S] int32 tokens: accepted nodes + 1
    token: np.ndarray  # [S, STEP_TOKENS] int32; -1: the logits held NaN or +inf
    logprob: np.ndarray  # [S, STEP_TOKENS] float32
    alternative: np.ndarray  # [S, STEP_TOKENS, MAX_ALTERNATIVES] int32
    alternative_logprob: np.ndarray  # [S, STEP_TOKENS, MAX_ALTERNATIVES] float32
    path: np.ndarray  # [S, STEP_TOKENS] int32: the accepted rows, the root first


def make_decision(slots: int) -> Decision:
    """An empty decision."""
    several = (slots, STEP_TOKENS)
    return Decision(
        count=np.zeros(slots, np.int32),
        token=np.zeros(several, np.int32),
        logprob=np.zeros(several, np.float32),
        alternative=np.zeros((*several, MAX_ALTERNATIVES), np.int32),
        alternative_logprob=np.zeros((*several, MAX_ALTERNATIVES), np.float32),
        path=np.zeros(several, np.int32),
    )


def make_sched(
    *, slots: int, ctx: int, pages: int, max_inflight: int, first_sequence: int = 0
) -> Sched:
    """Empty scheduler state; every page is free."""
    count = np.zeros(len(Count), np.int64)
    for which in (Count.COMPLETION_TAIL, Count.REQUEST_HEAD, Count.ABORT_HEAD):
        count[which] = first_sequence
    count[Count.FREE_PAGES] = pages
    return Sched(
        slot=np.zeros(slots, SLOT),
        tokens=np.zeros((slots, ctx + 1), np.int32),
        sampling=np.zeros(slots, SAMPLING),
        pending=np.zeros(max_inflight, REQUEST),
        marks=np.zeros(max_inflight, np.int64),
        free_pages=np.arange(pages - 1, -1, -1, dtype=np.int32),
        count=count,
        plant=np.full(2, -1, np.int64),
    )
