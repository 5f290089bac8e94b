"""Speculation never shows: tokens and log-probabilities as in plain decoding, bit for bit."""

import time

import numpy as np
import pytest
import tiny_drafter as td
from engine_checks import check_all_returned
from speculative import (
    ANYHOW,
    BLOCK_16,
    CTX,
    JOBS,
    alone,
    check_jobs,
    engine,
    exact,
    give_times,
    half_right,
    ids,
    jobs_script,
    one,
    params,
    play,
    run,
    scripted,
    state_of,
    truth,
)

from megadecode import SamplingParams

SLIDING = dict(layer_types=("sliding_attention", "full_attention", "sliding_attention"), window=40)
DRAFTERS = {
    "block 8": td.DRAFTER,
    "block 16": BLOCK_16,
    "next": td.variant(prediction="next"),
    "next, block 15": td.variant(prediction="next", block_size=15),
    "sliding": td.variant(**SLIDING),
    "sliding, not causal": td.variant(**SLIDING, is_causal=False, block_size=16),
    "all causal": td.variant(is_causal=True),
}
TREES = [1, 3, 7, 15, 63, 255, "auto"]


@pytest.mark.parametrize("budget", range(1, 16))
def test_chains_of_any_length_change_nothing(budget):
    """B63, B71; the drafter's own candidates, then half-right ones."""
    with engine(BLOCK_16, budget=budget, shape="chain") as speculating:
        check_jobs(speculating)
        check_all_returned(speculating)
    with scripted(BLOCK_16, budget=budget, shape="chain") as speculating:
        play(speculating, jobs_script(budget, most=8, right=1.0))
        accepted = check_jobs(speculating)
        assert max(map(len, accepted)) > 2
        check_all_returned(speculating)


def one_script():
    """Candidates that are right for the first of `JOBS` wherever it is."""
    return truth(JOBS[0][0], alone()[0].token_ids)


@pytest.mark.parametrize("budget", TREES)
@pytest.mark.parametrize("block", [8, 16])
def test_trees_of_any_size_change_nothing(budget, block):
    """B63; in B28's sense nothing is left behind either. `auto` goes by given step times and
    candidates that are one text's for sure: by a busy machine's own times it may not draft."""
    config = td.variant(block_size=block)
    with engine(config, budget=budget) as speculating:
        check_jobs(speculating)
        check_all_returned(speculating)
    with scripted(config, budget=budget) as speculating:
        play(speculating, one_script() if budget == "auto" else jobs_script(block))
        with speculating.parked():
            give_times(speculating)
        accepted = check_jobs(speculating)
        assert max(map(len, accepted)) > 2
        check_all_returned(speculating)


@pytest.mark.parametrize("name", DRAFTERS)
def test_any_drafter_changes_nothing(name):
    for budget, shape in ((7, "chain"), (31, "tree")):
        with engine(DRAFTERS[name], budget=budget, shape=shape) as speculating:
            check_jobs(speculating)
        with scripted(DRAFTERS[name], budget=budget, shape=shape) as speculating:
            play(speculating, jobs_script(len(name)))
            check_jobs(speculating)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("chunk_rows", [64, 192])
def test_any_number_of_workers_and_any_chunks(workers, chunk_rows):
    with scripted(budget=31, workers=workers, chunk_rows=chunk_rows) as speculating:
        play(speculating, jobs_script(chunk_rows))
        check_jobs(speculating)


@pytest.mark.parametrize("decode_rows", [2, 7, 40])
def test_budgets_shrink_and_slots_take_turns_where_rows_are_short(decode_rows):
    """More slots than rows: B82, a slot whose tree finds no room has its root alone."""
    with scripted(budget=31, slots=6, decode_rows=decode_rows, kv_tokens=6 * CTX) as speculating:
        play(speculating, jobs_script(decode_rows))
        check_jobs(speculating)
        check_all_returned(speculating)


