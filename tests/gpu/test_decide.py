"""Decisions against the CPU device: the same tokens, in every row. Kernels:

python -m tests.gpu.decide_kernels DIR
"""

import functools
import itertools

import numpy as np
import pytest

from cute_kernels.gpu.config import product

VOCABULARIES = {"smollm2-135m": 49152, "odd-768": 5003, "qwen3-8b": 151936}
TEMPERATURES = (0, 0.3, 1, 2, 1e-3, 100)
FILTERS = list(itertools.product((0, 1, 5, 50, 5000), (1, 0.9, 0.1, 1e-6), (0, 0.05, 0.5)))
INF = np.float32(np.inf)


@pytest.fixture(scope="session")
def rig_of(load):
    """rig_of(model) -> Rig."""
    pytest.importorskip("numba")

    @functools.cache
    def of(model):
        from tests.gpu.decide_rig import Rig

        return Rig(load(f"decide-{model}"), product(model))

    return of


def rows_of(vocab, rng):
    """fp32 [10, vocab]: as a model's, random, peaked, flat, ties, few values, -inf nearly
    everywhere, lowest finite values, large ones, very small differences."""
    z = rng.standard_normal((10, vocab)) * 3
    z[0] += 12 * np.exp(-np.arange(vocab) / 40.0)[rng.permutation(vocab)]
    z[1] *= rng.choice([0.01, 1, 6])
    z[2, rng.integers(vocab)] = 40
    z[3] = 1.25
    z[4] = np.round(z[4])
    z[5] = rng.choice([0.0, -0.0, 7.25], vocab)
    z[6, rng.random(vocab) < 0.999] = -np.inf
    z[6, rng.integers(vocab)] = 1.5
    z[7, rng.random(vocab) < 0.3] = np.finfo(np.float32).min
    z[8] *= 1e4
    z[9] *= 1e-6
    return z.astype(np.float32)


