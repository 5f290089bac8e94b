"""A request's numbers do not depend on who else is there: tokens, logits and KV, bit for bit."""

import time

import numpy as np
import pytest
from tiny_model import greedy, prompt, tiny_engine

from megadecode import SamplingParams

TARGET = prompt(150, seed=9)
NEW = 90  # from position 150 on: the tail of canonical order crosses pages twice


def state_of(engine, request_id):
    """(logits of the last step, keys and values) of a request that was in the last step.

    Slots keep the id of their last request, and the page table and row table the last step's rows,
    until somebody else comes.
    """
    parts = engine._parts
    slot = int(np.flatnonzero(parts.sched.slot["request_id"] == request_id)[0])
    batch, kv = parts.target.batch, parts.target.kv
    rows = batch.head_row[: batch.count[1]]
    at = int(np.flatnonzero(batch.slot[rows] == slot)[0])
    kept = len(TARGET) + NEW - 1
    pages = batch.pages[slot, : -(-kept // 64)]
    keys = kv.k[:, pages].transpose(1, 3, 5, 0, 2, 4)  # page, tile, lane, layer, head, d
    values = kv.v[:, pages].transpose(1, 3, 0, 2, 4)  # page, position, layer, head, d
    keys, values = (a.reshape(64 * len(pages), *a.shape[-3:])[:kept] for a in (keys, values))
    return parts.target.acts.logits[at].copy(), keys.copy(), values.copy()


def run_target(engine, neighbours=(), abort=()):
    """The target beside `neighbours` = [(prompt, tokens)], all submitted at one step boundary."""
    with engine.parked():
        others = [
            engine.submit(ids, SamplingParams(max_new_tokens=n, ignore_eos=True))
            for ids, n in neighbours
        ]
        target = engine.submit(TARGET, SamplingParams(max_new_tokens=NEW, ignore_eos=True))
    for i in abort:
        others[i].abort()
    result = target.result(60)
    for other in others:
        other.result(60)
    return result, target.request_id


def bits(result):
    return result.token_ids, np.array(result.logprobs, np.float32).view(np.int32).tolist()


@pytest.fixture(scope="module")
def alone():
    with tiny_engine(slots=1) as engine:
        result, request_id = run_target(engine)
        return bits(result), state_of(engine, request_id)


def check_same(alone, engine, result, request_id, *, last_step=True):
    assert bits(result) == alone[0]
    if last_step:
        for name, ours, theirs in zip(("logits", "k", "v"), state_of(engine, request_id), alone[1]):
            assert ours.shape == theirs.shape
            assert ours.tobytes() == theirs.tobytes(), name


def test_beside_fifteen_others(alone):
    """The last one to join, and all sixteen take part in its last step."""
    with tiny_engine(slots=16, kv_tokens=16 * 512) as engine:
        # The i-th prompt is prefilled in step i; each then gets one token a step.
        others = [(prompt(10 + 13 * i, seed=i), NEW + 15 - i) for i in range(15)]
        result, request_id = run_target(engine, others)
        assert engine._parts.target.batch.count[1] == 16
        check_same(alone, engine, result, request_id)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("chunk_rows", [64, 128, 192, 256])
def test_any_prefill_chunking_and_any_number_of_workers(alone, chunk_rows, workers):
    with tiny_engine(slots=1, chunk_rows=chunk_rows, workers=workers) as engine:
        result, request_id = run_target(engine)
        check_same(alone, engine, result, request_id)


def test_prefilled_in_chunks_between_decoding_neighbours(alone):
    with tiny_engine(slots=5, chunk_rows=64) as engine:
        others = [(prompt(30 + i, seed=i), 200) for i in range(4)]
        result, _ = run_target(engine, others)
        assert bits(result) == alone[0]


def test_after_the_abort_of_a_neighbour(alone):
    with tiny_engine(slots=4) as engine:
        others = [(prompt(100, seed=i), 300) for i in range(3)]
        result, _ = run_target(engine, others, abort=(0, 2))
        assert bits(result) == alone[0]


def test_on_recycled_pages_full_of_nan(alone):
    """Whatever a page held before, unwritten positions never reach the arithmetic."""
    with tiny_engine(slots=2) as engine:
        greedy(engine, prompt(300), 200)
        for poison in (np.nan, np.inf, 3e38):
            with engine.parked():
                engine._parts.target.kv.k[:] = poison
                engine._parts.target.kv.v[:] = poison
                for buffer in engine._parts.target.acts:
                    if buffer.dtype == np.float32:
                        buffer[:] = poison
            result, request_id = run_target(engine)
            check_same(alone, engine, result, request_id)


def test_slots_that_take_turns(alone):
    """More decoding slots than rows in a step: everyone waits, nobody's numbers change."""
    with tiny_engine(slots=6, decode_rows=2, kv_tokens=6 * 512) as engine:
        others = [(prompt(20 + i, seed=i), 150) for i in range(5)]
        result, _ = run_target(engine, others)
        assert bits(result) == alone[0]


def test_the_comparison_can_fail(alone):
    """One changed key is seen. The loop stands still meanwhile: nobody takes its completions."""
    with tiny_engine(slots=1, completion_entries=32) as engine:
        with engine._link._lock:
            request = engine.submit(TARGET, SamplingParams(max_new_tokens=NEW, ignore_eos=True))
            end = time.monotonic() + 60
            while engine.stats().pauses == 0 and time.monotonic() < end:
                time.sleep(0.001)
            pages = engine._parts.target.batch.pages[0]
            engine._parts.target.kv.k[0, pages[0], 0, 0, 0, 0] += 0.25
        assert bits(request.result(10)) != alone[0]
