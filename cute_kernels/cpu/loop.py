"""The persistent loop of the CPU device: the whole engine between launch and park.

Worker 0 is the leader. Between steps it serves the wire, admits requests and plans; then all
workers run the program's phases, with a barrier after each; then it commits. Nothing in here
touches Python: the loop goes on while the interpreter is busy, stopped at a breakpoint or holding
its lock, until the completion ring has no room for another step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cute_kernels.cpu import draft as drafting
from cute_kernels.cpu import phases
from cute_kernels.cpu.admission import admit, apply_aborts
from cute_kernels.cpu.attention import attend, build_attention_work, merge
from cute_kernels.cpu.commit import commit, drop_stale_context
from cute_kernels.cpu.decide import compact, decide
from cute_kernels.cpu.policy import Policy, note_step
from cute_kernels.cpu.rows import build_draft_rows, build_rows, plan_step
from cute_kernels.cpu.service import (
    completion_room,
    drain_aborts,
    drain_requests,
    has_request,
    heartbeat,
)
from cute_kernels.cpu.slots import Context, Count, Decision, Limits, Sched, Stage
from cute_kernels.cpu.speculate import Ranked, Script, draft_rank, grow_trees
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
from cute_kernels.cpu.topk import Workspace
from cute_kernels.cpu.tree import Frontier, Tree
from cute_kernels.plan import PHASES, phase_number
from host.atomics import cpu_relax, fence_full, load_acquire, now_ns, store_release
from host.jit import jit
from host.wire import Activity, Command, State, Wire, Word

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
_FREE_PAGES, _ABORTS, _ENTRIES = int(Count.FREE_PAGES), int(Count.ABORT_HEAD), int(Count.ENTRIES)
_PENDING_HEAD, _PENDING_TAIL = int(Count.PENDING_HEAD), int(Count.PENDING_TAIL)
_PREFILL_SLOT, _PAUSED_COUNT = int(Count.PREFILL_SLOT), int(Count.PAUSED)

_DRAFT_FUSE, _DRAFT_CONTEXT = phase_number("draft_fuse"), phase_number("draft_context")
_DRAFT_ATTEND, _DRAFT_RANK = phase_number("draft_attend"), phase_number("draft_rank")
_TREE, _ROWS, _TAP = phase_number("tree"), phase_number("rows"), phase_number("tap")
_EMBED, _QKV, _ATTEND = phase_number("embed"), phase_number("qkv"), phase_number("attend")
_MERGE, _OUT_PROJ = phase_number("merge"), phase_number("out_proj")
_GATE_UP, _DOWN = phase_number("gate_up"), phase_number("down")
_HEAD, _DECIDE, _COMPACT = phase_number("head"), phase_number("decide"), phase_number("compact")

_SHARED = np.array(
    [
        phase_number(phase.name.removeprefix("draft_"))
        if phase.name.removeprefix("draft_") in {p.name for p in PHASES}
        else number
        for number, phase in enumerate(PHASES)
    ]
)
"""The target's phase whose code a phase runs: itself, or what a `draft_` phase is named after."""

TRACE_COLUMNS = 6
"""Per phase and kind of step: runs, ns, rows, head rows, keys, key reads."""


class Loop(NamedTuple):
    """What the loop works on besides the two models."""

    wire: Wire
    sched: Sched
    limits: Limits
    context: Context
    ranked: Ranked
    script: Script
    trees: Tree
    frontiers: Frontier
    decision: Decision
    space: Workspace
    policy: Policy
    sync: np.ndarray  # see `team`
    counters: np.ndarray  # [operations * LINE] int64: heads of the phases' work queues
    program: np.ndarray  # [operations, 2] int32
    trace: np.ndarray
    work: np.ndarray  # [3] int64: barrier arrivals before the step; ns: draft's end, step's start


def make_trace() -> np.ndarray:
    """`[2, phases, TRACE_COLUMNS]` int64: decode-only steps, then steps with prefill rows."""
    return np.zeros((2, len(PHASES), TRACE_COLUMNS), np.int64)


@jit
def _run_shared(phase, layer, model, worker, counters, op):
    """The phases that target and drafter have in common: the one place that calls each."""
    dims, weights, kv, batch, acts = model
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


