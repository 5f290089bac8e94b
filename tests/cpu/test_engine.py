"""The engine through its public face, on a tiny random model, against the torch oracle."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from tiny_model import CONFIG, STOP_ID, greedy, model, prompt, reference, tiny_engine

from megadecode import (
    DeviceError,
    DeviceHung,
    QueueFull,
    SamplingParams,
)


@pytest.fixture(scope="module")
def engine():
    with tiny_engine() as engine:
        yield engine


def check_all_returned(engine):
    """Nothing is left behind: pages, slots, pool, places in flight."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        stats = engine.stats()
        if stats.free_slots == engine.slots and stats.inflight == 0:
            break
        time.sleep(0.001)
    assert stats.free_pages == stats.pages
    assert stats.free_slots == engine.slots
    assert stats.inflight == stats.pending == 0
    assert engine._link.free_blocks == len(engine._parts.wire.params)
    assert len(engine._link._inflight.handles) == engine._link._inflight.most


@pytest.mark.parametrize("length", [1, 2, 15, 16, 63, 64, 65, 127, 128, 200, 300])
def test_greedy_tokens_equal_the_oracle(engine, length):
    ids = prompt(length)
    got, logprobs = greedy(engine, ids, 70)
    want, gaps = reference().greedy(ids, 70, ())
    first = next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), None)
    assert first is None or gaps[first] < 1e-4, (first, gaps[first])
    assert len(got) == 70
    logits, _ = reference().forward(ids + got[:-1])
    rows = logits[length - 1 :].log_softmax(-1).numpy()
    np.testing.assert_allclose(logprobs, rows[np.arange(70), got], atol=2e-5)


def test_decoded_rows_equal_prefilled_rows_bit_for_bit(engine):
    """The next token after a text does not depend on who wrote the text: prompt or engine."""
    ids = prompt(50)
    tokens, logprobs = greedy(engine, ids, 100)
    for k in (1, 12, 13, 14, 15, 29, 78, 79, 99):
        again, logprob = greedy(engine, ids + tokens[:k], 1)
        assert again == [tokens[k]]
        assert logprob[0].view(np.int32) == logprobs[k].view(np.int32), k


def test_stop_id_ends_and_is_kept():
    stop_at = None
    with tiny_engine() as engine:
        tokens, _ = greedy(engine, prompt(20), 40)
        stop_at = next(i for i in range(5, 40) if tokens[i] not in tokens[:i])
        params = SamplingParams(max_new_tokens=40, stop_token_ids=[tokens[stop_at]])
        result = engine.submit(prompt(20), params).result(10)
        assert result.finish_reason == "stop"
        assert result.token_ids == tokens[: stop_at + 1]
        check_all_returned(engine)


def test_stop_as_the_very_first_token_needs_one_step(engine):
    first, _ = greedy(engine, prompt(9), 1)
    result = engine.submit(prompt(9), SamplingParams(stop_token_ids=first)).result(10)
    assert (result.token_ids, result.finish_reason) == (first, "stop")
    assert result.stats.steps == 1


def test_a_stop_on_the_last_allowed_token_is_a_stop(engine):
    tokens, _ = greedy(engine, prompt(30), 8)
    assert tokens[-1] not in tokens[:-1], "the test needs a token that has not come before"
    params = SamplingParams(max_new_tokens=8, stop_token_ids=(tokens[-1],))
    assert engine.submit(prompt(30), params).result(10).finish_reason == "stop"


def test_stop_token_of_the_model_ends_unless_ignored(engine):
    """Somewhere in these texts the model's own stop id comes up."""
    for seed in range(200):
        tokens, _ = greedy(engine, prompt(10, seed), 60)
        if STOP_ID in tokens:
            at = tokens.index(STOP_ID)
            result = engine.submit(prompt(10, seed), SamplingParams(max_new_tokens=60)).result(10)
            assert result.token_ids == tokens[: at + 1]
            assert result.finish_reason == "stop"
            return
    pytest.fail("no text with the stop id; the model changed")


@pytest.mark.parametrize("new", [0, 1, 2, 7, 8])
def test_exactly_max_new_tokens(engine, new):
    result = engine.submit(prompt(33), SamplingParams(max_new_tokens=new, ignore_eos=True)).result(
        10
    )
    assert len(result.token_ids) == len(result.logprobs) == result.stats.tokens == new
    assert result.finish_reason == "length"
    assert result.stats.steps == new


