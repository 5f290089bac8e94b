"""The loop leaves the device and comes back, and requests do not notice."""

import threading
import time

import pytest
from tiny_model import greedy, prompt, tiny_engine

from megadecode import (
    DeviceError,
    SamplingParams,
)


@pytest.fixture(scope="module")
def engine():
    with tiny_engine() as engine:
        yield engine


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
