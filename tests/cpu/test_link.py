"""The host's end of the wire when readers fail, places run short, and processes come and go."""

import gc
import os
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from engine_checks import check_all_returned
from tiny_model import greedy, prompt, tiny_engine

from cute_kernels.cpu.loop import _try_park
from cute_kernels.cpu.slots import make_sched
from host.inflight import InFlight
from host.link import Link
from host.ring import push_abort, push_request
from host.watch import Watch
from host.wire import COMPLETION, Command, CompletionKind, RequestKind, State, Word, make_wire
from megadecode import DeviceError, DeviceHung, SamplingParams


def long(new=480):
    return SamplingParams(max_new_tokens=new, ignore_eos=True)


@pytest.mark.parametrize("what", ["nothing", "a request", "an abort"])
def test_the_last_look_before_parking_sees_what_was_pushed(what):
    wire = make_wire(slots=1, workers=1, ctx=64, max_inflight=4, completion_entries=32)
    sched = make_sched(slots=1, ctx=64, pages=2, max_inflight=4)
    if what == "a request":
        push_request(wire, 0, 5, int(RequestKind.SUBMIT), 1, 1, 0, 1)
    if what == "an abort":
        push_abort(wire, 0, 5)
    assert _try_park(wire, sched) == (what == "nothing")
    want = State.PARKING if what == "nothing" else State.RUNNING
    assert wire.control[Word.STATE] == want


def test_aborts_behind_a_blocked_head_leave_no_gaps():
    """Places of answered requests are given away at once, however often; nobody is overwritten."""
    with tiny_engine(slots=1, max_inflight=4) as engine:
        with engine.parked():
            running = engine.submit(prompt(5), long(400))
            waiting = engine.submit(prompt(6), long(5))
        for _ in range(40):
            pair = [engine.submit(prompt(7), long(9), timeout=10) for _ in range(2)]
            [request.abort() for request in pair]
            assert {request.result(10).finish_reason for request in pair} <= {"abort", "length"}
        assert len(running.result(10).token_ids) == 400
        assert len(waiting.result(10).token_ids) == 5
        check_all_returned(engine)


def test_an_abort_of_a_place_used_twice_between_two_looks_is_kept():
    """Abort, end, reuse and abort again before the device looks: both ids reach it."""
    wire = make_wire(slots=1, workers=1, ctx=64, max_inflight=2, completion_entries=32)
    for tail, request_id in enumerate((2, 3, 4, 5)):
        push_abort(wire, tail, request_id)
    assert wire.abort.tolist() == [2, 3, 4, 5]


def test_a_place_that_has_become_free_is_given_away_last():
    book, places = InFlight(4, 16), []
    for _ in range(8):
        request_id, _ = book.open(SimpleNamespace(), 1)
        places.append(request_id % 4)
        book.withdraw(request_id)
    assert places == [0, 1, 2, 3] * 2


def test_a_failing_reader_ends_its_own_request_only():
    with tiny_engine() as engine:
        want = greedy(engine, prompt(8), 60)[0]
        with engine.parked():
            bad = engine.submit(prompt(9), long())
            good = engine.submit(prompt(8), long(60))

            def fail(*details):
                raise RuntimeError("no room on the disk")

            bad.on_pairs = fail
        with pytest.raises(
            DeviceError, match=r"the request's reader failed: .*no room on the disk"
        ):
            bad.result(10)
        assert good.result(10).token_ids == want
        assert greedy(engine, prompt(8), 60)[0] == want
        check_all_returned(engine)


def test_a_reader_that_fails_at_the_end_does_not_hang():
    with tiny_engine() as engine:
        with engine.parked():
            bad = engine.submit(prompt(9), long(3))
            bad.on_end = lambda *details: 1 / 0
        with pytest.raises(DeviceError, match="division by zero"):
            bad.result(10)
        assert len(greedy(engine, prompt(8), 5)[0]) == 5


def test_close_is_prompt_while_others_go_on_submitting():
    engine = tiny_engine()
    greedy(engine, prompt(3), 2)
    stop = threading.Event()
    errors = []

    def submit():
        while not stop.is_set():
            try:
                engine.submit(prompt(5), long(50)).result(20)
            except DeviceError as error:
                errors.append(str(error))
                return

    threads = [threading.Thread(target=submit) for _ in range(3)]
    [t.start() for t in threads]
    time.sleep(0.1)
    start = time.monotonic()
    engine.close()
    assert time.monotonic() - start < 8
    [t.join(10) for t in threads]
    stop.set()
    assert errors == ["the engine is closed"] * 3


