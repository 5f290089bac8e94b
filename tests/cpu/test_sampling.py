"""The decision: its distribution, and what it must not do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sampling_oracle import (
    biased,
    choose,
    noise_row,
    oracle,
    padded,
    poisoned,
    random_request,
    random_row,
    request,
)

from cute_kernels.cpu.sampling import alternatives, decide
from cute_kernels.cpu.topk import make_workspace
from host.jit import jit
from host.wire import MAX_ALTERNATIVES


@jit
def _decide_many(rows, vocab, params, positions, space, tokens):
    for i in range(positions.size):
        row = rows[i % rows.shape[0]]
        tokens[i] = decide(row, vocab, params[i % params.size], positions[i], space, 0)[0]


def spread(counts: np.ndarray, chance: np.ndarray) -> tuple[float, float]:
    """Total variation between counts and probabilities, and a bound for sampling noise.

    Mean of it: at most sum sqrt(p (1 - p) / n) / 2. One draw moves it by 1 / n at most, so it is
    more than t above its mean with a probability below exp(-2 n t^2) (McDiarmid): 1e-9 here.
    """
    n = counts.sum()
    found = np.abs(counts / n - chance).sum() / 2
    mean = np.sqrt(chance * (1 - chance) / n).sum() / 2
    return float(found), float(mean + np.sqrt(np.log(1e9) / (2 * n)))


MIXES = {
    "plain": dict(),
    "hot": dict(temperature=2.5),
    "top-k": dict(top_k=5),
    "top-p": dict(top_p=0.8),
    "min-p": dict(min_p=0.2),
    "all": dict(temperature=1.5, top_k=9, top_p=0.9, min_p=0.1, bias={3: 1.0, 0: -np.inf}),
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_marginals_are_the_exact_distribution(mix: str, vary: str) -> None:
    draws, vocab = 200_000, 24
    row = np.linspace(2, -3, vocab)[np.random.default_rng(1).permutation(vocab)]
    row = row.astype(np.float32)
    row[7] = -np.inf
    params = request(**MIXES[mix])
    z = biased(row, params)
    kept = oracle(z, params)
    chance = np.exp(z.astype(np.float64) / float(params["temperature"][0]))
    chance[[i for i in range(vocab) if i not in kept]] = 0
    chance /= chance.sum()
    positions = np.full(draws, 11, np.int64)
    if vary == "seed":
        params = np.repeat(params, draws)
        params["seed"] = np.arange(draws)
    else:
        positions = np.arange(draws)
    tokens = np.zeros(draws, np.int64)
    _decide_many(padded(row)[None], vocab, params, positions, make_workspace(1, vocab), tokens)
    counts = np.bincount(tokens, minlength=vocab)
    assert counts[chance == 0].sum() == 0
    found, bound = spread(counts, chance)
    assert found < bound
    # The bound tells: probabilities that are 2 % off would not pass.
    wrong = chance * np.where(np.arange(vocab) % 2, 1.04, 0.96)
    assert spread(counts, wrong / wrong.sum())[0] > bound or (chance > 0).sum() < 4


def test_choices_at_neighbouring_positions_are_independent() -> None:
    draws, vocab = 300_000, 5
    row, tokens = padded(np.zeros(vocab, np.float32)), np.zeros(300_000, np.int64)
    positions = np.arange(draws)
    _decide_many(row[None], vocab, request(), positions, make_workspace(1, vocab), tokens)
    for gap in (1, 2, 3, 16):
        table = np.zeros((vocab, vocab))
        np.add.at(table, (tokens[gap:], tokens[:-gap]), 1)
        expected = table.sum() / vocab**2
        chi, free = ((table - expected) ** 2 / expected).sum(), vocab**2 - 1
        assert abs(chi - free) < 5 * np.sqrt(2 * free)


def test_second_token_is_still_chosen_at_its_rate() -> None:
    """p = (0.51, 0.49): whatever a tree proposes, the decision is a draw from p."""
    draws = 400_000
    row, tokens = np.log(np.array([0.51, 0.49], np.float32)), np.zeros(draws, np.int64)
    space = make_workspace(1, 2)
    _decide_many(padded(row)[None], 2, request(seed=4), np.arange(draws), space, tokens)
    assert abs((tokens == 1).mean() - 0.49) < 5 * np.sqrt(0.25 / draws)


@pytest.mark.parametrize(("position", "token", "coin"), [(10_134_625, 51, 0), (11_424_541, 68, 0)])
def test_a_coin_of_zero_never_chooses_a_removed_token(position: int, token: int, coin: int) -> None:
    """Positions where this seed's number of a token is exactly 0: the strongest claim there is."""
    seed, vocab = 2024, 256
    assert noise_row(seed, position, vocab)[token] == coin
    row = np.zeros(vocab, np.float32)
    row[token] = -15
    # As long as it is there, it wins: its variate is 2^-33.
    assert choose(row, request(seed=seed), position)[0] == token
    removed: list[dict[str, Any]] = [
        dict(top_p=0.999), dict(top_k=255), dict(min_p=1e-6), dict(bias={token: -np.inf}),
        dict(temperature=0.1), dict(top_k=1), dict(top_p=0.5, top_k=200),
    ]  # fmt: skip
    for values in removed:
        assert choose(row, request(seed=seed, **values), position)[0] != token, values
    row[token] = -np.inf
    assert choose(row, request(seed=seed), position)[0] != token
    row[:] = -np.inf
    row[9] = -80
    assert choose(row, request(seed=seed), position)[0] == 9


