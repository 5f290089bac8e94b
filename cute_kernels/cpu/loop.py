"""The persistent loop of the CPU device: the whole engine between launch and park.

Worker 0 is the leader. Between steps it serves the wire, admits requests and writes the row table;
then all workers run the program's phases, with a barrier after each; then it commits. Nothing in
here touches Python: the loop goes on while the interpreter is busy, stopped at a breakpoint or
holding its lock, until the completion ring has no room for another step.
"""

from __future__ import annotations

import numpy as np

from cute_kernels.cpu import phases
from cute_kernels.cpu.attention import attend, build_attention_work, merge
from cute_kernels.cpu.scheduler import admit, apply_aborts, build_rows, commit
from cute_kernels.cpu.service import (
    completion_room,
    drain_aborts,
    drain_requests,
    has_request,
    heartbeat,
)
from cute_kernels.cpu.slots import Count, Stage
from cute_kernels.cpu.team import (
    LEAVE,
    STEP,
    Sync,
    barrier,
    enter_phase,
    is_faulted,
    leave,
    nap,
    open_gate,
    wait_gate,
    wait_left,
)
from cute_kernels.plan import PHASES, phase_number
from host.atomics import cpu_relax, fence_full, load_acquire, now_ns, store_release
from host.jit import jit
from host.wire import Activity, Command, State, Word

_COMMAND, _STATE, _PAUSES = int(Word.COMMAND), int(Word.STATE), int(Word.PAUSES)
_FREE_PAGES_WORD, _FREE_SLOTS_WORD = int(Word.FREE_PAGES), int(Word.FREE_SLOTS)
_PENDING_WORD, _ROWS_WORD = int(Word.PENDING), int(Word.ROWS)
_ABORT_TAIL = int(Word.ABORT_TAIL)
_RUN, _PARK, _SHUTDOWN = int(Command.RUN), int(Command.PARK), int(Command.SHUTDOWN)
_RUNNING, _PARKING = int(State.RUNNING), int(State.PARKING)
_PARKED, _STOPPED = int(State.PARKED), int(State.STOPPED)
_WORKING, _IDLE, _PAUSED = int(Activity.WORKING), int(Activity.IDLE), int(Activity.PAUSED)
_BARRIER, _LEFT = int(Sync.BARRIER), int(Sync.LEFT)
_FREE = int(Stage.FREE)
_FREE_PAGES, _ABORTS = int(Count.FREE_PAGES), int(Count.ABORT_HEAD)
_PENDING_HEAD, _PENDING_TAIL = int(Count.PENDING_HEAD), int(Count.PENDING_TAIL)
_PREFILL_SLOT, _PAUSED_COUNT = int(Count.PREFILL_SLOT), int(Count.PAUSED)

_EMBED, _QKV, _ATTEND = phase_number("embed"), phase_number("qkv"), phase_number("attend")
_MERGE, _OUT_PROJ = phase_number("merge"), phase_number("out_proj")
_GATE_UP, _DOWN = phase_number("gate_up"), phase_number("down")
_HEAD, _SELECT = phase_number("head"), phase_number("select")

TRACE_COLUMNS = 6
"""Per phase and kind of step: runs, ns, rows, head rows, keys, key reads."""


def make_trace() -> np.ndarray:
    """`[2, phases, TRACE_COLUMNS]` int64: decode-only steps, then steps with prefill rows."""
    return np.zeros((2, len(PHASES), TRACE_COLUMNS), np.int64)


@jit
def _run_phase(phase, layer, dims, weights, kv, batch, acts, worker, counters, op):
    """The one place where a phase's number becomes a call."""
    if phase == _EMBED:
        phases.embed(dims, weights, kv, batch, acts, layer, worker, counters, op)
    elif phase == _QKV:
        phases.qkv(dims, weights, kv, batch, acts, layer, worker, counters, op)
    elif phase == _ATTEND:
        attend(dims, weights, kv, batch, acts, layer, worker, counters, op)
    elif phase == _MERGE:
        merge(dims, weights, kv, batch, acts, layer, worker, counters, op)
    elif phase == _OUT_PROJ:
        phases.out_proj(dims, weights, kv, batch, acts, layer, worker, counters, op)
    elif phase == _GATE_UP:
        phases.gate_up(dims, weights, kv, batch, acts, layer, worker, counters, op)
    elif phase == _DOWN:
        phases.down(dims, weights, kv, batch, acts, layer, worker, counters, op)
    elif phase == _HEAD:
        phases.head(dims, weights, kv, batch, acts, layer, worker, counters, op)
    elif phase == _SELECT:
        phases.select(dims, weights, kv, batch, acts, layer, worker, counters, op)


@jit
def _is_skipped(phase, head_rows, items):
    """Whether a phase has nothing to do this step; all workers find the same answer."""
    if phase == _ATTEND:
        return items == 0
    if phase == _HEAD or phase == _SELECT:
        return head_rows == 0
    return False


@jit
def _run_step(
    worker, workers, wire, sched, limits, dims, weights, kv, batch, acts, sync, counters, program,
    trace, work,
):  # fmt: skip
    """All phases of one step, on one worker; False when a wait ran out.

    What belongs to the step is read before the first phase: once the last barrier is complete the
    leader goes on to the next step, while other workers may still be on their way to the gate.
    """
    target = work[0]
    head_rows, items = batch.count[1], batch.count[3]
    kind = 1 if sched.count[_PREFILL_SLOT] >= 0 else 0
    start = now_ns()
    for op in range(program.shape[0]):
        phase = program[op, 0]
        if _is_skipped(phase, head_rows, items):
            continue
        enter_phase(wire.control, worker, op)
        if sched.plant[0] == op and sched.plant[1] == worker:
            while not is_faulted(sync):
                cpu_relax()
            return False
        _run_phase(phase, program[op, 1], dims, weights, kv, batch, acts, worker, counters, op)
        target += workers
        if not barrier(sync, wire.control, worker, workers, target, op, limits.deadline_ns):
            return False
        if worker == 0:
            end = now_ns()
            line = trace[kind, phase]
            line[0] += 1
            line[1] += end - start
            line[2] += batch.count[0]
            line[3] += batch.count[1]
            line[4] += work[1]
            line[5] += work[2]
            start = end
    enter_phase(wire.control, worker, -1)
    return True