def misleading_rows(vocab, rng):
    """fp32 [10, vocab] in which the vectors that prefix.py samples say nothing of the others: they
    are lower, higher, -inf, spread where the others are equal, the lowest finite value, apart in
    the last bits, one of two values either way round, at the ends of fp32, far below."""
    vectors = -(-vocab // 4)
    i = np.arange(-(-vectors // 16))
    at = (16 * i + (5 * i & 15))[:, None] * 4 + np.arange(4)
    seen = np.zeros(vocab, bool)
    seen[at[at < vocab]] = True
    z = rng.standard_normal((10, vocab)) * 2
    z[0, seen] -= 8
    z[1, seen] += 5
    z[2, seen] = -np.inf
    z[3, ~seen] = -5
    z[4, seen] = np.finfo(np.float32).min
    z[5] = np.where(seen, 1, 1 - 1e-6 * rng.random(vocab))
    z[6] = np.where(seen, 2.25, 2.5)
    z[7] = np.where(seen, 2.5, 2.25)
    z[8] = np.where(seen, 3e38, -3e38)
    z[9] = np.where(seen, -50, rng.standard_normal(vocab) * 1e-3)
    return z.astype(np.float32)


WIDE = [
    dict(top_k=150), dict(top_k=700), dict(top_k=5000), dict(top_p=0.5), dict(top_p=0.97),
    dict(top_k=5000, top_p=0.7), dict(top_k=3000, min_p=0.01), dict(top_p=1 - 1e-6),
]  # fmt: skip
"""What leaves many tokens."""


def bias_of(row, kind, rng):
    """Pairs of a request; kinds: none, few, many, against the likeliest."""
    vocab = row.size
    if kind == 1:
        ids = rng.choice(vocab, 5, replace=False)
        return dict(zip(ids.tolist(), (-np.inf, 20.0, -1.5, 9.0, 0.0)))
    if kind == 2:
        ids = rng.choice(vocab, 300, replace=False)
        return dict(zip(ids.tolist(), rng.choice([-np.inf, 20, -100, 1, 0.5], 300).tolist()))
    if kind == 3:
        finite = np.flatnonzero(row > -np.inf)
        ids = finite[np.argsort(-row[finite], kind="stable")[:20]]
        return dict.fromkeys(ids[: max(1, finite.size // 2)].tolist(), -30.0)
    return {}


def record(seed, bias, **values):
    from tests.cpu.sampling_oracle import request

    return request(seed=seed, bias=bias, **values)


def log_probabilities(row):
    """In float64: the CPU device's own sums over such rows are off by up to 4e-5."""
    z = row.astype(np.float64)
    return z - z.max() - np.log(np.exp(z - z.max()).sum())


def compare(rig, rows, params, positions):
    """Every row's token and alternatives against the CPU's, log-probabilities against float64."""
    from cute_kernels.cpu.sampling import alternatives
    from cute_kernels.cpu.topk import make_workspace
    from tests.cpu.sampling_oracle import choose, padded

    got, asked = rig.decide(rows, params, positions), int(params["logprobs"][0])
    vocab = rows.shape[1]
    for i, row in enumerate(rows):
        token, _ = choose(row, params, int(positions[i]))
        told = (i, got[i], token, params[0])
        assert got["flags"][i] == (token < 0), told
        if token >= 0:
            assert got["token"][i] == token, told
            exact = log_probabilities(row)
            assert np.allclose(got["logprob"][i], exact[token], rtol=1e-6, atol=1e-5), told
        ids, logprobs = np.zeros(20, np.int32), np.zeros(20, np.float32)
        found = 0
        if asked and token >= 0:
            space = make_workspace(1, vocab)
            found = alternatives(padded(row), vocab, asked, ids, logprobs, space, 0)
            ids[found:asked] = -1
            np.testing.assert_array_equal(rig.alternatives["token"][i, :asked], ids[:asked])
            np.testing.assert_allclose(
                rig.alternatives["logprob"][i, :found], exact[ids[:found]], rtol=1e-6, atol=1e-5
            )
        rest = rig.alternatives[i, asked if token >= 0 else 0 :]
        assert (rest.view(np.uint8) == 0xEE).all(), "alternatives that nobody asked for"


def check_filters(rig, vocab, temperature, every=1):
    """Every combination of filters, or each `every`-th, over ten kinds of rows, biases and
    alternatives in turn."""
    rng = np.random.default_rng(int(temperature * 1000))
    for case in range(0, len(FILTERS), every):
        top_k, top_p, min_p = FILTERS[case]
        rows = rows_of(vocab, rng)
        bias = bias_of(rows[case % 10], case % 4, rng)
        params = record(
            int(rng.integers(-(2**63), 2**63 - 1)), bias, temperature=temperature, top_k=top_k,
            top_p=top_p, min_p=min_p, logprobs=(0, 1, 5, 20)[case // 4 % 4],
        )  # fmt: skip
        compare(rig, rows, params, rng.integers(1, 2**17, 10))


def check_wide_prefixes(rig, vocab, case):
    """Of rows of all kinds: ends that a sample finds, and ends that it cannot know of."""
    rng = np.random.default_rng(case)
    for make in (rows_of, misleading_rows):
        for temperature in (0.7, 3):
            rows = make(vocab, rng)
            values = dict(temperature=temperature) | WIDE[case]
            compare(rig, rows, record(case, {}, logprobs=5, **values), rng.integers(1, 2**17, 10))


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("model", VOCABULARIES)
def test_tokens_are_the_cpu_devices(rig_of, model, temperature):
    check_filters(rig_of(model), VOCABULARIES[model], temperature)


@pytest.mark.parametrize("case", range(len(WIDE)))
@pytest.mark.parametrize("model", VOCABULARIES)
def test_wide_prefixes(rig_of, model, case):
    check_wide_prefixes(rig_of(model), VOCABULARIES[model], case)


@pytest.mark.parametrize("model", VOCABULARIES)
@pytest.mark.parametrize("temperature", [0, 1])
def test_bad_rows_say_so(rig_of, model, temperature):
    rng, vocab = np.random.default_rng(7), VOCABULARIES[model]
    rows = rng.standard_normal((6, vocab)).astype(np.float32)
    rows[0, rng.integers(vocab)] = np.nan
    rows[1, vocab - 1] = INF
    rows[2] = -INF
    rows[3, 1:] = -INF
    rows[4, :] = -INF
    rows[4, 17] = 3
    plain = record(3, {}, temperature=temperature, top_p=0.9, logprobs=5)
    compare(rig_of(model), rows, plain, np.arange(6) + 1)
    # the bias takes all that is left
    compare(
        rig_of(model), rows, record(3, {17: -np.inf}, temperature=temperature), np.arange(6) + 1
    )


@pytest.mark.parametrize("model", VOCABULARIES)
def test_a_row_does_not_depend_on_its_company(rig_of, model):
    """Alone, in a step of 16 rows and in one of 128, at other places: the same bits."""
    rig, rng, vocab = rig_of(model), np.random.default_rng(5), VOCABULARIES[model]
    rows = np.concatenate([rows_of(vocab, rng) for _ in range(13)])[:128]
    positions = rng.integers(1, 2**17, 128)
    for values in (dict(temperature=1), dict(temperature=0.7, top_p=0.95), dict(top_k=40)):
        params = record(11, {5: 2.0, 9: -INF}, logprobs=20, **values)
        whole = rig.decide(rows, params, positions)
        listed = rig.alternatives.copy()
        for some in ([5], list(range(16)), rng.permutation(128)[:16], rng.permutation(128)[:77]):
            part = rig.decide(rows[some], params, positions[some])
            np.testing.assert_array_equal(part.view(np.int32), whole[some].view(np.int32))
            np.testing.assert_array_equal(rig.alternatives, listed[some])


def test_draws_have_their_probabilities(rig_of):
    """20,000 positions of one distribution of 50 tokens: chi-square within five deviations."""
    rig, rng, vocab = rig_of("odd-768"), np.random.default_rng(9), VOCABULARIES["odd-768"]
    row = np.full(vocab, -INF)
    ids = np.sort(rng.choice(vocab, 50, replace=False))
    row[ids] = np.linspace(2, -2, 50)[rng.permutation(50)]
    chance = np.exp(row[ids].astype(np.float64) / 0.8)
    chance /= chance.sum()
    counts, draws = np.zeros(50), 157 * 128
    for first in range(0, draws, 128):
        got = rig.decide(np.tile(row, (128, 1)), record(77, {}, temperature=0.8),
                         np.arange(first, first + 128) + 1)  # fmt: skip
        np.add.at(counts, np.searchsorted(ids, got["token"]), 1)
        assert np.isin(got["token"], ids).all()
    expected = chance * draws
    chi = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi - 49) < 5 * np.sqrt(2 * 49), chi
