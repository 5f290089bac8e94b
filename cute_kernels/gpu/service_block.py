"""The service warp's own memory: a block in device memory that only this warp touches.

Its constants are set by the host before the first launch; everything else is the state of the wire
and of the one slot, survives parking, and is never read by the host. Free of cutlass, so that host,
device and tests share it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum

import numpy as np

from cute_kernels.gpu.board import FEW_ROWS, MAX_ROWS
from host.wire import ENTRY_WORDS, PARAMS, Wire

PARAMS_AT = 1024
MARKS_AT = PARAMS_AT + PARAMS.itemsize


class Stage(IntEnum):
    """What the slot is doing."""

    FREE = 0
    PREFILL = 1  # `KV_TOKENS` of the prompt are in the pages, the first token is not out
    DECODE = 2


class Own(IntEnum):
    """Index of an int64 word of the block.

    Counters are compared by signed distance and may start anywhere.
    """

    # Constants
    CONTROL = 0  # device addresses of the parts of the wire
    REQUEST = 1
    COMPLETION = 2
    ABORT = 3
    POOL = 4
    TOKENS = 5  # device address of the prompt's tokens, int32 by absolute position
    REQUEST_MASK = 6  # entries - 1
    COMPLETION_ENTRIES = 7
    ABORT_MASK = 8
    INFLIGHT = 9  # most requests in flight, a power of two
    CTX = 10
    PAGES = 11
    PARK_AFTER_NS = 12  # negative: never
    # The drafter: 0 throughout without one
    DRAFT_BLOCK = 16  # rows of a block, the anchor included
    DRAFTED = 17  # positions a block predicts, at most 15
    FIRST_DRAFTED = 18  # first row of a block that predicts: 1, or 0 where the anchor does too
    MASK_TOKEN = 19
    BUDGET = 20  # nodes of a tree, at most board.MAX_ROWS - 1
    CHAIN = 21  # 1: chains only
    DRAFT_LAST = 22  # end of the drafter's phases: set at a launch
    # The wire
    COMPLETION_TAIL = 24
    REQUEST_HEAD = 25
    ABORT_HEAD = 26
    PENDING_HEAD = 27
    PENDING_TAIL = 28
    ABORTS_SEEN = 29  # marks not yet looked for in the slot and the pending list
    STEP = 30
    PAUSED = 31
    COMMAND = 32  # as of the last look at the control block
    COMPLETION_HEAD = 33
    ABORT_TAIL = 34
    REQUEST_SEQUENCE = 35  # of the entry at REQUEST_HEAD
    CLOCK_OFFSET = 36  # device clock - host clock, see control.note_clock
    CLOCK_AT = 37  # device time up to which drift is allowed for; 0: no estimate yet
    # The launch and its steps
    TAG = 40  # of the last descriptor
    DONE = 41  # what Board.DONE will be when the last step is finished
    FLIGHT = 42  # board.Segment of the step that runs; 0: none
    FLIGHT_ROWS = 43  # its rows
    IDLE_SINCE = 44
    WAS_PAUSED = 45
    SINCE = 46  # when the wait for the CTAs began, or one of them last entered a phase
    BEAT = 47  # when the host was last shown where they are
    PROGRESS = 48  # sum of the CTAs' phases as of then
    OPENED = 49  # when the first descriptor of the request's step was out
    # The slot
    REQUEST_ID = 52
    STAGE = 53
    PROMPT_TOKENS = 54
    COPIED = 55  # of the prompt, from the request pool
    KV_TOKENS = 56  # positions in the pages
    NEW_TOKENS = 57  # emitted
    MAX_NEW = 58  # already cut to the context length
    MIN_NEW = 59
    BLOCK = 60
    STEPS = 61  # steps that gave the request a token
    PAUSES = 62
    STOP_COUNT = 63
    NEWEST = 64  # the last token, whose keys and values are not in the pages yet
    DECIDES = 65  # 1: the request samples, has biases or asks for alternatives
    LOGPROBS = 66  # alternatives with every token
    ENTRIES = 67  # completion entries that a step can write for the request
    CONTEXT = 68  # tokens of the last step, new to the drafter; their rows are at PATH_AT
    # The split of a step's time, as the host is shown it from Word.SPLIT_STEPS on: totals
    SPLIT_STEPS = 72
    SPLIT_DRAFTED = 73
    SPLIT_ROWS = 74
    SPLIT_TOKENS = 75
    SPLIT_COMPACT = 76
    SPLIT_DRAFT = 77
    SPLIT_TREE = 78
    SPLIT_VERIFY = 79
    SPLIT_DECIDE = 80
    SPLIT_TOTAL = 81


SPLITS = 10
PATH_AT = 8 * 84  # int32 [16]: rows of the last step's tree that its tokens came from
assert Own.SPLIT_TOTAL - Own.SPLIT_STEPS == SPLITS - 1
assert 8 * (max(Own) + 1) <= PATH_AT and PATH_AT + 64 <= PARAMS_AT


def block_bytes(inflight: int) -> int:
    """Size of the block: words, the request's PARAMS, abort marks, the pending list."""
    return MARKS_AT + 8 * inflight * (1 + ENTRY_WORDS)


def make_block(constants: Mapping[Own, int], *, first_sequence: int = 0) -> np.ndarray:
    """The block's first contents, int64; ring counters start at `first_sequence`. ValueError for
    constants that cannot be."""
    inflight = constants[Own.INFLIGHT]
    if inflight < 1 or inflight & (inflight - 1):
        raise ValueError(f"{inflight} requests in flight; it must be a power of two")
    rows, nodes = constants.get(Own.DRAFT_BLOCK, 0), constants.get(Own.BUDGET, 0)
    if not 0 <= rows <= FEW_ROWS or not 0 <= nodes < MAX_ROWS:
        raise ValueError(
            f"a block of {rows} rows and trees of {nodes} nodes; a step has at most {FEW_ROWS} and "
            f"{MAX_ROWS} rows"
        )
    block = np.zeros(block_bytes(inflight) // 8, np.int64)
    for counter in (Own.COMPLETION_TAIL, Own.REQUEST_HEAD, Own.ABORT_HEAD):
        block[counter] = first_sequence
    for word, value in constants.items():
        block[word] = value
    if not rows or not nodes:
        block[Own.DRAFTED] = 0  # nothing is drafted
    return block


def wire_constants(
    wire: Wire,
    address: Callable[[np.ndarray], int],
    *,
    ctx: int,
    pages: int,
    park_after_ns: int,
    tokens: int,
) -> dict[Own, int]:
    """The block's constants for a wire whose arrays the device finds at `address(array)`, and the
    device address `tokens` of `ctx` + 256 int32."""
    return {
        Own.CONTROL: address(wire.control),
        Own.REQUEST: address(wire.request_words),
        Own.COMPLETION: address(wire.completion_words),
        Own.ABORT: address(wire.abort),
        Own.POOL: address(wire.pool),
        Own.REQUEST_MASK: len(wire.request) - 1,
        Own.COMPLETION_ENTRIES: len(wire.completion),
        Own.ABORT_MASK: len(wire.abort) - 1,
        Own.INFLIGHT: len(wire.abort) // 2,
        Own.CTX: ctx,
        Own.PAGES: pages,
        Own.PARK_AFTER_NS: park_after_ns,
        Own.TOKENS: tokens,
    }