@pytest.mark.parametrize("length", [505, 510, 511])
def test_context_end_is_a_length_stop_one_token_at_a_time(engine, length):
    result = engine.submit(
        prompt(length), SamplingParams(max_new_tokens=100, ignore_eos=True)
    ).result(10)
    assert len(result.token_ids) == 512 - length
    assert result.finish_reason == "length"


def test_last_page_of_the_context_and_no_further():
    """64 pages of 64 positions, 4,090 prompt tokens, 6 new ones: no page beyond the table."""
    with tiny_engine(ctx=4096, slots=1) as engine:
        ids = prompt(4090)
        got, _ = greedy(engine, ids, 100)
        want, gaps = reference().greedy(ids, 6, ())
        assert len(got) == 6
        assert got == want or min(gaps) < 1e-4
        check_all_returned(engine)


@pytest.mark.slow
def test_no_hole_at_a_power_of_two():
    with tiny_engine(ctx=16500, slots=1) as engine:
        ids = prompt(16380)
        got, _ = greedy(engine, ids, 12)
        want, gaps = reference().greedy(ids, 12, ())
        assert got == want or min(gaps) < 1e-4


def test_follow_up_turn_covers_the_stop_token(engine):
    """A second turn's prompt holds the first turn's stop token, and all of it is prefilled."""
    ids = prompt(21)
    first, _ = greedy(engine, ids, 12)
    turn = ids + first + prompt(7, seed=5)
    got, _ = greedy(engine, turn, 10)
    want, gaps = reference().greedy(turn, 10, ())
    assert got == want or min(gaps) < 1e-4


def test_chunks_add_up_to_the_result(engine):
    request = engine.submit(prompt(40), SamplingParams(max_new_tokens=50, ignore_eos=True))
    ids = [i for chunk in request for i in chunk.token_ids]
    assert ids == request.result(0).token_ids
    assert list(request) == []


def test_leaving_a_stream_early_aborts(engine):
    for chunk in engine.stream(prompt(10), SamplingParams(max_new_tokens=480, ignore_eos=True)):
        assert chunk.token_ids
        break
    check_all_returned(engine)


def test_abort_keeps_what_was_emitted_and_ends_once(engine):
    ids = prompt(12)
    full, _ = greedy(engine, ids, 400)
    ended = set()
    for wait_us in (0, 100, 300, 1000, 3000):
        request = engine.submit(ids, SamplingParams(max_new_tokens=400, ignore_eos=True))
        time.sleep(wait_us / 1e6)
        request.abort()
        request.abort()
        result = request.result(10)
        assert result.token_ids == full[: len(result.token_ids)]
        assert result.finish_reason in ("abort", "length")
        ended.add(result.finish_reason)
        request.abort()
    assert "abort" in ended
    check_all_returned(engine)


def test_abort_while_waiting_for_a_slot():
    with tiny_engine(slots=1) as engine:
        with engine.parked():
            long = engine.submit(prompt(10), SamplingParams(max_new_tokens=300, ignore_eos=True))
            waiting = [
                engine.submit(prompt(10), SamplingParams(max_new_tokens=5)) for _ in range(9)
            ]
            for request in waiting[::2]:
                request.abort()
        reasons = [r.result(10).finish_reason for r in waiting]
        assert reasons[::2] == ["abort"] * 5
        assert set(reasons[1::2]) <= {"length", "stop"}
        assert len(long.result(10).token_ids) == 300
        check_all_returned(engine)


def test_first_in_first_out_when_pages_are_short():
    """A small request does not overtake a large one that waits for pages."""
    with tiny_engine(slots=4, kv_tokens=512) as engine:
        with engine.parked():
            first, large, small = (
                engine.submit(prompt(20), SamplingParams(max_new_tokens=n, ignore_eos=True))
                for n in (200, 460, 5)
            )
        for request in (first, large, small):
            assert request.result(30).finish_reason == "length"
        assert first._last_ns < large._first_ns < small._first_ns
        check_all_returned(engine)


def test_join_finish_and_abort_in_one_round():
    """Neighbours of unequal lengths come, end and are aborted; each text is as if alone."""
    with tiny_engine(slots=3) as engine:
        alone = {n: greedy(engine, prompt(n), 60)[0] for n in (5, 40, 90, 130)}
        for round_ in range(20):
            with engine.parked():
                requests = [
                    (
                        n,
                        k,
                        engine.submit(prompt(n), SamplingParams(max_new_tokens=k, ignore_eos=True)),
                    )
                    for n, k in ((5, 1), (40, 2 + round_), (90, 60), (130, 3), (5, 60), (40, 1))
                ]
                if round_ % 2:
                    requests[1][2].abort()
            time.sleep(0.0005 * round_)
            requests[2][2].abort()
            for n, k, request in requests:
                result = request.result(10)
                assert result.token_ids == alone[n][: len(result.token_ids)]
                if result.finish_reason == "length":
                    assert len(result.token_ids) == k
        check_all_returned(engine)


