"""The host's side of the rings, compiled: push a request, push an abort, take completions.

None of these functions holds the interpreter lock. Pushing needs a lock of the caller's (one
producer); taking completions is for one thread (one consumer).
"""

from __future__ import annotations

import numpy as np

from host.atomics import (
    cpu_relax,
    fence_full,
    load_acquire,
    now_ns,
    sleep_us,
    store_release,
    yield_core,
)
from host.jit import jit
from host.wire import COMPLETION, ENTRY_WORDS, SEQUENCE_WORD, CompletionKind, RequestKind, Word

FULL = -1
"""Returned by `push_request` when the ring has no free entry."""

_SPIN_NS = 3_000
_NAP_US = 200
_LONG_NAP_US = 1_000
_LONG_AFTER_NS = 50_000_000

_ABORT_TAIL = int(Word.ABORT_TAIL)
_REQUEST_HEAD, _COMPLETION_HEAD = int(Word.REQUEST_HEAD), int(Word.COMPLETION_HEAD)
_STATE, _COMMAND = int(Word.STATE), int(Word.COMMAND)
_PING, _PONG = int(RequestKind.PING), int(CompletionKind.PONG)


@jit
def read_word(control, word):
    """One word of the control block, with acquire."""
    return load_acquire(control, word)


@jit
def write_word(control, word, value):
    """One word of the control block, with release, then a full fence."""
    store_release(control, word, value)
    fence_full()


@jit
def push_request(wire, tail, request_id, kind, prompt_tokens, max_new_tokens, block, blocks):
    """Write the entry for counter value `tail`; the device's state after it, or FULL.

    The full fence between the push and the read of the state is the host's half of the parking
    handshake: either the device sees the entry before it parks, or the host sees that it parked.
    """
    if tail - load_acquire(wire.control, _REQUEST_HEAD) >= wire.request.shape[0]:
        return FULL
    index = tail & (wire.request.shape[0] - 1)
    entry = wire.request[index]
    entry.request_id = request_id
    entry.kind = kind
    entry.prompt_tokens = prompt_tokens
    entry.max_new_tokens = max_new_tokens
    entry.block = block
    entry.blocks = blocks
    entry.stamp_ns = now_ns()
    store_release(wire.request_words, index * ENTRY_WORDS + SEQUENCE_WORD, tail + 1)
    fence_full()
    return load_acquire(wire.control, _STATE)


@jit
def push_abort(wire, tail, request_id):
    """Put a request id where the device looks every step. Never full: see `wire`.

    The fence is the host's half of the parking handshake, as in `push_request`.
    """
    wire.abort[tail & (wire.abort.shape[0] - 1)] = request_id
    store_release(wire.control, _ABORT_TAIL, tail + 1)
    fence_full()


@jit
def take(wire, head, staging):
    """Copy the entries that are there, from counter value `head` on, to `staging`; their number."""
    mask = wire.completion.shape[0] - 1
    taken = 0
    while taken < staging.shape[0]:
        index = (head + taken) & mask
        word = index * ENTRY_WORDS + SEQUENCE_WORD
        if load_acquire(wire.completion_words, word) != head + taken + 1:
            break
        staging[taken] = wire.completion[index]
        taken += 1
    if taken:
        store_release(wire.control, _COMPLETION_HEAD, head + taken)
    return taken


@jit
def wait_take(wire, head, staging, patience_us):
    """`take`, waiting up to `patience_us` for the first entry.

    Sleeps rather than spins, longer the longer nothing comes: on a machine of few cores a spinning
    poller would take a core from the CPU device.
    """
    start = now_ns()
    while True:
        taken = take(wire, head, staging)
        waited = now_ns() - start
        if taken or waited > patience_us * 1000:
            return taken
        if waited < _SPIN_NS:
            cpu_relax()
        else:
            sleep_us(_LONG_NAP_US if waited > _LONG_AFTER_NS else _NAP_US)


@jit
def ping_rounds(wire, tail, head, rounds, pause_us, patience_us, elapsed_ns):
    """Push `ping` entries and await each answer by spinning; times into `elapsed_ns[rounds]`.

    The caller must be the only producer and consumer. `pause_us` of idleness precede each round.
    Returns the rounds answered in time.
    """
    mask = wire.completion.shape[0] - 1
    for i in range(rounds):
        left = pause_us
        while left > 0:
            sleep_us(min(left, 500_000))
            left -= 500_000
        start = now_ns()
        push_request(wire, tail + i, i, _PING, 0, 0, 0, 0)
        word = ((head + i) & mask) * ENTRY_WORDS + SEQUENCE_WORD
        spins = 0
        while load_acquire(wire.completion_words, word) != head + i + 1:
            cpu_relax()
            spins += 1
            if spins & 1023 == 0:
                yield_core()
                if now_ns() - start > patience_us * 1000:
                    return i
        elapsed_ns[i] = now_ns() - start
        store_release(wire.control, _COMPLETION_HEAD, head + i + 1)
    return rounds


def make_staging(entries: int) -> np.ndarray:
    """Where `take` copies completion entries to."""
    return np.zeros(entries, COMPLETION)
