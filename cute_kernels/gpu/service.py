"""The service warp: one warp of CTA 0 that is the engine between launch and park.

It reads the wire, admits, publishes the descriptor of each step and decides what comes of its
results. Between two decode steps only the results, the stop rules and the next descriptor stand on
the path; everything of the host's is read, and everything for it written, while the next step runs.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.gpu import head, mapped, sync
from cute_kernels.gpu.admission import (
    CHUNK_TOKENS,
    abort_pending,
    abort_slot,
    admit,
    copy_prompt,
    finish,
    is_aborted,
    stop_id,
    token_at,
)
from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.board import Board, Desc, Segment, desc_at
from cute_kernels.gpu.control import (
    STEP_ENTRIES,
    Service,
    add,
    completion_room,
    drain_aborts,
    drain_requests,
    emit_tokens,
    get,
    get_int,
    heartbeat,
    look,
    put,
    sample_phases,
    set_state,
    try_park,
)
from cute_kernels.gpu.core import arg
from cute_kernels.gpu.service_block import Own, Stage
from host.wire import Activity, Command, FinishReason, State, Word

BEAT_NS = 10_000_000
NAP_NS = 20_000


# -- descriptors -------------------------------------------------------------------------------
@cute.jit
def publish(
    s: cutlass.Constexpr, kind: Int32, rows: Int32, position: Int32, last_phase: Int32, token: Int32
):
    """Open a step. The fence orders all that this warp has written before, cleared results and
    copied prompts included, before the tag."""
    tag = get_int(s, Own.TAG) + 1
    fields = {
        Desc.KIND: kind, Desc.ROWS: rows, Desc.POSITION: position, Desc.COMMITTED: position,
        Desc.FIRST_PHASE: Int32(0), Desc.LAST_PHASE: last_phase, Desc.TOKEN: token,
        Desc.ROW_POSITION: position, Desc.PATH: Int32(0), Desc.PATH + 1: Int32(0),
    }  # fmt: skip
    names = list(fields)
    if s.lane == 0:
        for i in cutlass.range_constexpr(len(names)):
            sync.st_word(s.board + desc_at(int(names[i])), Uint32(fields[names[i]]))
    cute.arch.sync_warp()
    sync.fence_gpu()
    cute.arch.sync_warp()
    if s.lane == 0:
        sync.st_word(s.board + desc_at(int(Desc.TAG)), Uint32(tag))
    put(s, Own.TAG, tag)


@cute.jit
def open_step(s: cutlass.Constexpr, layers: Int32):
    """The slot's next step: a chunk of its prompt without the last token, or a token."""
    kv, prompt = get_int(s, Own.KV_TOKENS), get_int(s, Own.PROMPT_TOKENS)
    rows = cutlass.min(Int32(CHUNK_TOKENS), prompt - 1 - kv)
    kind, last_phase, token = Int32(int(Segment.PROMPT)), 4 * layers, Int32(0)
    if rows <= 0:
        kind, rows, last_phase = Int32(int(Segment.DECODE)), Int32(1), 4 * layers + 1
        token = get_int(s, Own.NEWEST)
        if get(s, Own.STAGE) == int(Stage.PREFILL):
            token = token_at(s, kv)
    else:
        put(s, Own.DONE, get_int(s, Own.DONE) + s.ctas)
    publish(s, kind, rows, kv, last_phase, token)
    put(s, Own.FLIGHT, kind)
    put(s, Own.FLIGHT_ROWS, rows)


# -- results -----------------------------------------------------------------------------------
@cute.jit
def begin_wait(s: cutlass.Constexpr):
    now = mapped.now()
    put(s, Own.SINCE, now)
    put(s, Own.BEAT, now)


@cute.jit
def overdue(s: cutlass.Constexpr):
    """Now and then in a wait for the CTAs: signs of life, and the end at the deadline."""
    now = mapped.now()
    if now - get(s, Own.BEAT) > BEAT_NS:
        put(s, Own.BEAT, now)
        heartbeat(s, Int32(int(Activity.WORKING)), get_int(s, Own.FLIGHT_ROWS))
        sample_phases(s)
    if now - get(s, Own.SINCE) > sync.SERVICE_DEADLINE_NS:
        report_hang(s)


@cute.jit
def wait_results(s: cutlass.Constexpr, words: cute.Tensor):
    """Until every CTA has spoken about row 0; words: head.result_words."""
    begin_wait(s)
    missing, tries = sync.any_lane_empty(head.ask_results(s.k, words, Int32(0))), Int32(0)
    while missing != 0:
        tries = tries + 1
        if (tries & 63) == 0:
            overdue(s)
        missing = sync.any_lane_empty(head.ask_results(s.k, words, Int32(0)))


