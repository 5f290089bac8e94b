"""The service warp's wait for the end of a step, and what it says when that does not come."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.gpu import head, mapped, sync
from cute_kernels.gpu.board import Board
from cute_kernels.gpu.control import get, get_int, heartbeat, put, sample_phases, set_state
from cute_kernels.gpu.service_block import Own
from cute_kernels.gpu.walk import ask_decisions
from host.wire import Activity, State, Word

BEAT_NS = 10_000_000

# What tells that a step has ended
RESULTS = 0  # every CTA has spoken about row 0
DECISIONS = 1  # every row is decided
TREE = 2  # TREE_TAG has the step's tag
COUNT = 3  # every CTA has added 1 to DONE


@cute.jit
def wait_step(s: cutlass.Constexpr, how: Int32, rows: Int32, tag: Int32, words: cute.Tensor):
    """words: head.result_words of row 0, or four words for each of the lane's rows."""
    now = mapped.now()
    put(s, Own.SINCE, now)
    put(s, Own.BEAT, now)
    at, wanted = s.board + int(Board.DONE) * 4, get_int(s, Own.DONE)
    if how == TREE:
        at, wanted = s.board + int(Board.TREE_TAG) * 4, tag
    missing, tries = Int32(1), Int32(0)
    while missing != 0:
        if how == RESULTS:
            missing = Int32(sync.any_lane_empty(head.ask_results(s.k, words, Int32(0))))
        elif how == DECISIONS:
            missing = Int32(sync.any_lane_empty(ask_decisions(s.board, rows, s.lane, words)))
        else:
            missing = Int32(mapped.ballot(Int32(sync.ld_word(at)) != wanted))
        tries = tries + 1
        if (tries & 63) == 0:
            overdue(s, how)
    if how >= TREE:
        # not in the loop: an acquire empties the first-level cache under the warp that grows a tree
        sync.ld_acquire(at)


@cute.jit
def overdue(s: cutlass.Constexpr, how: Int32):
    """Now and then in a wait: signs of life, and the end at the deadline. A step may be long (a
    chunk of a long prompt); what may not be is that for so long no CTA enters another phase."""
    now = mapped.now()
    if now - get(s, Own.BEAT) > BEAT_NS:
        put(s, Own.BEAT, now)
        heartbeat(s, Int32(int(Activity.WORKING)), get_int(s, Own.FLIGHT_ROWS))
        progress = sample_phases(s)
        if progress != get_int(s, Own.PROGRESS):
            put(s, Own.PROGRESS, progress)
            put(s, Own.SINCE, now)
    if now - get(s, Own.SINCE) > sync.SERVICE_DEADLINE_NS:
        report_hang(s, how)


@cute.jit
def report_hang(s: cutlass.Constexpr, how: Int32):
    """The deadline has passed: say which phase, and which CTAs are in it, then end the kernel.

    Missing are the CTAs that are in a phase, or that have no results where these are waited for;
    all, if none is in any. The least advanced of them are to blame: the others wait for what they
    have not published.
    """
    n = -(-s.ctas // 32)
    first, lates, phases = Int32(2**30), [], []
    for i in cutlass.range_constexpr(n):
        cta = s.lane + 32 * i
        late, phase = Int32(0), Int32(2**30)
        if cta < s.ctas:
            phase = Int32(sync.ld_word(s.board + Int64((int(Board.PHASE) + cta) * 4)))
            late = Int32(phase != 0)
            if how == RESULTS:
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