def test_no_room_blocks_or_raises_and_nothing_is_lost():
    with tiny_engine(slots=1, max_inflight=4) as engine:
        with engine.parked():
            held = [engine.submit(prompt(5), SamplingParams(max_new_tokens=3)) for _ in range(4)]
            with pytest.raises(QueueFull) as error:
                engine.submit(prompt(5), timeout=0)
            assert str(error.value) == (
                "all 4 places for requests in flight are taken; try again when a request has "
                "finished"
            )
        late = engine.submit(prompt(5), SamplingParams(max_new_tokens=3), timeout=10)
        for request in [*held, late]:
            assert request.result(10).finish_reason in ("length", "stop")
        check_all_returned(engine)


def test_a_full_pool_waits_for_copied_prompts():
    with tiny_engine(slots=1, pool_bytes=8192) as engine:
        with engine.parked():
            engine.submit(prompt(500), SamplingParams(max_new_tokens=2))
            engine.submit(prompt(500), SamplingParams(max_new_tokens=2))
            engine.submit(prompt(400), SamplingParams(max_new_tokens=2))
            with pytest.raises(QueueFull, match="the request pool has no room for 2304 bytes"):
                engine.submit(prompt(500), timeout=0)
        assert engine.submit(prompt(500), timeout=10).result(10).token_ids
        end = time.monotonic() + 5
        while engine.stats().inflight and time.monotonic() < end:
            time.sleep(0.001)
        check_all_returned(engine)


def test_a_ring_shorter_than_the_queue_still_takes_everything():
    with tiny_engine(slots=2, request_entries=2) as engine:
        requests = [
            engine.submit(prompt(4 + i), SamplingParams(max_new_tokens=3)) for i in range(50)
        ]
        assert all(r.result(10).token_ids for r in requests)
        with engine.parked():
            engine.submit(prompt(5)), engine.submit(prompt(5))
            with pytest.raises(QueueFull, match="the request ring holds 2 entries"):
                engine.submit(prompt(5), timeout=0.01)


def test_counters_near_their_wrap():
    for start in (2**31 - 40, 2**32 - 40, 2**62):
        with tiny_engine(first_sequence=start, completion_entries=64) as engine:
            want, _ = greedy(engine, prompt(10), 100)
            assert [greedy(engine, prompt(10), 100)[0] for _ in range(3)] == [want] * 3
            engine.park()
            assert greedy(engine, prompt(10), 100)[0] == want
            check_all_returned(engine)


# -- parking --------------------------------------------------------------------------------


def test_parked_engine_runs_nothing_and_goes_on_where_it_was():
    with tiny_engine() as engine:
        alone, _ = greedy(engine, prompt(10), 400)
        request = engine.submit(prompt(10), SamplingParams(max_new_tokens=400, ignore_eos=True))
        with engine.parked():
            assert engine.stats().state == "parked"
            steps = engine.stats().steps
            time.sleep(0.05)
            assert engine.stats().steps == steps
        assert request.result(10).token_ids == alone
        engine.park()
        assert engine.stats().state == "parked"
        assert greedy(engine, prompt(10), 30)[0] == alone[:30]


def test_idle_engine_parks_itself_and_a_request_wakes_it():
    with tiny_engine(park_after_s=0.01) as engine:
        want, _ = greedy(engine, prompt(10), 5)
        launches = engine.stats().launches
        end = time.monotonic() + 5
        while engine.stats().state != "parked" and time.monotonic() < end:
            time.sleep(0.002)
        assert engine.stats().state == "parked"
        assert greedy(engine, prompt(10), 5)[0] == want
        assert engine.stats().launches == launches + 1


def test_a_submit_during_park_is_served_after_it():
    with tiny_engine(park_after_s=-1) as engine:
        for _ in range(100):
            results = []
            thread = threading.Thread(
                target=lambda: results.append(greedy(engine, prompt(6), 3)[0])  # noqa: B023
            )
            thread.start()
            engine.park()
            thread.join(0.02)
            engine.unpark()
            thread.join(10)
            assert len(results) == 1


def test_ping_of_a_parked_engine_is_refused_while_held(engine):
    with engine.parked(), pytest.raises(DeviceError, match="the engine is parked"):
        engine.ping()
    assert engine.ping() < 1


