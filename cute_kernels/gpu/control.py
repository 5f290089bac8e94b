"""The device's end of the wire: what the service warp reads from the host, and what it reports.

All 32 lanes run this code with the same values; lane 0 alone writes words and entries. `Service`
holds where everything is; what changes lives in the service warp's own block (`Own`).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.gpu import mapped, sync
from cute_kernels.gpu.board import Board
from cute_kernels.gpu.service_block import MARKS_AT, SPLITS, Own, Stage
from host.wire import (
    COMPLETION,
    ENTRY_WORDS,
    MAX_ALTERNATIVES,
    PAIRS,
    REQUEST,
    SEQUENCE_WORD,
    Command,
    CompletionKind,
    RequestKind,
    State,
    Word,
)

ENTRY = 8 * ENTRY_WORDS
TAKEN_PER_LOOK = 16
"""Requests taken in one look, so that a burst does not keep a step's results waiting."""

DRIFT_SHIFT = 14
"""Two clocks drift apart by 2^-14 (61 ppm), at most."""


class Service:
    """Where the service warp finds things, fixed for a launch. What an address is read from the
    block for is used at once: the warp has few registers."""

    def __init__(self, k, block):
        self.k, self.block, self.board, self.lane, self.ctas = k, block, k.board, k.lane, k.c.ctas

    control = property(lambda self: get(self, Own.CONTROL))
    request = property(lambda self: get(self, Own.REQUEST))
    completion = property(lambda self: get(self, Own.COMPLETION))
    abort = property(lambda self: get(self, Own.ABORT))
    pool = property(lambda self: get(self, Own.POOL))
    tokens = property(lambda self: get(self, Own.TOKENS))
    inflight = property(lambda self: get(self, Own.INFLIGHT))


# -- the warp's own words ----------------------------------------------------------------------
def get(s, which: Own):
    return mapped.ld_own(s.block + 8 * int(which))


def get_int(s, which: Own):
    """A word known to be small."""
    return Int32(get(s, which))


@cute.jit
def put(s: cutlass.Constexpr, which: cutlass.Constexpr, value):
    """Lane 0 writes, all lanes see."""
    if s.lane == 0:
        mapped.st_own(s.block + 8 * int(which), Int64(value))
    cute.arch.sync_warp()


def add(s, which: Own, amount):
    value = get(s, which) + amount
    put(s, which, value)
    return value


def mark_of(s, request_id):
    return s.block + MARKS_AT + 8 * (request_id & (s.inflight - 1))


def is_marked(s, request_id):
    """1 if the host has asked to abort this request."""
    return Int32(mapped.ld_own(mark_of(s, request_id)) == request_id)


# -- reading the host --------------------------------------------------------------------------
@cute.jit
def look(s: cutlass.Constexpr):
    """Read everything of the host's that says whether there is something to do, in one go."""
    head = get(s, Own.REQUEST_HEAD)
    at = s.control + 8 * int(Word.COMMAND)
    if s.lane == 1:
        at = s.control + 8 * int(Word.ABORT_TAIL)
    if s.lane == 2:
        at = s.control + 8 * int(Word.COMPLETION_HEAD)
    if s.lane == 3:
        at = s.request + (head & get(s, Own.REQUEST_MASK)) * ENTRY + 8 * SEQUENCE_WORD
    seen = mapped.ld_acquire(at, Int32(s.lane < 4))
    names = (Own.COMMAND, Own.ABORT_TAIL, Own.COMPLETION_HEAD, Own.REQUEST_SEQUENCE)
    for i in cutlass.range_constexpr(4):
        put(s, names[i], mapped.from_lane(seen, i))


def has_request(s):
    return get(s, Own.REQUEST_SEQUENCE) == get(s, Own.REQUEST_HEAD) + 1


def has_aborts(s):
    return get(s, Own.ABORT_TAIL) != get(s, Own.ABORT_HEAD)


@cute.jit
def drain_aborts(s: cutlass.Constexpr):
    """Take the ids in the abort ring over as marks, looked for when there is room to answer. Of
    two of one place (see host.wire) the newer one counts: the older request has ended."""
    if has_aborts(s):
        head, tail = get(s, Own.ABORT_HEAD), get(s, Own.ABORT_TAIL)
        add(s, Own.ABORTS_SEEN, tail - head)
        while head - tail < 0:
            i = head + s.lane
            request_id, place = Int64(0), -1 - s.lane
            if i - tail < 0:
                request_id = mapped.ld_word(s.abort + 8 * (i & get(s, Own.ABORT_MASK)))
                place = Int32(request_id & (s.inflight - 1))
            newest = mapped.last_lane(mapped.match(place))
            if (i - tail < 0) & (newest == s.lane):
                mapped.st_own(mark_of(s, request_id), request_id)
            cute.arch.sync_warp()
            head = head + 32
        put(s, Own.ABORT_HEAD, tail)
        if s.lane == 0:
            mapped.st_release(s.control + 8 * int(Word.ABORT_HEAD), tail)


