"""When and how a request ends: stop tokens, lengths, the context, aborts, a closed engine."""

import time

import pytest
from engine_checks import check_all_returned
from tiny_model import STOP_ID, greedy, prompt, tiny_engine

from megadecode import (
    DeviceError,
    SamplingParams,
)


@pytest.fixture(scope="module")
def engine():
    with tiny_engine() as engine:
        yield engine


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


def test_closing_ends_requests_in_flight_once():
    engine = tiny_engine()
    request = engine.submit(prompt(10), SamplingParams(max_new_tokens=500, ignore_eos=True))
    engine.close()
    assert request.result(5).finish_reason in ("abort", "length")
    engine.close()
    with pytest.raises(DeviceError, match="the engine is closed"):
        engine.submit(prompt(10))
