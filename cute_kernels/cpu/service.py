"""The device's end of the wire: the only code of the loop that reads or writes host memory.

On a GPU this is the service warp's work; here the leader does it between steps.
"""

from __future__ import annotations

from cute_kernels.cpu.slots import Count
from host.atomics import load_acquire, now_ns, store_release
from host.jit import jit
from host.wire import ENTRY_WORDS, PAIRS, SEQUENCE_WORD, CompletionKind, RequestKind, Word

_TAIL = int(Count.COMPLETION_TAIL)
_COMPLETION_HEAD, _REQUEST_HEAD = int(Word.COMPLETION_HEAD), int(Word.REQUEST_HEAD)
_ABORT_TAIL, _ABORT_HEAD_WORD = int(Word.ABORT_TAIL), int(Word.ABORT_HEAD)
_HEARTBEAT, _STEP, _ACTIVITY = int(Word.HEARTBEAT), int(Word.STEP), int(Word.ACTIVITY)
_REQUESTS, _ABORTS, _SEEN = int(Count.REQUEST_HEAD), int(Count.ABORT_HEAD), int(Count.ABORTS_SEEN)
_PENDING_HEAD, _PENDING_TAIL = int(Count.PENDING_HEAD), int(Count.PENDING_TAIL)
_STEPS = int(Count.STEP)
_TOKENS, _TERMINAL = int(CompletionKind.TOKENS), int(CompletionKind.TERMINAL)
_COPIED, _PONG = int(CompletionKind.COPIED), int(CompletionKind.PONG)
_PING = int(RequestKind.PING)
_PAIRS = int(PAIRS)


@jit
def completion_room(wire, sched):
    """Free entries of the completion ring."""
    used = sched.count[_TAIL] - load_acquire(wire.control, _COMPLETION_HEAD)
    return wire.completion.shape[0] - used


@jit
def _open_entry(wire, sched, request_id, kind):
    """Fill the common fields of the next completion entry; its index. The caller knows of room."""
    index = sched.count[_TAIL] & (wire.completion.shape[0] - 1)
    entry = wire.completion[index]
    entry.request_id = request_id
    entry.stamp_ns = now_ns()
    entry.step = sched.count[_STEPS]
    entry.kind = kind
    entry.reason = 0
    entry.pairs = 0
    entry.accepted = 0
    return index


@jit
def _publish(wire, sched, index):
    """Make the entry valid: its sequence word is written last."""
    sched.count[_TAIL] += 1
    word = index * ENTRY_WORDS + SEQUENCE_WORD
    store_release(wire.completion_words, word, sched.count[_TAIL])


@jit
def emit_tokens(wire, sched, decision, s, request_id, tokens, alternatives):
    """The `tokens` first tokens that a step decided for slot `s`, over as many entries as needed.

    Each token is a pair of its own, followed by its `alternatives` pairs.
    """
    index = -1
    for t in range(tokens):
        for a in range(-1, alternatives):
            if index < 0:
                index = _open_entry(wire, sched, request_id, _TOKENS)
                wire.completion[index].accepted = tokens
            entry = wire.completion[index]
            if a < 0:
                entry.token[entry.pairs] = decision.token[s, t]
                entry.logprob[entry.pairs] = decision.logprob[s, t]
            else:
                entry.token[entry.pairs] = decision.alternative[s, t, a]
                entry.logprob[entry.pairs] = decision.alternative_logprob[s, t, a]
            entry.pairs += 1
            if entry.pairs == _PAIRS:
                _publish(wire, sched, index)
                index = -1
    if index >= 0:
        _publish(wire, sched, index)


@jit
def emit_terminal(wire, sched, request_id, reason, new_tokens, steps, pauses, position):
    """The one last entry of a request."""
    index = _open_entry(wire, sched, request_id, _TERMINAL)
    entry = wire.completion[index]
    entry.reason = reason
    entry.token[0] = new_tokens
    entry.token[1] = steps
    entry.token[2] = pauses
    entry.token[3] = position
    _publish(wire, sched, index)


@jit
def emit_copied(wire, sched, request_id):
    """The request's pool blocks will not be read again."""
    _publish(wire, sched, _open_entry(wire, sched, request_id, _COPIED))


@jit
def drain_aborts(wire, sched):
    """Take the ids in the abort ring over as marks, looked for when there is room to answer."""
    tail = load_acquire(wire.control, _ABORT_TAIL)
    head = sched.count[_ABORTS]
    if head == tail:
        return
    while head - tail < 0:
        request_id = wire.abort[head & (wire.abort.shape[0] - 1)]
        sched.marks[request_id % sched.marks.shape[0]] = request_id
        sched.count[_SEEN] += 1
        head += 1
    sched.count[_ABORTS] = head
    store_release(wire.control, _ABORT_HEAD_WORD, head)


@jit
def has_request(wire, sched):
    """Whether the request ring holds an entry not yet taken."""
    head = sched.count[_REQUESTS]
    index = head & (wire.request.shape[0] - 1)
    word = index * ENTRY_WORDS + SEQUENCE_WORD
    return load_acquire(wire.request_words, word) == head + 1


@jit
def drain_requests(wire, sched):
    """Move submits to the pending list and answer pings; the number of entries taken.

    The pending list has room for every request that can be in flight, so a full house never keeps
    the device from seeing what stands behind it. A ping waits for room in the completion ring.
    """
    taken = 0
    while has_request(wire, sched):
        head = sched.count[_REQUESTS]
        index = head & (wire.request.shape[0] - 1)
        if wire.request[index].kind == _PING:
            if completion_room(wire, sched) < 1:
                break
            request_id = wire.request[index].request_id
            _publish(wire, sched, _open_entry(wire, sched, request_id, _PONG))
        else:
            tail = sched.count[_PENDING_TAIL]
            sched.pending[tail & (sched.pending.shape[0] - 1)] = wire.request[index]
            sched.count[_PENDING_TAIL] = tail + 1
            request_id = wire.request[index].request_id
            if sched.marks[request_id % sched.marks.shape[0]] == request_id:
                sched.count[_SEEN] += 1
        sched.count[_REQUESTS] = head + 1
        store_release(wire.control, _REQUEST_HEAD, head + 1)
        taken += 1
    return taken


@jit
def heartbeat(wire, sched, activity):
    """Show the host that the loop turns, and what it does."""
    wire.control[_STEP] = sched.count[_STEPS]
    wire.control[_ACTIVITY] = activity
    store_release(wire.control, _HEARTBEAT, now_ns())