def test_sixteen_unequal_slots_are_each_as_if_alone():
    """B35, B37, B76, B82: seeded, unseeded and greedy requests with trees of unequal sizes join and
    end in one engine; the seeded and greedy ones are what they are alone."""
    hows = [dict(), dict(temperature=1.0, seed=5), dict(temperature=1.0), dict(seed=1, top_k=3,
            temperature=3.0)]  # fmt: skip
    jobs = [
        (ids(3 + 17 * i), params(max_new_tokens=10 + 5 * (i % 7), **hows[i % 4])) for i in range(16)
    ]
    with engine(slots=1) as plain:
        want = [run(plain, [job])[0] for job in jobs]
    texts = [(prompt, result.token_ids) for (prompt, _), result in zip(jobs, want)]
    with scripted(budget=15, slots=16, kv_tokens=16 * CTX) as speculating:
        for seed in range(3):
            play(speculating, half_right(texts, seed, most=24))
            for i, (ours, theirs) in enumerate(zip(run(speculating, jobs), want)):
                if i % 4 != 2:
                    assert exact(ours) == exact(theirs), i
                assert len(ours.token_ids) == len(theirs.token_ids)
        check_all_returned(speculating)


def test_joins_ends_and_aborts_in_one_round_leave_neighbours_alone():
    """B76: slots change hands between a step and the drafter's next context."""
    want = alone()
    with scripted(budget=15, slots=3) as speculating:
        play(speculating, jobs_script(0))
        for round_ in range(12):
            with speculating.parked():
                requests = [speculating.submit(*JOBS[(round_ + i) % 7]) for i in range(7)]
            for k in range(0, 7, 1 + round_ % 3):
                while not requests[k]._ids and not requests[k].done:
                    pass
                requests[k].abort()
            for i, request in enumerate(requests):
                result, full = request.result(60), want[(round_ + i) % 7]
                kept = len(result.token_ids)
                assert result.token_ids == full.token_ids[:kept]
                assert exact(result)[1] == exact(full)[1][:kept]
                if result.finish_reason == "length":
                    assert kept == len(full.token_ids)
        check_all_returned(speculating)


def test_first_token_does_not_depend_on_the_mode():
    """B61, B96: prompts of one token and of a whole page, one token out."""
    for length in (1, 2, 63, 64, 65, 127, 128):
        with engine() as plain, engine(BLOCK_16, budget=15) as speculating:
            first, second = (one(e, ids(length), max_new_tokens=2) for e in (plain, speculating))
            assert exact(first) == exact(second)


def test_a_seed_repeats_and_none_differs():
    """Equal seeds give equal texts whatever the budget; without a seed every request differs."""
    texts = []
    for options in (dict(budget=0), dict(budget=3), dict(budget=63)):
        with engine(BLOCK_16, **options) as speculating:
            seeded = [one(speculating, ids(30), temperature=1.0, seed=4) for _ in range(2)]
            texts += [result.token_ids for result in seeded]
            free = run(speculating, [(ids(30), params(temperature=1.0))] * 4)
            assert len({tuple(result.token_ids) for result in free}) == 4
            assert one(speculating, ids(30), temperature=1.0, seed=5).token_ids != texts[0]
    assert all(text == texts[0] for text in texts)


# -- keys and values ------------------------------------------------------------------------


def _request(engine, prompt, **values):
    """(request id, result), with the pages still as the request left them."""
    request = engine.submit(prompt, params(**values))
    result = request.result(120)
    assert result.error is None
    return request.request_id, result


def _rounds(depth, tokens, seed):
    """Which of a text's tokens a drafter must get right so that its rounds accept 0..depth nodes,
    every count equally often and in random order; also how many rounds accept how many."""
    rng = np.random.default_rng(seed)
    right, accepted = set(), [0] * (depth + 1)
    k = 1
    while k < tokens - depth - 1:
        if sum(accepted) % (depth + 1) == 0:
            counts = iter(rng.permutation(depth + 1).tolist())
        count = next(counts)
        accepted[count] += 1
        right.update(range(k, k + count))
        k += count + 1
    return right, accepted, k