@cute.jit
def wait_done(s: cutlass.Constexpr):
    """Until every CTA has finished a step without results."""
    begin_wait(s)
    target, tries = get_int(s, Own.DONE), Int32(0)
    seen = sync.ld_acquire(s.board + int(Board.DONE) * 4)
    while seen - target < 0:
        seen, tries = sync.ld_acquire(s.board + int(Board.DONE) * 4), tries + 1
        if (tries & 63) == 0:
            overdue(s)


@cute.jit
def report_hang(s: cutlass.Constexpr):
    """The deadline has passed: say which phase, and which CTAs are in it, then end the kernel.

    Missing are the CTAs without results, of a step without results those that are in a phase; all,
    if none is in any. The least advanced of them are to blame: the others wait for what they have
    not published.
    """
    n, decode = -(-s.ctas // 32), get(s, Own.FLIGHT) == int(Segment.DECODE)
    first, lates, phases = Int32(2**30), [], []
    for i in cutlass.range_constexpr(n):
        cta = s.lane + 32 * i
        late, phase = Int32(0), Int32(2**30)
        if cta < s.ctas:
            phase = Int32(sync.ld_word(s.board + Int64((int(Board.PHASE) + cta) * 4)))
            late = Int32(phase != 0)
            if decode:
                words = sync.ld_words(head.result_address(s.k, Int32(0), cta))
                late = Int32(sync.largest(list(words)) == sync.EMPTY)
        if late != 0:
            first = cutlass.min(first, phase)
        lates.append(late)
        phases.append(phase)
    for distance in cutlass.range_constexpr(5):
        first = cutlass.min(first, cute.arch.shuffle_sync_bfly(first, 1 << distance))
    all_out = Int32(first == 2**30)
    first = first * (1 - all_out)
    sample_phases(s)
    bits = [
        Int64(mapped.ballot((lates[i] | all_out) & Int32(phases[i] == first))) & 0xFFFFFFFF
        for i in range(n)
    ]
    if s.lane == 0:
        mapped.st_word(s.control + 8 * int(Word.FAULT_OPERATION), Int64(first - 1))
        for i in cutlass.range_constexpr(0, n, 2):
            both = bits[i] | (bits[i + 1] << 32 if i + 1 < n else Int64(0))
            mapped.st_word(s.control + 8 * (int(Word.FAULT_WORKERS) + i // 2), both)
    cute.arch.sync_warp()
    mapped.fence()
    set_state(s, State.FAULT)
    mapped.fence()
    sync.trap()


# -- the end of a step -------------------------------------------------------------------------
@cute.jit
def end_decode(s: cutlass.Constexpr, layers: Int32):
    """Take a token, apply the stop rules, go on at once if nothing speaks against it."""
    # all that the decision needs is read before the results are there
    new = get_int(s, Own.NEW_TOKENS) + 1
    is_last = Int32(new == get_int(s, Own.MAX_NEW))
    stop, may_stop = stop_id(s), Int32(new >= get_int(s, Own.MIN_NEW))
    is_listed = may_stop & Int32(s.lane < get_int(s, Own.STOP_COUNT))
    stop = sync.as_int(sync.select(is_listed, stop, Int32(-1)))
    has_room = completion_room(s) - 1 >= STEP_ENTRIES
    is_free = (get(s, Own.COMMAND) == int(Command.RUN)) & (is_aborted(s) == 0)
    may_go_on = Int32(has_room & is_free)
    words = head.result_words(s.k)
    wait_results(s, words)
    head.clear_results(s.k, Int32(1))
    best, token, log_sum, flags = head.merge_results(s.k, words)
    stops = mapped.ballot(stop == token)
    reason = Int32(0)
    if is_last != 0:
        reason = Int32(int(FinishReason.LENGTH))
    if stops != Uint32(0):  # a stop on the last allowed token is a stop
        reason = Int32(int(FinishReason.STOP))
    if (flags != 0) | (best == float("-inf")):
        reason = Int32(int(FinishReason.ERROR))
    goes_on = Int32(reason == 0) & may_go_on
    kv = get_int(s, Own.KV_TOKENS)
    if goes_on != 0:
        publish(s, Int32(int(Segment.DECODE)), Int32(1), kv + 1, 4 * layers + 1, token)
    add(s, Own.STEP, 1)
    add(s, Own.STEPS, 1)
    put(s, Own.STAGE, int(Stage.DECODE))
    if reason == int(FinishReason.ERROR):
        finish(s, reason, kv)
    else:
        emit_tokens(s, get(s, Own.REQUEST_ID), token, -log_sum)
        put(s, Own.NEW_TOKENS, new)
        put(s, Own.KV_TOKENS, kv + 1)
        put(s, Own.NEWEST, token)
        if reason != 0:
            finish(s, reason, Int32(0))
    if goes_on == 0:
        put(s, Own.FLIGHT, 0)
        put(s, Own.IDLE_SINCE, mapped.now())


@cute.jit
def end_prompt(s: cutlass.Constexpr):
    """A chunk of the prompt is in the pages."""
    wait_done(s)
    put(s, Own.KV_TOKENS, get(s, Own.KV_TOKENS) + get(s, Own.FLIGHT_ROWS))
    add(s, Own.STEP, 1)
    put(s, Own.FLIGHT, 0)


# -- between steps -----------------------------------------------------------------------------
@cute.jit
def nap(idle_ns: Int64):
    """Sleep longer the longer nothing has come, up to NAP_NS."""
    ns = cutlass.min(Int32(cutlass.min(idle_ns, Int64(NAP_NS * 64))) >> 6, Int32(NAP_NS))
    if ns > 100:
        sync.ptx_do("nanosleep.u32 {$r0};", ns)


@cute.jit
def note_pause(s: cutlass.Constexpr):
    """The loop stands still for want of room: the request in the slot has waited for the host."""
    if get(s, Own.WAS_PAUSED) == 0:
        put(s, Own.WAS_PAUSED, 1)
        add(s, Own.PAUSED, 1)
        add(s, Own.PAUSES, 1)
        put(s, Own.IDLE_SINCE, mapped.now())


@cute.jit
def leave(s: cutlass.Constexpr, state: cutlass.Constexpr):
    """All CTAs leave; the state is written when they have said so."""
    set_state(s, State.PARKING)
    heartbeat(s, Int32(int(Activity.IDLE)), Int32(0))
    put(s, Own.DONE, get_int(s, Own.DONE) + s.ctas)
    put(s, Own.FLIGHT, int(Segment.LEAVE))
    zero = Int32(0)
    publish(s, Int32(int(Segment.LEAVE)), zero, zero, zero, zero)
    wait_done(s)
    put(s, Own.FLIGHT, 0)
    if s.lane == 0:
        sync.st_word(s.board + int(Board.FIRST_TAG) * 4, Uint32(get_int(s, Own.TAG)))
    cute.arch.sync_warp()
    mapped.fence()
    set_state(s, state)


@cute.jit
def between_steps(s: cutlass.Constexpr, layers: Int32, taken: Int32):
    """Open the next step, or idle, or pause, or leave (1)."""
    leaves = Int32(0)
    command = get(s, Own.COMMAND)
    if command == int(Command.SHUTDOWN):
        leave(s, State.STOPPED)
        leaves = Int32(1)
    elif command == int(Command.PARK):
        leave(s, State.PARKED)
        leaves = Int32(1)
    else:
        abort_slot(s)
        admit(s)
        now = mapped.now()
        if taken != 0:
            put(s, Own.IDLE_SINCE, now)
        if get(s, Own.STAGE) != int(Stage.FREE):
            if completion_room(s) >= STEP_ENTRIES:
                copy_prompt(s, get(s, Own.KV_TOKENS) + 1)
                open_step(s, layers)
                put(s, Own.WAS_PAUSED, 0)
                put(s, Own.IDLE_SINCE, now)
            else:
                note_pause(s)
                heartbeat(s, Int32(int(Activity.PAUSED)), Int32(0))
                nap(now - get(s, Own.IDLE_SINCE))
        else:
            heartbeat(s, Int32(int(Activity.IDLE)), Int32(0))
            idle, limit = now - get(s, Own.IDLE_SINCE), get(s, Own.PARK_AFTER_NS)
            if (limit >= 0) & (idle > limit):
                if try_park(s) != 0:
                    leave(s, State.PARKED)
                    leaves = Int32(1)
            if leaves == 0:
                nap(idle)
    return leaves


# -- the warp's life ---------------------------------------------------------------------------
@cute.jit
def serve(s: cutlass.Constexpr, layers: Int32):
    """From launch to park or shutdown."""
    first_tag = Int32(sync.ld_word(s.board + int(Board.FIRST_TAG) * 4))
    put(s, Own.TAG, first_tag)
    put(s, Own.DONE, sync.ld_acquire(s.board + int(Board.DONE) * 4))
    put(s, Own.FLIGHT, 0)
    put(s, Own.IDLE_SINCE, mapped.now())
    leaves = Int32(0)
    while leaves == 0:
        look(s)
        flight, kept = get_int(s, Own.FLIGHT), Int64(0)
        if flight != 0:
            kept = Int64(STEP_ENTRIES)  # the step that runs may write as many
        drain_aborts(s)
        taken = drain_requests(s, kept)
        abort_pending(s, kept)
        if flight != 0:
            heartbeat(s, Int32(int(Activity.WORKING)), get_int(s, Own.FLIGHT_ROWS))
            if flight == int(Segment.DECODE):
                end_decode(s, layers)
            else:
                copy_prompt(s, get(s, Own.COPIED) + 1)
                end_prompt(s)
        else:
            leaves = between_steps(s, layers, taken)


def run_service(k):
    """The life of the service warp of CTA 0, all 32 lanes; see core.Core."""
    serve(Service(k, arg(k, Arg.SERVICE)), k.layers)
