"""The wire: what the host and a device write to each other, byte for byte.

Mapped memory in four parts (pinned for a GPU, ordinary for the CPU device):

* the *request ring* and the *completion ring*, one producer and one consumer each, 64-byte entries.
  An entry is valid for counter value c when its `sequence` word equals c + 1; the producer writes
  that word last, with release, and the consumer reads it first, with acquire. A consumer's own
  index lives in a 64-byte line of its own, so that a producer can see free space.
* the *control block* (`Word`): command, abort tail, consumer indices, device state, heartbeat.
* the *abort ring*, request ids only. It holds twice as many ids as requests can be in flight: a
  place can be aborted, end by itself, be given away and be aborted again between two looks of the
  device, and not a third time, since that needs another end. So a push never waits.
* the *request pool* that requests point into: parameters, then prompt tokens, in 256-byte blocks.

Everything a device needs to find its way is here; offsets come from the dtypes below.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import numpy as np

MAX_STOP_IDS = 32
MAX_BIAS = 300
MAX_ALTERNATIVES = 20
PAIRS = 4
"""(token id, log-probability) pairs in one completion entry."""

BLOCK_BYTES = 256
"""Grain of the request pool."""

REQUEST = np.dtype(
    [
        ("request_id", "i8"),
        ("kind", "i4"),
        ("prompt_tokens", "i4"),
        ("max_new_tokens", "i4"),
        ("block", "i4"),  # first block of the request's part of the pool
        ("blocks", "i4"),
        ("reserved", "i4", (5,)),
        ("stamp_ns", "i8"),
        ("sequence", "i8"),
    ]
)

COMPLETION = np.dtype(
    [
        ("request_id", "i8"),
        ("stamp_ns", "i8"),  # when the device wrote the entry
        ("step", "i4"),
        ("kind", "i1"),
        ("reason", "i1"),  # FinishReason, in a terminal entry
        ("pairs", "i1"),  # pairs used
        ("accepted", "i1"),  # tokens this step committed for the request, over all its entries
        ("token", "i4", (PAIRS,)),
        ("logprob", "f4", (PAIRS,)),
        ("sequence", "i8"),
    ]
)

_PARAM_FIELDS: list[tuple[str, object]] = [
    ("seed", "i8"),
    ("temperature", "f4"),  # 0: greedy
    ("top_k", "i4"),  # 0: off
    ("top_p", "f4"),  # 1: off
    ("min_p", "f4"),  # 0: off
    ("min_new_tokens", "i4"),  # stop ids do not end the request before
    ("logprobs", "i4"),  # further log-probabilities per token, the likeliest first
    ("bias_count", "i4"),
    ("stop_count", "i4"),
    ("stop_ids", ("i4", (MAX_STOP_IDS,))),
]

PARAMS = np.dtype(
    {
        "names": [name for name, _ in _PARAM_FIELDS],
        "formats": [kind for _, kind in _PARAM_FIELDS],
        "offsets": [0, *range(8, 44, 4)],
        "itemsize": BLOCK_BYTES,
    }
)
"""What a request's first pool block holds. From the next block on follow the prompt tokens (int32),
and right behind them `bias_count` token ids (int32) and as many biases (float32)."""

SAMPLING = np.dtype(
    [
        ("temperature", "f4"),  # 0: greedy
        ("top_p", "f4"),  # 1: off
        ("min_p", "f4"),  # 0: off
        ("top_k", "i4"),  # 0: off
        ("seed", "i8"),
        ("logprobs", "i4"),  # alternatives to report with each token
        ("bias_count", "i4"),
        ("bias_ids", "i4", (MAX_BIAS,)),  # no id twice; ids outside the vocabulary do nothing
        ("bias", "f4", (MAX_BIAS,)),  # -inf removes a token
    ]
)
"""How a slot's tokens are chosen: what a device makes of the parameters when it admits a request,
and reads whenever it decides. Without gaps; the two arrays begin at multiples of 16 bytes."""

assert REQUEST.itemsize == 64
assert COMPLETION.itemsize == 64
assert PARAMS.itemsize == BLOCK_BYTES


def sampling_at(field: str) -> int:
    """Byte offset of a field of SAMPLING."""
    assert SAMPLING.fields is not None
    return int(SAMPLING.fields[field][1])


assert sampling_at("bias_ids") % 16 == sampling_at("bias") % 16 == SAMPLING.itemsize % 16 == 0
ENTRY_WORDS = 8
SEQUENCE_WORD = 7
assert REQUEST.fields is not None
assert COMPLETION.fields is not None
assert REQUEST.fields["sequence"][1] == COMPLETION.fields["sequence"][1] == 8 * SEQUENCE_WORD


class RequestKind(IntEnum):
    """What a request entry asks for."""

    SUBMIT = 1
    PING = 2


class CompletionKind(IntEnum):
    """What a completion entry says."""

    TOKENS = 1  # pairs: each token of the step, and behind it the alternatives it was asked with
    TERMINAL = 2  # token[0]: tokens emitted; [1]: steps; [2]: pauses; [3]: position of an error
    COPIED = 3  # the request's pool blocks may be used again
    PONG = 4


class FinishReason(IntEnum):
    """Why a request ended."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