@pytest.mark.parametrize(
    ("config", "budget", "shape"),
    [(td.DRAFTER, 255, "tree"), (BLOCK_16, 63, "tree"), (BLOCK_16, 15, "chain")],
)
def test_keys_and_values_after_200_rounds(config, budget, shape):
    """B13, B22, B24, B26, B57, B86, D4: what stands in the pages of the committed positions, of
    the target and of the drafter, equals a plain run's and a fresh prefill's, bit for bit; rounds
    accept every count from 0 to the deepest."""
    depth = config.drafted
    size = dict(ctx=230 * (depth + 2) // 2 + 200, slots=1)
    prompt = ids(50, seed=3)
    right, accepted, tokens = _rounds(depth, 230 * (depth + 2) // 2, seed=8)
    how = dict(max_new_tokens=tokens, **ANYHOW)
    kept = len(prompt) + tokens - 1
    with engine(**size) as plain:
        plain_id, want = _request(plain, prompt, **how)
        plain_kv = state_of(plain, plain_id, kept)
    said = truth(prompt, want.token_ids, lambda k: k in right)
    if shape == "tree":  # now and then the first candidate is another one: paths skip rows
        rng = np.random.default_rng(9)
        for position in list(said)[:: 3 if depth < 15 else 6]:
            (token, score), *_ = said[position]
            other = (token + int(rng.integers(2, 200))) % td.TARGET.vocab
            if other != want.token_ids[position - len(prompt)]:
                said[position] = [(other, score), (token, score)]
    with scripted(config, budget=budget, shape=shape, **size) as speculating:
        play(speculating, said)
        ours_id, ours = _request(speculating, prompt, **how)
        assert exact(ours) == exact(want)
        assert ours.stats.steps == 1 + sum(accepted) > 200
        assert ours.stats.accepted == (0, accepted[0] + 1, *accepted[1:])
        kv = state_of(speculating, ours_id, kept)
        drafted = kept - depth - 1  # rows of the last step never become context
        draft_kv = state_of(speculating, ours_id, drafted, speculating._parts.drafter.kv)
        play(speculating, {})
        fresh_id, _ = _request(speculating, prompt + want.token_ids[:-1], max_new_tokens=4)
        fresh_kv = state_of(speculating, fresh_id, kept)
        fresh_draft_kv = state_of(speculating, fresh_id, drafted, speculating._parts.drafter.kv)
    for mine, plain_one, fresh in zip(kv, plain_kv, fresh_kv):
        assert mine.shape[0] == kept and np.abs(mine).max(axis=(1, 2, 3)).min() > 0
        assert mine.tobytes() == plain_one.tobytes()
        assert mine.tobytes() == fresh.tobytes()
    for mine, fresh in zip(draft_kv, fresh_draft_kv):
        assert np.abs(mine).max(axis=(1, 2, 3)).min() > 0
        assert mine.tobytes() == fresh.tobytes()


def test_the_comparison_can_fail():
    """One changed key of the target is seen. Nobody takes completions meanwhile, so the loop stands
    still in the middle of the request."""
    how = SamplingParams(max_new_tokens=400, ignore_eos=True)
    with engine(BLOCK_16, slots=1, completion_entries=256) as speculating:
        want = speculating.submit(ids(80), how).result(60)
        with speculating._link._lock:
            request = speculating.submit(ids(80), how)
            pauses, end = speculating.stats().pauses, time.monotonic() + 60
            while speculating.stats().pauses == pauses and time.monotonic() < end:
                time.sleep(0.001)
            page = speculating._parts.target.batch.pages[0, 0]
            speculating._parts.target.kv.k[0, page, 0, 0, 0, 0] += 0.25
        assert exact(request.result(60)) != exact(want)