def test_a_request_keeps_its_engine_alive():
    request = tiny_engine().submit(prompt(5), long(30))
    gc.collect()
    assert len(request.result(20).token_ids) == 30


def test_a_forked_child_is_told_and_ends_at_once():
    with tiny_engine() as engine:
        greedy(engine, prompt(3), 2)
        start = time.monotonic()
        child = os.fork()
        if child == 0:
            try:
                engine.submit(prompt(3))
            except DeviceError as error:
                with pytest.raises(DeviceError, match="another process"):
                    engine.stats()
                engine.close()
                os._exit(0 if "another process" in str(error) else 2)
            os._exit(1)
        ended = 0
        while not ended and time.monotonic() - start < 10:
            ended, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.01)
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        assert os.waitstatus_to_exitcode(status) == 0
        assert len(greedy(engine, prompt(3), 20)[0]) == 20


def test_close_on_the_pollers_thread_does_not_wait_for_itself():
    engine = tiny_engine()
    with engine.parked():
        request = engine.submit(prompt(5), long(100))
        on_pairs = request.on_pairs

        def close_then_go_on(*details):
            engine.close()
            on_pairs(*details)

        request.on_pairs = close_then_go_on
    start = time.monotonic()
    assert request.result(10).finish_reason in ("abort", "length")
    assert time.monotonic() - start < 8
    end = time.monotonic() + 8
    while not engine.is_lost and time.monotonic() < end:
        time.sleep(0.01)
    assert engine.is_lost


def test_parking_a_faulted_device_is_refused():
    with tiny_engine(deadline_s=0.3) as engine:
        greedy(engine, prompt(5), 2)
        engine._parts.sched.plant[:] = 3, 1
        with pytest.raises(DeviceHung):
            engine.submit(prompt(5)).result(10)
        with pytest.raises(DeviceHung), engine.parked():
            pytest.fail("the body of parked() ran on a faulted device")


class NeverStarts:
    """A device whose launches wait behind something else."""

    operations, workers, worker_name, crash = ("all",), 1, "worker", None

    def launch(self):
        pass

    def failure(self):
        return ""

    def close(self, timeout_s=5.0):
        return False


def test_a_device_that_does_not_start_fails_a_ping_and_is_told_to_leave():
    wire = make_wire(slots=1, workers=1, ctx=64, max_inflight=2, completion_entries=64)
    link = Link(wire, NeverStarts(), deadline_s=0.2)
    with pytest.raises(DeviceHung, match=r"no sign of life for 0\.2 s: worker 0 outside"):
        link.ping(10)
    assert wire.control[Word.COMMAND] == Command.RUN
    late = np.zeros((), COMPLETION)
    late["kind"], late["request_id"] = CompletionKind.PONG, -1
    link._dispatch(late)  # its answer comes all the same: nobody waits for it
    link.close(1)
    assert wire.control[Word.COMMAND] == Command.SHUTDOWN


def test_the_watchdog_counts_moving_phases_as_life_and_a_stopped_process_as_none(monkeypatch):
    wire = make_wire(slots=1, workers=2, ctx=64, max_inflight=2, completion_entries=64)
    now = [0.0]
    monkeypatch.setattr("host.watch.time.monotonic", lambda: now[0])
    watch = Watch(1.0)

    def look(after_s):
        now[0] += after_s
        return watch.look(wire.control, lambda: "in the test")

    assert look(0) is None
    for step in range(100):  # one long step: the heartbeat stands still, a worker's phase moves
        wire.control[Word.PHASE + 8] = step
        assert look(0.04) is None
    assert look(3600) is None, "the process was stopped: nobody saw that hour pass"
    for _ in range(18):
        assert look(0.05) is None
    found = look(0.1) or look(0.1)
    assert str(found) == "the device showed no sign of life for 1 s: in the test"
    wire.control[Word.STATE] = State.PARKED
    assert look(0.05) is None


def test_two_engines_side_by_side():
    with tiny_engine() as one, tiny_engine(slots=2) as other:
        want = greedy(one, prompt(20), 50)[0]
        requests = [e.submit(prompt(20), long(50)) for e in (one, other) * 5]
        assert all(r.result(20).token_ids == want for r in requests)


def test_results_are_the_readers_own():
    with tiny_engine() as engine:
        request = engine.submit(prompt(5), long(4))
        request.result(10).token_ids.append(99)
        assert np.array(request._ids).size == 4