class Command(IntEnum):
    """What the host wants the device to do, in `Word.COMMAND`."""

    RUN = 0
    PARK = 1
    SHUTDOWN = 2


class State(IntEnum):
    """What the device is doing, in `Word.STATE`."""

    RUNNING = 0
    PARKING = 1
    PARKED = 2
    STOPPED = 3  # after SHUTDOWN
    FAULT = 4  # a wait outlived its deadline; see the FAULT words


class Activity(IntEnum):
    """What a running device found to do, in `Word.ACTIVITY`. None of these is a hang."""

    WORKING = 0
    IDLE = 1
    PAUSED = 2  # no room in the completion ring for a step's worst case


class Word(IntEnum):
    """Index of a word in the control block. Each line of eight words has one writer."""

    COMMAND = 0  # line 0, host
    ABORT_TAIL = 1
    COMPLETION_HEAD = 8  # line 1, host: completion entries taken
    REQUEST_HEAD = 16  # line 2, device: request entries taken
    ABORT_HEAD = 17
    STATE = 24  # line 3, device; the host sets RUNNING when it launches
    HEARTBEAT = 32  # line 4, device: time of the last turn of the loop
    STEP = 33
    ACTIVITY = 34
    PAUSES = 35
    ROWS = 36  # rows of the current step
    FREE_PAGES = 37
    FREE_SLOTS = 38
    PENDING = 39
    FAULT_OPERATION = 40  # line 5, device: where a wait ran out: index into the program, or -1
    FAULT_WORKERS = 41  # four words: bit mask of the workers that had not arrived
    SPLIT_STEPS = 48  # lines 6 and 7, device: totals over all steps that gave tokens; see below
    SPLIT_DRAFTED = 49  # of these, steps that drafted
    SPLIT_ROWS = 50  # rows verified, the roots counted
    SPLIT_TOKENS = 51  # tokens given
    SPLIT_COMPACT = 52  # ns: keys and values of accepted rows to their places
    SPLIT_DRAFT = 53  # ns: the drafter's context, its block, its head
    SPLIT_TREE = 54  # ns: ranks and tree
    SPLIT_VERIFY = 55  # ns: the target over the tree's rows, up to the head's last sums
    SPLIT_DECIDE = 56  # ns: from there to the next descriptor: decisions, walk, stop rules
    SPLIT_TOTAL = 57  # ns: from a step's first descriptor to the next step's, pauses left out
    PHASE = 64  # from line 8 on, one line a worker: 1 + index of the operation it is in, 0 outside