@cute.jit
def drain_requests(s: cutlass.Constexpr, kept: Int64):
    """Move submits to the pending list and answer pings; the number of entries taken.

    The pending list has room for every request that can be in flight, so a full house never keeps
    the device from seeing what stands behind it. A ping waits for room in the completion ring,
    beyond the `kept` entries of a step that runs.
    """
    taken, more = Int32(0), Int32(0)
    if has_request(s):
        more = Int32(1)
    while more != 0:
        head = get(s, Own.REQUEST_HEAD)
        at = s.request + (head & get(s, Own.REQUEST_MASK)) * ENTRY
        word = Int64(0)
        if s.lane < ENTRY_WORDS:
            word = mapped.ld_word(at + 8 * s.lane)
        words = [mapped.from_lane(word, i) for i in range(ENTRY_WORDS)]
        request_id = mapped.field(words, REQUEST, "request_id")
        is_ping = mapped.field(words, REQUEST, "kind") == int(RequestKind.PING)
        more = Int32(1)
        if is_ping:
            if completion_room(s) - kept < 1:
                more = Int32(0)
        if more != 0:
            note_clock(s, mapped.field(words, REQUEST, "stamp_ns"))
            if is_ping:
                emit(s, CompletionKind.PONG, request_id)
            else:
                tail = get(s, Own.PENDING_TAIL)
                if s.lane < ENTRY_WORDS:
                    mapped.st_own(pending_at(s, tail) + 8 * s.lane, word)
                cute.arch.sync_warp()
                put(s, Own.PENDING_TAIL, tail + 1)
                if is_marked(s, request_id) != 0:
                    add(s, Own.ABORTS_SEEN, 1)
            put(s, Own.REQUEST_HEAD, head + 1)
            if s.lane == 0:
                mapped.st_release(s.control + 8 * int(Word.REQUEST_HEAD), head + 1)
            taken = taken + 1
            look(s)
            if has_request(s):
                if taken == TAKEN_PER_LOOK:
                    more = Int32(0)
            else:
                more = Int32(0)
    return taken


def pending_at(s, index):
    most = s.inflight
    return s.block + MARKS_AT + 8 * most + (index & (most - 1)) * ENTRY


# -- clocks ------------------------------------------------------------------------------------
@cute.jit
def note_clock(s: cutlass.Constexpr, pushed_ns: Int64):
    """Learn the host's clock from a request's stamp.

    Device time less the stamp is the clocks' offset and the request's way here; the smallest seen
    is nearest to the offset. It is let up a little with time, since the clocks drift: by what is
    left over in whole nanoseconds, the rest of the time is kept for the next request.
    """
    now = mapped.now()
    offset, at = now - pushed_ns, now
    before, since = get(s, Own.CLOCK_OFFSET), get(s, Own.CLOCK_AT)
    if since != 0:
        drift = (now - since) >> DRIFT_SHIFT
        if before + drift < offset:
            offset, at = before + drift, since + (drift << DRIFT_SHIFT)
    put(s, Own.CLOCK_OFFSET, offset)
    put(s, Own.CLOCK_AT, at)


def host_time(s):
    """Now, as the host's clock has it."""
    return mapped.now() - get(s, Own.CLOCK_OFFSET)


# -- completions -------------------------------------------------------------------------------
def completion_room(s):
    """Free entries of the completion ring, as of the last look."""
    used = get(s, Own.COMPLETION_TAIL) - get(s, Own.COMPLETION_HEAD)
    return get(s, Own.COMPLETION_ENTRIES) - used


@cute.jit
def emit(s: cutlass.Constexpr, kind: cutlass.Constexpr, request_id, **values):
    """Write a completion entry, its sequence word last. The caller knows of room."""
    tail = get(s, Own.COMPLETION_TAIL)
    at = s.completion + (tail & (get(s, Own.COMPLETION_ENTRIES) - 1)) * ENTRY
    words = mapped.entry_words(
        COMPLETION, request_id=request_id, stamp_ns=host_time(s), step=get_int(s, Own.STEP),
        kind=Int32(int(kind)), **values,
    )  # fmt: skip
    if s.lane == 0:
        for i in cutlass.range_constexpr(0, SEQUENCE_WORD - 1, 2):
            mapped.st_pair(at + 8 * i, words[i], words[i + 1])
        mapped.st_word(at + 8 * (SEQUENCE_WORD - 1), words[SEQUENCE_WORD - 1])
        mapped.st_release(at + 8 * SEQUENCE_WORD, tail + 1)
    put(s, Own.COMPLETION_TAIL, tail + 1)


