"""The service warp's own memory: a block in device memory that only this warp touches.

Its constants are set by the host before the first launch; everything else is the state of the wire
and of the one slot, survives parking, and is never read by the host. Free of cutlass, so that host,
device and tests share it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum

import numpy as np

from host.wire import ENTRY_WORDS, PARAMS, Wire

PARAMS_AT = 512
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
    REQUEST_MASK = 5  # entries - 1
    COMPLETION_ENTRIES = 6
    ABORT_MASK = 7
    INFLIGHT = 8  # most requests in flight, a power of two
    CTX = 9
    PAGES = 10
    PARK_AFTER_NS = 11  # negative: never
    TOKENS = 31  # device address of the prompt's tokens, int32 by absolute position
    # The wire
    COMPLETION_TAIL = 12
    REQUEST_HEAD = 13
    ABORT_HEAD = 14
    PENDING_HEAD = 15
    PENDING_TAIL = 16
    ABORTS_SEEN = 17  # marks not yet looked for in the slot and the pending list
    STEP = 18
    PAUSED = 19
    COMMAND = 20  # as of the last look at the control block
    COMPLETION_HEAD = 21
    ABORT_TAIL = 22
    REQUEST_SEQUENCE = 23  # of the entry at REQUEST_HEAD
    CLOCK_OFFSET = 24  # device clock - host clock, see control.note_clock
    CLOCK_AT = 25  # device time of the last estimate; 0: none yet
    # The launch and its steps
    TAG = 26  # of the last descriptor
    DONE = 27  # what Board.DONE will be when the last step is finished
    FLIGHT = 28  # board.Segment of the step that runs; 0: none
    IDLE_SINCE = 29
    WAS_PAUSED = 30
    SINCE = 46  # when the wait for the CTAs began
    BEAT = 47  # when the host was last shown where they are
    # The slot
    REQUEST_ID = 32
    STAGE = 33
    PROMPT_TOKENS = 34
    COPIED = 35  # of the prompt, from the request pool
    KV_TOKENS = 36  # positions in the pages
    NEW_TOKENS = 37  # emitted
    MAX_NEW = 38  # already cut to the context length
    MIN_NEW = 39
    BLOCK = 40
    STEPS = 41  # steps that gave the request a token
    PAUSES = 42
    STOP_COUNT = 43
    NEWEST = 44  # the last token, whose keys and values are not in the pages yet
    FLIGHT_ROWS = 45  # rows of the step that runs


assert 8 * (max(Own) + 1) <= PARAMS_AT


def block_bytes(inflight: int) -> int:
    """Size of the block: words, the request's PARAMS, abort marks, the pending list."""
    return MARKS_AT + 8 * inflight * (1 + ENTRY_WORDS)


def make_block(constants: Mapping[Own, int], *, first_sequence: int = 0) -> np.ndarray:
    """The block's first contents, int64; ring counters start at `first_sequence`."""
    inflight = constants[Own.INFLIGHT]
    if inflight < 1 or inflight & (inflight - 1):
        raise ValueError(f"{inflight} requests in flight; it must be a power of two")
    block = np.zeros(block_bytes(inflight) // 8, np.int64)
    for counter in (Own.COMPLETION_TAIL, Own.REQUEST_HEAD, Own.ABORT_HEAD):
        block[counter] = first_sequence
    for word, value in constants.items():
        block[word] = value
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