def test_the_largest_coin_loses_to_anything_near() -> None:
    position, token, seed = 23_169_855, 3, 2024
    assert noise_row(seed, position, 16)[token] == 0xFFFFFFFF
    row = np.full(16, -30, np.float32)
    row[token] = -28
    assert choose(row, request(seed=seed), position)[0] != token
    row[token] = 0  # nothing else can win, even so
    assert choose(row, request(seed=seed), position)[0] == token


@pytest.mark.parametrize("vocab", [5, 300, 49_152])
def test_a_choice_does_not_depend_on_order_or_company(vocab: int) -> None:
    rng = np.random.default_rng(2)
    rows = np.stack([padded(random_row(vocab, rng)) for _ in range(24)])
    params = np.concatenate([random_request(vocab, rng) for _ in range(24)])
    alone = [choose(row[:vocab], params[i : i + 1], 100 + i)[0] for i, row in enumerate(rows)]
    space, tokens = make_workspace(1, vocab), np.zeros(24, np.int64)
    for order in (np.arange(24), np.arange(24)[::-1], rng.permutation(24)):
        mixed = (rows[order], vocab, params[order], 100 + order, space, tokens)
        _decide_many(*mixed)
        np.testing.assert_array_equal(tokens, np.array(alone)[order])
    # Tokens that cannot be chosen, however many, do not move the others' noise.
    wider = [np.append(row[:vocab], np.full(777, -np.inf, np.float32)) for row in rows]
    again = [choose(row, params[i : i + 1], 100 + i)[0] for i, row in enumerate(wider)]
    assert again == alone


def test_zero_temperature_is_greedy_whatever_else_is_set() -> None:
    """The highest logit, the lowest id of equal ones; an exact log-probability; -1 for NaN, +inf
    and for a row of -inf."""
    rng, vocab = np.random.default_rng(6), 211
    logits = (rng.standard_normal((6, vocab)) * 4).astype(np.float32)
    logits[1] = np.minimum(np.round(logits[1]), 5)
    logits[2, 5] = np.nan
    logits[3, 5] = np.inf
    logits[4] = -np.inf
    logits[5] = -200
    logits[5, 3] = 0
    for i in range(6):
        exact = logits[i].astype(np.float64)
        for values in ({}, {"top_k": 2, "top_p": 0.1, "min_p": 0.9, "seed": 3}, {"logprobs": 20}):
            params = request(**{"temperature": 0, **values})
            token, logprob = choose(logits[i].copy(), params, i)
            if i in (2, 3, 4):
                assert token == -1
                assert np.isnan(logprob)
                continue
            assert token == np.flatnonzero(exact == exact.max())[0]
            want = -np.log(np.exp(exact - exact.max()).sum())
            assert logprob == pytest.approx(want, rel=1e-6, abs=1e-30)
    assert (logits[1] == logits[1].max()).sum() > 1, "the tie is there"


def test_bias_moves_the_choice_and_not_the_log_probability() -> None:
    row = np.array([0, 1, 2, 1], np.float32)
    exact = row.astype(np.float64) - np.log(np.exp(row.astype(np.float64)).sum())
    for bias, token in (({0: 2.5}, 0), ({2: -1}, 1), ({2: -np.inf}, 1), ({0: 2.0}, 0), ({}, 2)):
        for temperature in (0, 1e-3):
            params = request(temperature=temperature, bias=bias, top_k=1)
            found, logprob = choose(row, params, 7)
            assert found == token
            assert logprob == pytest.approx(exact[token], rel=1e-6)
    assert choose(row, request(bias=dict.fromkeys(range(4), -np.inf)), 7)[0] == -1
    assert choose(row, request(temperature=0, bias={4: 9, -1: 9, 10**6: 9}), 7)[0] == 2


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_nan_or_infinity_is_an_error_and_not_a_token(bad: float, temperature: float) -> None:
    for vocab in (1, 20, 1000):
        for at in {0, vocab // 2, vocab - 1}:
            row = np.zeros(vocab, np.float32)
            row[at] = bad
            params = request(temperature=temperature, bias={at: -np.inf}, top_k=1, top_p=0.5)
            token, logprob = choose(row, params, 3)
            assert token == -1 and np.isnan(logprob)


@pytest.mark.parametrize("vocab", [1, 3, 50, 49_152])
def test_alternatives_are_the_likeliest_tokens_of_the_raw_logits(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for count in (0, 1, 5, MAX_ALTERNATIVES):
        row = random_row(vocab, rng)
        ids, values = np.full(21, -7, np.int32), np.full(21, -7, np.float32)
        n = alternatives(padded(row), vocab, count, ids, values, poisoned(vocab), 0)
        order = np.lexsort((np.arange(vocab), -row.astype(np.float64)))
        order = order[row[order] > -np.inf][:count]
        assert n == order.size and (ids[n:] == -7).all()
        np.testing.assert_array_equal(ids[:n], order)
        exact = row.astype(np.float64)
        exact -= exact.max() + np.log(np.exp(exact - exact.max()).sum())
        np.testing.assert_allclose(values[:n], exact[order], rtol=1e-6, atol=1e-5)
        if n:  # the first is what greedy decoding reports
            token, logprob = choose(row, request(temperature=0), 0)
            assert (token, logprob) == (ids[0], values[0])
