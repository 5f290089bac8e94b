"""How the CPU device's workers wait: a gate between steps, a barrier between phases.

The words of `sync` are monotone counters, each on its own line. The barrier and the gate go on from
where they were after a park. Comparisons are of differences, so a counter may start anywhere.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from host.atomics import (
    LINE,
    cpu_relax,
    fetch_add,
    load_acquire,
    now_ns,
    sleep_us,
    store_release,
    yield_core,
)
from host.jit import jit
from host.wire import State, Word


class Sync(IntEnum):
    """Index of a word in the `sync` array."""

    GATE = 0 * LINE  # steps opened, and leaves
    ACTION = 1 * LINE  # what the newest opening of the gate asks for
    BARRIER = 2 * LINE  # arrivals in all
    LEFT = 3 * LINE  # workers that have left the loop, in all
    FAULT = 4 * LINE  # 1 + operation of the first wait that ran out
    SEEN = 5 * LINE  # from here one line a worker: gate openings it has answered


_GATE, _ACTION, _BARRIER = int(Sync.GATE), int(Sync.ACTION), int(Sync.BARRIER)
_LEFT, _FAULT, _SEEN = int(Sync.LEFT), int(Sync.FAULT), int(Sync.SEEN)
_STATE, _PHASE = int(Word.STATE), int(Word.PHASE)
_FAULT_OPERATION, _FAULT_WORKERS = int(Word.FAULT_OPERATION), int(Word.FAULT_WORKERS)
_STATE_FAULT = int(State.FAULT)

STEP = 1
LEAVE = 2

_SPINS = 2_000  # some 50 us of spinning before a waiter offers its core to others
_LONGEST_LOOK_NS = 10_000_000


def make_sync(workers: int) -> np.ndarray:
    """The zeroed words, on lines of their own."""
    return np.zeros(_SEEN + LINE * workers + LINE, np.int64)


@jit
def nap(idle_ns):
    """Wait a little, the longer the longer there has been nothing to do.

    A resident loop must not burn a core while idle, yet answer within a millisecond: spin for
    20 us, offer the core until 2 ms, then sleep 50 us at a time, and 200 us from 100 ms on.
    """
    if idle_ns < 20_000:
        cpu_relax()
    elif idle_ns < 2_000_000:
        yield_core()
    elif idle_ns < 100_000_000:
        sleep_us(50)
    else:
        sleep_us(200)


@jit
def open_gate(sync, action):
    """Leader: let the workers run a step, or leave."""
    store_release(sync, _ACTION, action)
    store_release(sync, _GATE, sync[_GATE] + 1)


@jit
def wait_gate(sync, worker):
    """Worker: wait, without limit, for the next opening; what it asks for."""
    seen = sync[_SEEN + LINE * worker]
    start = now_ns()
    while load_acquire(sync, _GATE) == seen:
        nap(now_ns() - start)
    sync[_SEEN + LINE * worker] = seen + 1
    return load_acquire(sync, _ACTION)


@jit
def leave(sync):
    """Worker: gone from the loop."""
    fetch_add(sync, _LEFT, 1)


@jit
def wait_left(sync, target):
    """Leader: wait until `target` departures have been counted."""
    start = now_ns()
    while load_acquire(sync, _LEFT) - target < 0:
        nap(now_ns() - start)


@jit
def is_faulted(sync):
    """Whether some wait has run out; every worker leaves the loop then."""
    return load_acquire(sync, _FAULT) != 0


@jit
def _report(sync, control, worker, workers, operation):
    """First to see a hang: say in the control block where, and who is not there."""
    if fetch_add(sync, _FAULT, operation + 1) != 0:
        return
    missing = 0
    for w in range(workers):
        # A worker at this barrier, or past it, has this operation or a later one in its word and
        # has arrived; one that hangs is inside the phase, which the sign of its word tells.
        if w != worker and load_acquire(control, _PHASE + LINE * w) >= 0:
            missing |= 1 << w
    control[_FAULT_OPERATION] = operation
    control[_FAULT_WORKERS] = missing
    store_release(control, _STATE, _STATE_FAULT)


@jit
def enter_phase(control, worker, operation):
    """Worker: show where it is."""
    store_release(control, _PHASE + LINE * worker, operation + 1)


@jit
def barrier(sync, control, worker, workers, target, operation, deadline_ns):
    """Arrive after `operation` and wait for `target` arrivals; False when the wait ran out.

    Only time that this thread has watched pass counts towards the deadline, at most 10 ms a look:
    a process that was stopped for a while has not hung.
    """
    store_release(control, _PHASE + LINE * worker, -(operation + 1))
    fetch_add(sync, _BARRIER, 1)
    spins = 0
    waited = 0
    last = now_ns()
    while load_acquire(sync, _BARRIER) - target < 0:
        spins += 1
        if spins < _SPINS:
            cpu_relax()
            continue
        yield_core()
        if spins & 63 == 0:
            now = now_ns()
            waited += min(now - last, _LONGEST_LOOK_NS)
            last = now
            if is_faulted(sync):
                return False
            if waited > deadline_ns:
                _report(sync, control, worker, workers, operation)
                return False
            if waited > 20_000_000:
                sleep_us(50)
    return True