@cute.jit
def emit_tokens(
    s: cutlass.Constexpr, tokens: Int32, token: Int32, logprob: Int32, row: Int32, listed: Int64
):
    """The tokens of a step, each with its alternatives behind it, over as many entries as needed.

    Lane i holds the i-th token, the bits of its log-probability and the row it came from. listed:
    address of Arg.ALTERNATIVES.
    """
    request_id, each = get(s, Own.REQUEST_ID), get_int(s, Own.LOGPROBS) + 1
    pairs, done = tokens * each, Int32(0)
    while done < pairs:
        pair = cutlass.min(done + s.lane, pairs - 1)
        place = pair // each
        rank = pair - place * each
        mine, bits = cute.arch.shuffle_sync(token, place), cute.arch.shuffle_sync(logprob, place)
        source = cute.arch.shuffle_sync(row, place)
        if rank > 0:
            at = listed + 8 * (Int64(source) * MAX_ALTERNATIVES + rank - 1)
            mine, bits = [Int32(w) for w in sync.ld_pair_words(at)]
        emit(
            s, CompletionKind.TOKENS, request_id, pairs=cutlass.min(pairs - done, Int32(PAIRS)),
            accepted=tokens, token=[cute.arch.shuffle_sync(mine, i) for i in range(PAIRS)],
            logprob=[cute.arch.shuffle_sync(bits, i) for i in range(PAIRS)],
        )  # fmt: skip
        done = done + PAIRS


@cute.jit
def emit_terminal(s: cutlass.Constexpr, request_id, reason, new_tokens, steps, pauses, position):
    """The one last entry of a request."""
    emit(
        s, CompletionKind.TERMINAL, request_id, reason=reason,
        token=[new_tokens, steps, pauses, position],
    )  # fmt: skip


# -- reports -----------------------------------------------------------------------------------
@cute.jit
def heartbeat(s: cutlass.Constexpr, activity: Int32, rows: Int32):
    """Show the host that the loop turns, what it does, what is free, and, now and then while steps
    run, where they spend their time."""
    if s.lane == 0:
        is_free = Int64(0)
        if get(s, Own.STAGE) == int(Stage.FREE):
            is_free = Int64(1)
        pending = get(s, Own.PENDING_TAIL) - get(s, Own.PENDING_HEAD)
        _show(s, Word.FREE_SLOTS, is_free, Word.PENDING, pending)
        _show(s, Word.ROWS, Int64(rows), Word.FREE_PAGES, is_free * get(s, Own.PAGES))
        _show(s, Word.ACTIVITY, Int64(activity), Word.PAUSES, get(s, Own.PAUSED))
        _show(s, Word.HEARTBEAT, host_time(s), Word.STEP, get(s, Own.STEP))
    if (s.lane < SPLITS) & ((rows == 0) | (get_int(s, Own.STEP) & 15 == 0)):
        split = mapped.ld_own(s.block + 8 * (int(Own.SPLIT_STEPS) + Int64(s.lane)))
        mapped.st_word(s.control + 8 * (int(Word.SPLIT_STEPS) + Int64(s.lane)), split)
    cute.arch.sync_warp()


def _show(s, first: Word, value, second: Word, other):
    """Two neighbouring words of the control block."""
    assert second == first + 1 and first % 2 == 0
    mapped.st_pair(s.control + 8 * int(first), value, other)


@cute.jit
def sample_phases(s: cutlass.Constexpr):
    """Copy the CTAs' phase words to the wire: where everyone is, should the device be lost. Returns
    their sum: while a step makes headway, it changes."""
    total = Int32(0)
    for i in cutlass.range_constexpr(-(-s.ctas // 32)):
        cta = s.lane + 32 * i
        if cta < s.ctas:
            phase = Int32(sync.ld_word(s.board + Int64((int(Board.PHASE) + cta) * 4)))
            mapped.st_word(s.control + 8 * Int64(int(Word.PHASE) + 8 * cta), Int64(phase))
            total = total + phase
    return mapped.sum_lanes(total)


@cute.jit
def set_state(s: cutlass.Constexpr, state):
    if s.lane == 0:
        mapped.st_release(s.control + 8 * int(Word.STATE), Int64(state))
    cute.arch.sync_warp()


@cute.jit
def try_park(s: cutlass.Constexpr):
    """The device's half of the parking handshake; 1 when the loop must end.

    The fence stands between the store of PARKING and the last look at the host's words: either the
    host's push is seen here, or the host, which fences between its push and its look at the state,
    sees PARKING and waits for what comes of it.
    """
    set_state(s, State.PARKING)
    mapped.fence()
    look(s)
    leave = Int32(1)
    if has_request(s) | has_aborts(s) | (get(s, Own.COMMAND) != int(Command.RUN)):
        leave = Int32(0)
        set_state(s, State.RUNNING)
    return leave