# -- what goes wrong ----------------------------------------------------------------------


def test_a_hang_names_the_phase_and_who_is_missing():
    with tiny_engine(deadline_s=0.3) as engine:
        greedy(engine, prompt(5), 2)
        engine._parts.sched.plant[:] = 9, 1  # operation 9 is layer 1's attend... on worker 1
        request = engine.submit(prompt(100), SamplingParams(max_new_tokens=5))
        name = engine._link.device.operations[9]
        start = time.monotonic()
        with pytest.raises(DeviceHung) as error:
            request.result(10)
        assert time.monotonic() - start < 5
        assert str(error.value) == (
            f"the device hung in phase {name}: worker 1 of 2 did not arrive within the deadline"
        )
        with pytest.raises(DeviceHung):
            engine.submit(prompt(5))


def test_a_leader_that_hangs_is_noticed_too():
    with tiny_engine(deadline_s=0.3) as engine:
        engine._parts.sched.plant[:] = 3, 0
        name = engine._link.device.operations[3]
        with pytest.raises(DeviceHung) as error:
            engine.submit(prompt(100)).result(10)
        assert name in str(error.value)
        assert "worker 0 of 2" in str(error.value)


def test_nan_in_the_logits_ends_one_request_with_an_error():
    """Poison one page: its request ends with an error, the neighbours do not notice."""
    with tiny_engine() as engine:
        want, _ = greedy(engine, prompt(10), 80)
        good = engine.submit(prompt(10), SamplingParams(max_new_tokens=80, ignore_eos=True))
        bad = engine.submit(prompt(70), SamplingParams(max_new_tokens=400, ignore_eos=True))
        while not bad._ids:
            time.sleep(0.0001)
        with engine.parked():
            sched, batch = engine._parts.sched, engine._parts.target.batch
            kv = engine._parts.target.kv
            slot = int(np.flatnonzero(sched.slot["request_id"] == bad.request_id)[0])
            kv.v[:, batch.pages[slot, 0], :, 0, :] = np.nan
        result = bad.result(10)
        assert result.finish_reason == "error"
        position = 70 + len(result.token_ids) - 1
        assert result.error == f"the target's logits hold NaN or +inf at position {position}"
        assert good.result(10).token_ids == want
        check_all_returned(engine)


def test_closing_ends_requests_in_flight_once():
    engine = tiny_engine()
    request = engine.submit(prompt(10), SamplingParams(max_new_tokens=500, ignore_eos=True))
    engine.close()
    assert request.result(5).finish_reason in ("abort", "length")
    engine.close()
    with pytest.raises(DeviceError, match="the engine is closed"):
        engine.submit(prompt(10))


def test_a_forgotten_engine_ends_its_threads():
    before = threading.active_count()
    engine = tiny_engine()
    greedy(engine, prompt(5), 3)
    del engine
    gc.collect()
    end = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_a_process_may_end_with_a_running_engine():
    code = """
        from tiny_model import tiny_engine, prompt
        from megadecode import SamplingParams
        engine = tiny_engine(park_after_s=-1)
        engine.submit(prompt(5), SamplingParams(max_new_tokens=500, ignore_eos=True))
        print("done")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=os.path.dirname(__file__),
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs job control")
def test_a_stopped_process_is_not_a_hang():
    code = """
        from tiny_model import tiny_engine, prompt, greedy
        with tiny_engine(deadline_s=0.5) as engine:
            want, _ = greedy(engine, prompt(5), 500)
            print("ready", flush=True)
            for _ in range(60):
                assert greedy(engine, prompt(5), 500)[0] == want
        print("done")
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=os.path.dirname(__file__),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.1)
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(2)
        os.kill(child.pid, signal.SIGCONT)
        out, _ = child.communicate(timeout=800)
    finally:
        child.kill()
    assert (child.returncode, out) == (0, "done\n")


def test_sizes_and_counts_are_reported(engine):
    stats = engine.stats()
    assert stats.pages == -(-(512 + 255 + 3 * 512 + 1) // 64)
    assert stats.launches >= 1
    assert model().config is CONFIG


def test_without_a_fitting_drafter_it_says_so_once_and_decodes_plainly(caplog):
    for _ in range(2):
        with tiny_engine(draft="auto") as engine:
            assert engine.drafter is None
            assert len(greedy(engine, prompt(5), 3)[0]) == 3
    said = [record.message for record in caplog.records]
    assert said == ["no drafter belongs to tiny: decoding plainly"]