class Wire(NamedTuple):
    """The four parts as arrays that numba and numpy share. Lengths of rings are powers of two."""

    control: np.ndarray  # int64
    request: np.ndarray  # REQUEST
    request_words: np.ndarray  # int64 view of the same memory
    completion: np.ndarray  # COMPLETION
    completion_words: np.ndarray  # int64 view
    abort: np.ndarray  # int64, request ids
    pool: np.ndarray  # int32 view of the pool
    pool_floats: np.ndarray  # float32 view of the pool
    params: np.ndarray  # PARAMS view of the pool, one per block


def step_worst_case(slots: int, tokens_per_step: int, alternatives: int = 0) -> int:
    """Completion entries one step can write: per slot its tokens, each with its alternatives, and
    its terminal entry, and one acknowledgement of a copied prompt."""
    return slots * (-(-tokens_per_step * (1 + alternatives) // PAIRS) + 1) + 1


def zeroed_lines(words: int) -> np.ndarray:
    """Zeroed int64 words of ordinary memory that start on a 64-byte line."""
    raw = np.zeros(words + 8, np.int64)
    skip = (-raw.ctypes.data % 64) // 8
    return raw[skip : skip + words]


def make_wire(
    *,
    slots: int,
    workers: int,
    ctx: int,
    max_inflight: int,
    tokens_per_step: int = 1,
    alternatives: int = 0,
    request_entries: int = 256,
    completion_entries: int = 1024,
    pool_bytes: int | None = None,
    first_sequence: int = 0,
    allocate: Callable[[int], np.ndarray] = zeroed_lines,
) -> Wire:
    """Allocate a wire; ring counters start at `first_sequence` (tests start them near a wrap).
    `allocate(words)` gives zeroed int64 words on 64-byte lines, in memory the device can reach.

    Raises ValueError when a ring is no power of two, when the completion ring cannot hold two
    steps' worst case, or when the pool cannot hold one prompt of `ctx` tokens.
    """
    for what, entries in (
        ("request_entries", request_entries),
        ("completion_entries", completion_entries),
        ("max_inflight", max_inflight),
    ):
        if entries < 1 or entries & (entries - 1):
            raise ValueError(f"{what} is {entries}; it must be a power of two")
    need = 2 * step_worst_case(slots, tokens_per_step, alternatives)
    if completion_entries < need:
        raise ValueError(
            f"completion_entries is {completion_entries}; {slots} slots need at least {need}: two "
            "steps' worst case. Use a larger ring or fewer slots"
        )
    one_prompt = BLOCK_BYTES + 4 * ctx + 8 * MAX_BIAS
    if pool_bytes is None:
        pool_bytes = max(2 * one_prompt, 1 << 20)
    if pool_bytes < one_prompt + BLOCK_BYTES:
        raise ValueError(
            f"pool_bytes is {pool_bytes}; one prompt of ctx={ctx} tokens needs "
            f"{one_prompt + BLOCK_BYTES}"
        )
    control = allocate(Word.PHASE + 8 * workers)
    request_words = allocate(request_entries * ENTRY_WORDS)
    completion_words = allocate(completion_entries * ENTRY_WORDS)
    pool = allocate(pool_bytes // BLOCK_BYTES * BLOCK_BYTES // 8)
    for word in (Word.ABORT_TAIL, Word.COMPLETION_HEAD, Word.REQUEST_HEAD, Word.ABORT_HEAD):
        control[word] = first_sequence
    # No entry may look valid for a counter value that has not been written yet.
    request_words[SEQUENCE_WORD::ENTRY_WORDS] = first_sequence - 1
    completion_words[SEQUENCE_WORD::ENTRY_WORDS] = first_sequence - 1
    return Wire(
        control=control,
        request=request_words.view(REQUEST),
        request_words=request_words,
        completion=completion_words.view(COMPLETION),
        completion_words=completion_words,
        abort=allocate(2 * max_inflight),
        pool=pool.view(np.int32),
        pool_floats=pool.view(np.float32),
        params=pool.view(PARAMS),
    )
