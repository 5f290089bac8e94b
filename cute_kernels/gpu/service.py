"""The service warp: one warp of CTA 0 that is the engine between launch and park.

It reads the wire, admits, publishes the descriptor of each step and decides what comes of its
results. Between two descriptors of a request only the results, the walk with its stop rules and the
next descriptor stand on the path; everything of the host's is read, and everything for it written,
while the next step runs. Every large piece of it is called from one place, in `turn`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.gpu import head, mapped, sync
from cute_kernels.gpu.admission import (
    abort_pending,
    admit,
    copy_prompt,
    finish,
    is_aborted,
    stop_id,
)
from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.board import FEW_ROWS, MAX_ROWS, Board, Stamp
from cute_kernels.gpu.control import (
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
    set_state,
    try_park,
)
from cute_kernels.gpu.core import arg
from cute_kernels.gpu.descriptor import ask_rows
from cute_kernels.gpu.service_block import SPLITS, Own, Stage
from cute_kernels.gpu.step import (
    DECODE,
    DRAFT,
    LEAVE,
    PROMPT,
    ROWS,
    choose_step,
    path_at,
    publish,
)
from cute_kernels.gpu.step_wait import COUNT, DECISIONS, RESULTS, TREE, wait_step
from cute_kernels.gpu.walk import clear_decisions, read_tree, tree_words, walk
from host.wire import Activity, Command, FinishReason, State

NAP_NS = 20_000


# -- the end of a step -------------------------------------------------------------------------
@cute.jit
def how_it_ends(kind: Int32, rows: Int32, decides: Int32):
    """What to wait for."""
    how = Int32(COUNT)
    if (kind == DECODE) | (kind == ROWS):
        how = Int32(RESULTS)
        if (decides != 0) | (rows > 1):
            how = Int32(DECISIONS)
    elif (kind == DRAFT) & (rows > 0):
        how = Int32(TREE)
    return how


@cute.jit
def take_row_0(s: cutlass.Constexpr, words: cute.Tensor):
    """The results of a step of one row that takes the likeliest token: merged, as its decision."""
    head.clear_results(s.k, Int32(1))
    best, token, log_sum, flags = head.merge_results(s.k, words)
    words[0], words[1] = sync.as_bits(token), sync.as_bits(-log_sum)
    words[2] = sync.select((flags != 0) | (best == float("-inf")), Uint32(1), Uint32(0))


def _over_lanes(s, parts):
    """A word of the split in the lane of its number, 0 in the others."""
    value = Int64(0)
    for which, part in parts.items():
        value = mapped.select(s.lane == which - Own.SPLIT_STEPS, Int64(part), value)
    return value


@cute.jit
def note_split(s: cutlass.Constexpr, flight: Int32, rows: Int32, count: Int32, stamp: Int64):
    """Where the time of a step with rows went. stamp: of lane i Stamp i."""
    now, mine = mapped.now(), Int64(0)
    at = [mapped.from_lane(stamp, i) for i in range(len(Stamp))]
    gate, compacted, context = at[int(Stamp.GATE)], at[int(Stamp.COMPACTED)], at[int(Stamp.CONTEXT)]
    drafted, tree, last = at[int(Stamp.DRAFTED)], at[int(Stamp.TREE)], at[int(Stamp.HEAD)]
    if flight == DRAFT:
        if rows == 0:  # no more than what the last step left to do
            drafted, tree = context, context
        mine = _over_lanes(s, {
            Own.SPLIT_DRAFTED: Int32(rows > 0), Own.SPLIT_COMPACT: compacted - gate,
            Own.SPLIT_DRAFT: drafted - compacted, Own.SPLIT_TREE: tree - drafted,
        })  # fmt: skip
    else:
        mine = _over_lanes(s, {
            Own.SPLIT_STEPS: 1, Own.SPLIT_ROWS: rows, Own.SPLIT_TOKENS: count,
            Own.SPLIT_VERIFY: last - gate, Own.SPLIT_DECIDE: now - last,
            Own.SPLIT_TOTAL: now - get(s, Own.OPENED),
        })  # fmt: skip
        put(s, Own.OPENED, now)
    if s.lane < SPLITS:
        word = s.block + 8 * (int(Own.SPLIT_STEPS) + Int64(s.lane))
        mapped.st_own(word, mapped.ld_own(word) + mine)
    cute.arch.sync_warp()


@cute.jit
def close_decode(
    s: cutlass.Constexpr, kv: Int32, count: Int32, token: Int32, logprob: Int32, row: Int32
):
    """The tokens of a step out, and the slot on."""
    put(s, Own.STAGE, int(Stage.DECODE))
    add(s, Own.STEPS, 1)
    add(s, Own.NEW_TOKENS, count)
    put(s, Own.KV_TOKENS, kv)
    put(s, Own.CONTEXT, count)
    if s.lane < FEW_ROWS:
        mapped.st_own_int(path_at(s), row)
    if count > 0:
        put(s, Own.NEWEST, cute.arch.shuffle_sync(token, count - 1))
        if get(s, Own.LOGPROBS) != 0:
            sync.fence_gpu()  # behind the decisions are the alternatives
        emit_tokens(s, count, token, logprob, row, arg(s.k, Arg.ALTERNATIVES))


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
def between_steps(s: cutlass.Constexpr, taken: Int32):
    """What to do while no step runs: (1: open the slot's next step, 1: leave, reason to end the
    slot's request or 0)."""
    opens, leaves, reason = Int32(0), Int32(0), Int32(0)
    idle, activity = Int64(-1), Int32(int(Activity.IDLE))
    if get(s, Own.COMMAND) != int(Command.RUN):
        leaves = Int32(1)
    else:
        admit(s)
        now = mapped.now()
        if taken != 0:
            put(s, Own.IDLE_SINCE, now)
        if get(s, Own.STAGE) == int(Stage.FREE):
            idle = now - get(s, Own.IDLE_SINCE)
            limit = get(s, Own.PARK_AFTER_NS)
            if (limit >= 0) & (idle > limit):
                leaves = try_park(s)
        else:
            room = completion_room(s)
            if (is_aborted(s) != 0) & (room >= 1):
                reason = Int32(int(FinishReason.ABORT))
            elif room >= get(s, Own.ENTRIES):
                opens = Int32(1)
                put(s, Own.WAS_PAUSED, 0)
                put(s, Own.IDLE_SINCE, now)
                put(s, Own.OPENED, now)
            else:
                note_pause(s)
                activity = Int32(int(Activity.PAUSED))
                idle = now - get(s, Own.IDLE_SINCE)
    if (opens == 0) & (leaves == 0):
        heartbeat(s, activity, Int32(0))
        nap(idle)
    return opens, leaves, reason


# -- the warp's life ---------------------------------------------------------------------------
@cute.jit
def turn(s: cutlass.Constexpr, words: cute.Tensor, tree: cute.Tensor):
    """Wait for the step that runs, publish the next one, then see to what came of the first; or,
    while none runs, open one. 1: all have left."""
    look(s)
    flight, rows, kept = get_int(s, Own.FLIGHT), get_int(s, Own.FLIGHT_ROWS), Int64(0)
    if flight != 0:
        kept = get(s, Own.ENTRIES)  # the step that runs may write as many
    drain_aborts(s)
    taken = drain_requests(s, kept)
    abort_pending(s, kept)
    opens, leaves, reason = Int32(0), Int32(0), Int32(0)
    if flight == 0:
        opens, leaves, reason = between_steps(s, taken)
    else:
        heartbeat(s, Int32(int(Activity.WORKING)), rows)
    prefill = Int32(get(s, Own.STAGE) == int(Stage.PREFILL))
    if (flight == PROMPT) | ((opens != 0) & (prefill != 0)):
        upto = get(s, Own.KV_TOKENS) + 1
        if flight == PROMPT:
            upto = get(s, Own.COPIED) + 1
        copy_prompt(s, upto)
    # all that the decision needs is read before the results are there
    kv, drafted = get_int(s, Own.KV_TOKENS), get_int(s, Own.DRAFTED)
    tag, decides, new = get_int(s, Own.TAG), get_int(s, Own.DECIDES), get_int(s, Own.NEW_TOKENS)
    left, token, context, row = get_int(s, Own.MAX_NEW) - new, Int32(0), Int32(0), Int32(0)
    if flight == 0:
        token = get_int(s, Own.NEWEST)
        context, row = get_int(s, Own.CONTEXT), mapped.ld_own_int(path_at(s))
    kind, next_rows, depth, is_tree = Int32(0), Int32(0), Int32(0), Int32(0)
    count, stamp, my_token, my_logprob = Int32(0), Int64(0), Int32(0), Int32(0)
    if flight != 0:
        stop = sync.select_int(s.lane < get_int(s, Own.STOP_COUNT), stop_id(s), Int32(-1))
        least = get_int(s, Own.MIN_NEW) - new
        has_room = completion_room(s) >= 2 * get(s, Own.ENTRIES)
        is_free = (get(s, Own.COMMAND) == int(Command.RUN)) & (is_aborted(s) == 0)
        # alternatives are read before the next step may overwrite them
        may_go_on = Int32(has_room & is_free & (get(s, Own.LOGPROBS) == 0))
        how = how_it_ends(flight, rows, decides)
        read_tree(arg(s.k, Arg.ROW_TABLE), rows * Int32(how == DECISIONS), s.lane, tree)
        wait_step(s, how, rows, tag, words)
        if s.lane < len(Stamp):
            stamp = mapped.ld_gpu(s.board + 4 * int(Board.STAMP) + 8 * Int64(s.lane))
        if how == RESULTS:
            take_row_0(s, words)
        if (flight == DECODE) | (flight == ROWS):
            if how == DECISIONS:
                clear_decisions(s.board, rows, s.lane)
            count, reason, my_token, my_logprob, row = walk(
                s.lane, rows, words, tree, stop, least, left
            )
            opens = may_go_on & Int32(reason == 0)
            kv, left, context, prefill = kv + count, left - count, count, Int32(0)
            if count > 0:
                token = cute.arch.shuffle_sync(my_token, count - 1)
        elif flight == DRAFT:
            kind, next_rows, token = Int32(DECODE), Int32(1), get_int(s, Own.NEWEST)
            if rows > 0:
                found = ask_rows(arg(s.k, Arg.ROW_TABLE), s.lane)
                for i in cutlass.range_constexpr(len(found)):
                    words[i] = found[i]
                next_rows = Int32(sync.ld_word(s.board + 4 * int(Board.TREE_ROWS)))
            is_tree = Int32(next_rows > 1)
            if next_rows > FEW_ROWS:
                kind = Int32(ROWS)
    if opens != 0:
        kind, next_rows, token, depth = choose_step(
            s, prefill, kv, left, token, context, row, drafted
        )
    if leaves != 0:
        set_state(s, State.PARKING)
        kind = Int32(LEAVE)
    if kind != 0:
        publish(
            s, tag + 1, kind, next_rows, kv, token, depth, context, row, drafted, decides, is_tree,
            words,
        )  # fmt: skip
    if flight != 0:
        add(s, Own.STEP, 1)
        if flight == PROMPT:
            put(s, Own.KV_TOKENS, kv + rows)
        elif flight != LEAVE:
            note_split(s, flight, rows, count, stamp)
            if flight != DRAFT:
                close_decode(s, kv, count, my_token, my_logprob, row)
        if kind == 0:
            put(s, Own.FLIGHT, 0)
            put(s, Own.IDLE_SINCE, mapped.now())
    if reason != 0:
        position = Int32(0)
        if reason == int(FinishReason.ERROR):
            position = kv
        finish(s, reason, position)
    return Int32(flight == LEAVE)


@cute.jit
def leave(s: cutlass.Constexpr):
    """All CTAs have left: where the next launch goes on, and only then the state."""
    heartbeat(s, Int32(int(Activity.IDLE)), Int32(0))
    if s.lane == 0:
        sync.st_word(s.board + int(Board.FIRST_TAG) * 4, Uint32(get_int(s, Own.TAG)))
    cute.arch.sync_warp()
    mapped.fence()
    state = Int64(int(State.PARKED))
    if get(s, Own.COMMAND) == int(Command.SHUTDOWN):
        state = Int64(int(State.STOPPED))
    set_state(s, state)


@cute.jit
def serve(s: cutlass.Constexpr):
    """From launch to park or shutdown."""
    put(s, Own.TAG, Int32(sync.ld_word(s.board + int(Board.FIRST_TAG) * 4)))
    put(s, Own.DONE, sync.ld_acquire(s.board + int(Board.DONE) * 4))
    taps, drafts = Int32(arg(s.k, Arg.DRAFT_TAPS)), Int32(arg(s.k, Arg.DRAFT_LAYERS))
    put(s, Own.DRAFT_LAST, 4 * s.k.layers + 1 + taps + 1 + 4 * drafts + 1)
    put(s, Own.FLIGHT, 0)
    put(s, Own.IDLE_SINCE, mapped.now())
    most = max(head.result_words(s.k).layout.shape, 4 * (MAX_ROWS // 32))
    words = cute.make_rmem_tensor(cute.make_layout(most), Uint32)
    tree, leaves = tree_words(), Int32(0)
    while leaves == 0:
        leaves = turn(s, words, tree)
    leave(s)


def run_service(k):
    """The life of the service warp of CTA 0, all 32 lanes; see core.Core."""
    serve(Service(k, arg(k, Arg.SERVICE)))
