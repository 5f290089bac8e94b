"""Bias, temperature, top-k, top-p, min-p and the choice, against a full sort."""

from __future__ import annotations

import numpy as np
import pytest
from sampling_oracle import (
    biased,
    check,
    choose,
    noise_row,
    padded,
    poisoned,
    random_request,
    random_row,
    request,
    weights_of,
)


@pytest.mark.parametrize("vocab", [1, 2, 3, 7, 16, 33, 64, 65, 200, 1000])
def test_pipeline_equals_a_full_sort(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for _ in range(400):
        row, params = random_row(vocab, rng), random_request(vocab, rng)
        if biased(row, params).max() == -np.inf:
            assert choose(row, params, 0)[0] == -1
            continue
        check(row, params, int(rng.integers(2**40)))


def test_pipeline_equals_a_full_sort_for_a_large_vocabulary() -> None:
    rng = np.random.default_rng(0)
    sizes = [
        check(random_row(49_152, rng), random_request(49_152, rng), int(rng.integers(2**40)))
        for _ in range(60)
    ]
    assert max(sizes) > 20_000 and min(sizes) == 1


@pytest.mark.parametrize("top_p", [1e-9, 0.25, 0.5, 40_000 / 49_152, 0.99, 1 - 1e-7])
@pytest.mark.parametrize("vocab", [4, 49_152])
def test_nucleus_of_equal_tokens_is_counted_exactly(vocab: int, top_p: float) -> None:
    space, before = poisoned(vocab), np.zeros(vocab, np.float32)
    params = request(top_p=top_p)
    weights_of(padded(np.full(vocab, -3, np.float32)), vocab, params, before, space)
    # Token i has i / vocab before it, and stays if that is below top_p.
    n = sum(i < float(np.float32(top_p)) * vocab for i in range(vocab))
    expected = np.arange(vocab) < n
    np.testing.assert_array_equal(space.weight[0, :vocab] > 0, expected)


@pytest.mark.parametrize("scale", [0.01, 0.5])
def test_nucleus_of_forty_thousand_different_tokens(scale: float) -> None:
    rng = np.random.default_rng(3)
    row = (rng.standard_normal(49_152) * scale).astype(np.float32)
    order = np.argsort(-row, kind="stable")
    chance = np.exp(row[order].astype(np.float64) - row.max())
    top_p = (chance[:40_000].sum() - chance[39_999] / 2) / chance.sum()
    assert check(row, request(top_p=top_p, seed=9), 5) == pytest.approx(40_000, abs=2)
    assert check(row, request(top_p=top_p, temperature=100, seed=9), 5) > 38_000


def test_min_p_compares_with_the_exact_threshold_and_not_a_rounded_one() -> None:
    sides = set()
    for min_p in np.linspace(0.01, 0.99, 40).astype(np.float32):
        exact = np.log(np.float64(min_p))  # the threshold for a largest logit of 0
        nearest = np.float32(exact)
        near = [
            np.nextafter(nearest, np.float32(-9)),
            nearest,
            np.nextafter(nearest, np.float32(9)),
        ]
        row = np.array([0, *near], np.float32)
        space = poisoned(4)
        weights_of(padded(row), 4, request(min_p=min_p), np.zeros(4, np.float32), space)
        np.testing.assert_array_equal(space.weight[0, :4] > 0, row.astype(np.float64) >= exact)
        sides.add(bool(nearest >= exact))
    assert sides == {False, True}


def test_the_lower_of_two_tokens_with_the_same_number_is_chosen() -> None:
    vocab, found = 49_152, 0
    for position in range(60):
        noise = noise_row(1, position, vocab)
        order = np.argsort(noise, kind="stable")
        for i in np.flatnonzero(np.diff(noise[order].astype(np.int64)) == 0):
            row = np.full(vocab, -np.inf, np.float32)
            row[order[i : i + 2]] = 3
            assert choose(row, request(seed=1), position)[0] == order[i : i + 2].min()
            found += 1
    assert found > 5
