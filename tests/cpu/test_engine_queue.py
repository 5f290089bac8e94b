"""More requests than slots, pages, places or ring entries: nobody overtakes, nothing is lost."""

import time

import pytest
from engine_checks import check_all_returned
from tiny_model import greedy, prompt, tiny_engine

from megadecode import (
    QueueFull,
    SamplingParams,
)


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
