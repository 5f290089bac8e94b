"""What the CPU device remembers between steps: slots, the pending list, free pages, counters.

All of it is device state: the host never reads or writes these arrays. It survives parking.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from host.wire import MAX_STOP_IDS, REQUEST


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
        ("abort", "i4"),
        ("prompt_tokens", "i4"),
        ("copied_tokens", "i4"),  # of the prompt, from the request pool into `tokens`
        ("kv_tokens", "i4"),  # committed positions: tokens - 1 once the first token is out
        ("new_tokens", "i4"),  # emitted
        ("max_new_tokens", "i4"),  # already cut to the context length
        ("block", "i4"),
        ("pages", "i4"),
        ("steps", "i4"),  # steps that gave this request tokens
        ("pauses", "i4"),  # times the loop stood still because the completion ring was full
        ("stop_count", "i4"),
        ("stop_ids", "i4", (MAX_STOP_IDS,)),
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


class Limits(NamedTuple):
    """Parameters of the loop."""

    ctx: int  # positions a request may use
    decode_rows: int  # decode rows per step
    chunk_rows: int  # prefill rows per step, a multiple of PAGE
    reserve_rows: int  # positions beyond the last token that a step may write
    worst_case: int  # completion entries one step may write
    park_after_ns: int  # idle time before the loop leaves; negative: never
    deadline_ns: int  # for every wait inside a step


class Sched(NamedTuple):
    """The scheduler's arrays. S slots, P pages, C requests in flight at most."""

    slot: np.ndarray  # [S] SLOT
    tokens: np.ndarray  # [S, ctx + 1] int32: prompt, then what was generated
    pending: np.ndarray  # [C] REQUEST: admitted in order; request_id < 0: aborted, already answered
    marks: np.ndarray  # [C] int64: request id to abort, by id modulo C
    free_pages: np.ndarray  # [P] int32 stack
    count: np.ndarray  # type: ignore[assignment]  # [Count] int64
    plant: np.ndarray  # [2] int64: operation and worker of a planted hang, -1: none (tests)


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
        pending=np.zeros(max_inflight, REQUEST),
        marks=np.zeros(max_inflight, np.int64),
        free_pages=np.arange(pages - 1, -1, -1, dtype=np.int32),
        count=count,
        plant=np.full(2, -1, np.int64),
    )