@jit
def _run_drafting(phase, layer, loop, target, drafter, draft, worker, workers, op):
    """The phases that only a drafter has."""
    counters, sched = loop.counters, loop.sched
    dims, weights, kv, batch, acts = drafter
    if phase == _DRAFT_FUSE:
        drafting.draft_fuse(
            dims, weights, draft, kv, loop.context.rows, acts, layer, worker, counters, op
        )
    elif phase == _DRAFT_CONTEXT:
        drafting.draft_context(
            dims, weights, draft, kv, loop.context.rows, acts, layer, worker, counters, op
        )
    elif phase == _DRAFT_ATTEND:
        drafting.draft_attend(dims, weights, draft, kv, batch, acts, layer, worker, counters, op)
    elif phase == _DRAFT_RANK:
        draft_rank(
            dims, sched, batch, acts, draft.tokens, loop.ranked, loop.script,
            loop.limits.first_drafted, loop.space, worker, workers, counters, op,
        )  # fmt: skip
    elif phase == _TREE:
        grow_trees(
            sched, loop.trees, loop.frontiers, loop.ranked, loop.limits, loop.policy, worker,
            workers, counters, op,
        )  # fmt: skip
    elif phase == _TAP:
        dims, weights, kv, batch, acts = target
        tapped = draft.taps[layer]
        drafting.tap(dims, weights, draft, kv, batch, acts, tapped, worker, counters, op)


@jit
def _run_phase(phase, layer, loop, target, drafter, draft, worker, workers, op):
    """Where a phase's number becomes a call."""
    counters, sched = loop.counters, loop.sched
    dims, kv, batch, acts = target.dims, target.kv, target.batch, target.acts
    if phase == _ROWS:
        if worker == 0:
            build_rows(loop.wire, sched, batch, loop.trees, loop.limits)
            build_attention_work(dims, batch)
    elif phase == _DECIDE:
        decide(
            dims, sched, acts, loop.trees, loop.decision, loop.space, worker, workers, counters, op
        )
    elif phase == _COMPACT:
        compact(dims, sched, batch, kv, acts, loop.decision, worker, workers, counters, op)
    elif phase < _ROWS and _SHARED[phase] > _ROWS and phase != _DRAFT_ATTEND:
        _run_shared(_SHARED[phase], layer, drafter, worker, counters, op)
    elif phase < _ROWS or phase == _TAP:
        if draft is not None:  # known when compiled: without a drafter its code is left out
            _run_drafting(phase, layer, loop, target, drafter, draft, worker, workers, op)
    else:
        _run_shared(phase, layer, target, worker, counters, op)


@jit
def _is_skipped(phase, context_rows, draft_rows, head_rows, items, nodes):
    """Whether a phase has nothing to do this step; all workers find the same answer."""
    if phase == _DRAFT_FUSE or phase == _DRAFT_CONTEXT:
        return context_rows == 0
    if phase < _ROWS:
        return draft_rows == 0
    if phase == _ATTEND:
        return items == 0
    if phase == _HEAD or phase == _DECIDE:
        return head_rows == 0
    if phase == _COMPACT:
        return nodes == 0
    return False


@jit
def _most_nodes(sched):
    nodes = 0
    for s in range(sched.slot.shape[0]):
        nodes = max(nodes, int(sched.slot[s].nodes))
    return nodes


@jit
def _note(line, batch, ns):
    """One run of a phase in the trace, with what it had to do."""
    keys = 0
    reads = 0
    for g in range(batch.count[2]):
        first, rows = batch.segment[g, 1], batch.segment[g, 2]
        reads += batch.position[first] + rows
        for r in range(first, first + rows):
            keys += batch.position[r] + 1
    line[0] += 1
    line[1] += ns
    line[2] += batch.count[0]
    line[3] += batch.count[1]
    line[4] += keys
    line[5] += reads


