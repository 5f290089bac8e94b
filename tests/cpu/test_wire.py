"""Rings and control block: layout, order, wrap-around, and the sizes that are refused."""

import re
import threading

import numpy as np
import pytest

from cute_kernels.cpu.service import (
    completion_room,
    drain_aborts,
    drain_requests,
    emit_copied,
    emit_terminal,
    emit_tokens,
)
from cute_kernels.cpu.slots import Count, make_decision, make_sched
from host.ring import FULL, make_staging, push_abort, push_request, take, wait_take
from host.wire import (
    BLOCK_BYTES,
    COMPLETION,
    REQUEST,
    CompletionKind,
    FinishReason,
    RequestKind,
    State,
    Word,
    make_wire,
    step_worst_case,
)

NEAR_WRAPS = [0, 2**31 - 3, 2**32 - 3, 2**62]


def small(first_sequence=0, **sizes):
    shape = {"slots": 2, "workers": 2, "ctx": 64, "max_inflight": 8, "request_entries": 4}
    shape |= {"completion_entries": 16, "first_sequence": first_sequence} | sizes
    return make_wire(**shape)


def emit_one(wire, sched, request_id, token, logprob):
    decision = make_decision(1)
    decision.token[0, 0], decision.logprob[0, 0] = token, logprob
    emit_tokens(wire, sched, decision, 0, request_id, 1, 0)


def sched_for(wire, first_sequence=0):
    return make_sched(
        slots=2, ctx=64, pages=4, max_inflight=len(wire.abort) // 2, first_sequence=first_sequence
    )


def test_entries_are_one_cache_line_and_aligned():
    wire = small()
    assert REQUEST.itemsize == COMPLETION.itemsize == 64
    for words in (wire.control, wire.request_words, wire.completion_words, wire.abort):
        assert words.ctypes.data % 64 == 0
    assert wire.request.ctypes.data == wire.request_words.ctypes.data
    assert wire.params.ctypes.data == wire.pool.ctypes.data
    assert wire.params.itemsize == BLOCK_BYTES