@jit
def _measure_work(sync, batch, work):
    """What the trace needs of this step, and where the barrier stands: `work[3]`."""
    work[0] = load_acquire(sync, _BARRIER)
    keys = 0
    reads = 0
    for g in range(batch.count[2]):
        first, rows = batch.segment[g, 1], batch.segment[g, 2]
        start = batch.position[first]
        keys += rows * start + rows * (rows + 1) // 2
        reads += start + rows
    work[1] = keys
    work[2] = reads


@jit
def _publish_gauges(wire, sched, rows):
    """Free pages, free slots and pending requests, for `engine.stats()`."""
    free = 0
    for s in range(sched.slot.shape[0]):
        free += sched.slot[s].stage == _FREE
    wire.control[_ROWS_WORD] = rows
    wire.control[_FREE_PAGES_WORD] = sched.count[_FREE_PAGES]
    wire.control[_FREE_SLOTS_WORD] = free
    wire.control[_PENDING_WORD] = sched.count[_PENDING_TAIL] - sched.count[_PENDING_HEAD]


@jit
def _note_pause(wire, sched):
    """The loop stands still for want of room: every resident request has waited for the host."""
    sched.count[_PAUSED_COUNT] += 1
    wire.control[_PAUSES] = sched.count[_PAUSED_COUNT]
    for s in range(sched.slot.shape[0]):
        if sched.slot[s].stage != _FREE:
            sched.slot[s].pauses += 1


@jit
def _try_park(wire, sched):
    """The device's half of the parking handshake; True when the loop must end.

    The full fence stands between the store of PARKING and the last look at the request ring: either
    the host's push is seen here, or the host, which fences between its push and its look at the
    state, sees PARKING and waits for what comes of it.
    """
    store_release(wire.control, _STATE, _PARKING)
    fence_full()
    new_abort = load_acquire(wire.control, _ABORT_TAIL) != sched.count[_ABORTS]
    command = load_acquire(wire.control, _COMMAND)
    if has_request(wire, sched) or new_abort or command != _RUN:
        store_release(wire.control, _STATE, _RUNNING)
        return False
    return True


@jit
def _leave_all(wire, sync, workers, state):
    """All workers leave at this step boundary; the state is written when they have."""
    store_release(wire.control, _STATE, _PARKING)
    target = load_acquire(sync, _LEFT) + workers - 1
    open_gate(sync, LEAVE)
    wait_left(sync, target)
    store_release(wire.control, _STATE, state)


@jit
def _lead(
    workers, wire, sched, limits, dims, weights, kv, batch, acts, sync, counters, program, trace,
    work,
):  # fmt: skip
    """The leader's loop; returns on park, shutdown and fault."""
    idle_since = now_ns()
    was_paused = False
    while True:
        command = load_acquire(wire.control, _COMMAND)
        if command == _SHUTDOWN:
            _leave_all(wire, sync, workers, _STOPPED)
            return
        if command == _PARK:
            _leave_all(wire, sync, workers, _PARKED)
            return
        drain_aborts(wire, sched)
        taken = drain_requests(wire, sched)
        apply_aborts(wire, sched, batch)
        room = completion_room(wire, sched) >= limits.worst_case
        if room:
            admit(wire, sched, batch, limits)
            room = completion_room(wire, sched) >= limits.worst_case  # admission may have answered
        rows = build_rows(wire, sched, batch, limits) if room else 0
        _publish_gauges(wire, sched, rows)
        if rows:
            was_paused = False
            heartbeat(wire, sched, _WORKING)
            build_attention_work(dims, batch)
            _measure_work(sync, batch, work)
            counters[:] = 0
            open_gate(sync, STEP)
            if not _run_step(
                0, workers, wire, sched, limits, dims, weights, kv, batch, acts, sync, counters,
                program, trace, work,
            ):  # fmt: skip
                return
            commit(wire, sched, batch, acts)
            idle_since = now_ns()
            continue
        now = now_ns()
        if taken:
            idle_since = now
        if not room:  # the completion ring is full: pause, still reading the control block
            if not was_paused:
                _note_pause(wire, sched)
                idle_since = now
            was_paused = True
            heartbeat(wire, sched, _PAUSED)
            nap(now - idle_since)
            continue
        heartbeat(wire, sched, _IDLE)
        if limits.park_after_ns >= 0 and now - idle_since > limits.park_after_ns:
            if _try_park(wire, sched):
                _leave_all(wire, sync, workers, _PARKED)
                return
        nap(now - idle_since)


@jit
def run(
    worker, workers, wire, sched, limits, dims, weights, kv, batch, acts, sync, counters, program,
    trace, work,
):  # fmt: skip
    """Entry point of one worker, from launch to park, shutdown or fault."""
    if worker == 0:
        _lead(
            workers, wire, sched, limits, dims, weights, kv, batch, acts, sync, counters, program,
            trace, work,
        )  # fmt: skip
        return
    while wait_gate(sync, worker) == STEP:
        if not _run_step(
            worker, workers, wire, sched, limits, dims, weights, kv, batch, acts, sync, counters,
            program, trace, work,
        ):  # fmt: skip
            return
    leave(sync)