@jit
def _run_step(worker, workers, loop, target, drafter, draft):
    """All phases of one step, on one worker; False when a wait ran out.

    What decides which phases run is read where nobody changes it: of the draft before the first
    phase, of the target right behind the barrier of `rows`. Once the last barrier is complete the
    leader goes on to the next step, while other workers may still be on their way to the gate.
    """
    wire, sched, program, batch = loop.wire, loop.sched, loop.program, target.batch
    target_arrivals = loop.work[0]
    context_rows, draft_rows = loop.context.rows.count[0], drafter.batch.count[0]
    head_rows, items, nodes = np.int64(0), np.int64(0), np.int64(0)
    kind = 1 if sched.count[_PREFILL_SLOT] >= 0 else 0
    start = now_ns()
    for op in range(program.shape[0]):
        phase = np.int64(program[op, 0])
        if _is_skipped(phase, context_rows, draft_rows, head_rows, items, nodes):
            continue
        enter_phase(wire.control, worker, op)
        if sched.plant[0] == op and sched.plant[1] == worker:
            while not is_faulted(loop.sync):
                cpu_relax()
            return False
        _run_phase(
            phase, np.int64(program[op, 1]), loop, target, drafter, draft, worker, workers, op
        )
        target_arrivals += workers
        if not barrier(
            loop.sync, wire.control, worker, workers, target_arrivals, op, loop.limits.deadline_ns
        ):
            return False
        if phase == _ROWS:
            head_rows, items, nodes = batch.count[1], batch.count[3], _most_nodes(sched)
        if worker == 0:
            end = now_ns()
            if phase >= _ROWS:
                _note(loop.trace[kind, phase], batch, end - start)
            elif phase == _DRAFT_FUSE or phase == _DRAFT_CONTEXT:
                _note(loop.trace[kind, phase], loop.context.rows, end - start)
            else:
                _note(loop.trace[kind, phase], drafter.batch, end - start)
            if phase == _ROWS:
                loop.work[1] = end
            start = end
    enter_phase(wire.control, worker, -1)
    return True


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
def _open_step(loop, drafter):
    """Last things before a step: what the drafter has to do, and the gate."""
    wire, sched = loop.wire, loop.sched
    heartbeat(wire, sched, _WORKING)
    drop_stale_context(sched, loop.context)
    build_draft_rows(sched, drafter.batch, loop.limits)
    loop.counters[:] = 0
    loop.work[0] = load_acquire(loop.sync, _BARRIER)
    loop.work[2] = now_ns()
    open_gate(loop.sync, STEP)


@jit
def _close_step(loop, target, drafter):
    """After the last barrier: commit, and measure for the policy."""
    end, rows = now_ns(), target.batch.count[0]
    tokens = commit(loop.wire, loop.sched, target.batch, loop.decision, loop.context)
    if loop.sched.count[_PREFILL_SLOT] < 0:
        note_step(
            loop.policy, rows, tokens, end - loop.work[1], loop.work[1] - loop.work[2],
            drafter.batch.count[0] > 0,
        )  # fmt: skip


@jit
def _lead(workers, loop, target, drafter):
    """The leader between steps: True when it has opened one, False when all must leave the loop."""
    wire, sched, limits, sync = loop.wire, loop.sched, loop.limits, loop.sync
    idle_since = now_ns()
    was_paused = False
    while True:
        command = load_acquire(wire.control, _COMMAND)
        if command == _SHUTDOWN or command == _PARK:
            _publish_gauges(wire, sched, 0)
            _leave_all(wire, sync, workers, _STOPPED if command == _SHUTDOWN else _PARKED)
            return False
        drain_aborts(wire, sched)
        taken = drain_requests(wire, sched)
        apply_aborts(wire, sched, target.batch)
        admit(wire, sched, target.batch, limits)
        busy = plan_step(sched, limits)
        room = not busy or completion_room(wire, sched) >= sched.count[_ENTRIES]
        _publish_gauges(wire, sched, target.batch.count[0])
        if busy and room:
            _open_step(loop, drafter)
            return True
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
                return False
        nap(now - idle_since)


@jit
def run(worker, workers, loop, target, drafter, draft):
    """Entry point of one worker, from launch to park, shutdown or fault.

    All of a step's code is called from here alone: what calls it is compiled once more as a whole,
    so a level of calls between would cost ten seconds of a first start.
    """
    while True:
        if worker == 0:
            is_step = _lead(workers, loop, target, drafter)
        else:
            is_step = wait_gate(loop.sync, worker) == STEP
        if not is_step:
            break
        if not _run_step(worker, workers, loop, target, drafter, draft):
            return
        if worker == 0:
            _close_step(loop, target, drafter)
    if worker > 0:
        leave(loop.sync)