def test_control_words_of_different_writers_do_not_share_a_line():
    lines = {
        "host": {Word.COMMAND, Word.ABORT_TAIL},
        "poller": {Word.COMPLETION_HEAD},
        "heads": {Word.REQUEST_HEAD, Word.ABORT_HEAD},
        "state": {Word.STATE},
        "beat": {Word.HEARTBEAT, Word.STEP, Word.ACTIVITY, Word.PAUSES, Word.ROWS}
        | {Word.FREE_PAGES, Word.FREE_SLOTS, Word.PENDING},
        "fault": {Word.FAULT_OPERATION, Word.FAULT_WORKERS},
        "splits": {w for w in Word if w.name.startswith("SPLIT")},
        "phase": {Word.PHASE},
    }
    assert set().union(*lines.values()) == set(Word)
    used = [{word // 8 for word in words} for words in lines.values()]
    assert [len(one) for one in used] == [2 if name == "splits" else 1 for name in lines]
    assert len(set.union(*used)) == sum(map(len, used))


@pytest.mark.parametrize("start", NEAR_WRAPS)
def test_requests_arrive_in_order_through_many_wraps(start):
    wire = small(start)
    sched = sched_for(wire, start)
    assert drain_requests(wire, sched) == 0
    seen = []
    for i in range(1, 40):
        state = push_request(wire, start + i - 1, i, int(RequestKind.SUBMIT), 5, 7, 1, 2)
        assert state == State.RUNNING
        if i % 3 == 0:
            assert drain_requests(wire, sched) == 3
            while sched.count[Count.PENDING_HEAD] < sched.count[Count.PENDING_TAIL]:
                at = sched.count[Count.PENDING_HEAD] % len(sched.pending)
                seen.append(int(sched.pending[at]["request_id"]))
                sched.count[Count.PENDING_HEAD] += 1
    assert seen == list(range(1, 40))
    assert drain_requests(wire, sched) == 0


@pytest.mark.parametrize("start", NEAR_WRAPS)
def test_full_request_ring_refuses_and_keeps_what_it_holds(start):
    wire = small(start)
    sched = sched_for(wire, start)
    kind = int(RequestKind.SUBMIT)
    for i in range(4):
        assert push_request(wire, start + i, i + 1, kind, 1, 1, 0, 1) != FULL
    assert push_request(wire, start + 4, 99, kind, 1, 1, 0, 1) == FULL
    assert drain_requests(wire, sched) == 4
    assert sched.pending["request_id"][:4].tolist() == [1, 2, 3, 4]
    assert push_request(wire, start + 4, 5, kind, 1, 1, 0, 1) != FULL


@pytest.mark.parametrize("start", NEAR_WRAPS)
def test_completions_arrive_whole_and_in_order(start):
    wire = small(start)
    sched = sched_for(wire, start)
    staging = make_staging(5)
    head, got = start, []
    assert take(wire, head, staging) == 0
    for i in range(60):
        emit_one(wire, sched, 1000 + i, i, -0.5 * i)
        if i % 7 == 6:
            while taken := take(wire, head, staging):
                got += [
                    (int(e["request_id"]), int(e["token"][0]), float(e["logprob"][0]))
                    for e in staging[:taken]
                ]
                head += taken
            assert completion_room(wire, sched) == 16
    assert got == [(1000 + i, i, -0.5 * i) for i in range(56)]


@pytest.mark.parametrize("alternatives", [0, 1, 2, 3, 20])
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 16])
def test_pairs_of_a_step_fill_entries_and_no_more_than_the_worst_case(tokens, alternatives):
    wire = small(completion_entries=256)
    sched = sched_for(wire)
    decision = make_decision(2)
    decision.token[1] = np.arange(16) + 100
    decision.logprob[1] = -np.arange(16)
    decision.alternative[1] = np.arange(16 * 20).reshape(16, 20)
    decision.alternative_logprob[1] = -np.arange(16 * 20).reshape(16, 20)
    emit_tokens(wire, sched, decision, 1, 7, tokens, alternatives)
    staging = make_staging(256)
    taken = take(wire, 0, staging)
    assert taken == -(-tokens * (1 + alternatives) // 4)
    assert taken + 2 == step_worst_case(1, tokens, alternatives)
    pairs = [
        (int(e["token"][i]), float(e["logprob"][i]))
        for e in staging[:taken]
        for i in range(e["pairs"])
    ]
    want = []
    for t in range(tokens):
        want.append((100 + t, -float(t)))
        want += [(20 * t + a, -float(20 * t + a)) for a in range(alternatives)]
    assert pairs == want
    assert {int(e["accepted"]) for e in staging[:taken]} == {tokens}


def test_room_counts_down_and_comes_back():
    wire = small()
    sched = sched_for(wire)
    for i in range(16):
        assert completion_room(wire, sched) == 16 - i
        emit_copied(wire, sched, 1)
    assert take(wire, 0, make_staging(3)) == 3
    assert completion_room(wire, sched) == 3


def test_terminal_entry_says_how_it_ended():
    wire = small()
    sched = sched_for(wire)
    emit_terminal(wire, sched, 42, int(FinishReason.ERROR), 3, 4, 5, 6)
    staging = make_staging(1)
    assert take(wire, 0, staging) == 1
    entry = staging[0]
    assert (entry["request_id"], entry["kind"]) == (42, CompletionKind.TERMINAL)
    assert entry["reason"] == FinishReason.ERROR
    assert entry["token"].tolist() == [3, 4, 5, 6]


def test_abort_before_its_submit_is_not_lost():
    wire = small()
    sched = sched_for(wire)
    push_abort(wire, 0, 8 + 3)
    drain_aborts(wire, sched)
    sched.count[Count.ABORTS_SEEN] = 0  # looked for, not found
    push_request(wire, 0, 8 + 3, int(RequestKind.SUBMIT), 1, 1, 0, 1)
    drain_requests(wire, sched)
    assert sched.count[Count.ABORTS_SEEN] == 1
    assert sched.marks[3] == 8 + 3


def test_as_many_aborts_as_requests_fit():
    wire = small()
    sched = sched_for(wire)
    for round_ in range(5):
        for i in range(8):
            push_abort(wire, 8 * round_ + i, 8 * (round_ + 1) + i)
        drain_aborts(wire, sched)
        assert sched.marks.tolist() == [8 * (round_ + 1) + i for i in range(8)]


def test_ping_waits_for_room_and_hides_nothing_in_front_of_it():
    wire = small()
    sched = sched_for(wire)
    for _ in range(16):
        emit_copied(wire, sched, 1)
    push_request(wire, 0, 1, int(RequestKind.SUBMIT), 1, 1, 0, 1)
    push_request(wire, 1, -1, int(RequestKind.PING), 0, 0, 0, 0)
    assert drain_requests(wire, sched) == 1
    assert take(wire, 0, make_staging(16)) == 16
    assert drain_requests(wire, sched) == 1
    staging = make_staging(1)
    assert take(wire, 16, staging) == 1
    assert (staging[0]["request_id"], staging[0]["kind"]) == (-1, CompletionKind.PONG)


def test_waiting_ends_when_something_comes_or_patience_ends():
    wire = small()
    sched = sched_for(wire)
    staging = make_staging(4)
    assert wait_take(wire, 0, staging, 1000) == 0
    timer = threading.Timer(0.05, emit_copied, (wire, sched, 7))
    emit_copied(wire, sched, 6), take(wire, 0, staging)  # compile before the timer runs
    timer.start()
    assert wait_take(wire, 1, staging, 5_000_000) == 1
    assert staging[0]["request_id"] == 7
    timer.join()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"request_entries": 6}, "request_entries is 6; it must be a power of two"),
        ({"completion_entries": 0}, "completion_entries is 0; it must be a power of two"),
        (
            {"completion_entries": 8},
            "completion_entries is 8; 2 slots need at least 10: two steps' worst case. "
            "Use a larger ring or fewer slots",
        ),
        (
            {"pool_bytes": 512},
            "pool_bytes is 512; one prompt of ctx=64 tokens needs 3168",
        ),
    ],
)
def test_sizes_that_cannot_work_are_refused(sizes, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        small(**sizes)


def test_worst_case_counts_every_entry_a_step_can_write():
    assert step_worst_case(1, 1) == 3  # tokens, terminal, copied
    assert step_worst_case(16, 1) == 33
    assert step_worst_case(2, 9) == 2 * (3 + 1) + 1


def test_unwritten_entries_are_not_valid_for_any_start():
    for start in NEAR_WRAPS:
        assert take(small(start), start, make_staging(4)) == 0
        assert np.all(small(start).request["sequence"] == start - 1)
