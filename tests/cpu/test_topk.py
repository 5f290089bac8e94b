"""Exact top-k of a row, whatever the row looks like."""

from __future__ import annotations

import numpy as np
import pytest
from sampling_oracle import padded

from cute_kernels.cpu.topk import MAX_SORTED, logsumexp, make_workspace, top_k_end, top_k_sorted
from host.jit import jit

LOWEST = np.finfo(np.float32).min


@jit
def _logsumexp(row, vocab):
    return logsumexp(row, vocab)


def find(row: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    space = make_workspace(2, row.size)
    for part in space:  # a workspace brings nothing along
        part[:] = 0x7FC00001 if part.dtype.kind in "iu" else np.nan
    others = [part[0].copy() for part in space]
    ids, logits = np.full(k + 1, -7, np.int32), np.full(k + 1, -7, np.float32)
    n = top_k_sorted(padded(row), row.size, k, ids, logits, space, 1)
    for part, before in zip(space, others):
        np.testing.assert_array_equal(part[0], before)
    assert ids[k] == -7 and logits[k] == -7
    return ids[:n], logits[:n]


def check(row: np.ndarray, k: int) -> None:
    order = np.lexsort((np.arange(row.size), -row.astype(np.float64)))
    order = order[row[order] > -np.inf][:k]
    ids, logits = find(row, k)
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_array_equal(logits, row[order])


def rows(vocab: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    normal = rng.standard_normal(vocab).astype(np.float32)
    holes = np.where(rng.random(vocab) < 0.7, -np.inf, normal)
    zeros = np.where(rng.random(vocab) < 0.5, np.float32(-0.0), np.float32(0.0))
    cluster = np.where(np.arange(vocab) % 1024 == 3, 50 + normal, normal)
    one = np.full(vocab, -np.inf)
    one[vocab // 2] = -3e38
    kinds = {
        "normal": normal * 5,
        "ascending": np.arange(vocab) * 0.1,
        "descending": -np.arange(vocab) * 0.1,
        "equal": np.full(vocab, 2.5),
        "few values": np.round(normal),
        "mostly -inf": holes,
        "one above -inf": one,
        "both zeros": zeros,
        "zeros and less": np.where(rng.random(vocab) < 0.5, zeros, -np.abs(normal)),
        "subnormal": normal * 1e-42,
        "every exponent": normal * 10.0 ** rng.integers(-44, 38, vocab),
        "masked by lowest": np.where(rng.random(vocab) < 0.5, LOWEST, normal),
        "large ones in few groups": cluster,
        "near each other": (1 + normal * 1e-7).astype(np.float32),
    }
    return {kind: row.astype(np.float32) for kind, row in kinds.items()}


@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 63, 64, 65, 257, 1000, 5003, 49_152])
def test_top_k_is_exact_and_ordered_by_logit_then_id(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for _ in range(1 if vocab > 10_000 else 6):
        for row in rows(vocab, rng).values():
            for k in (1, 2, 20, 64, MAX_SORTED, int(rng.integers(1, 257))):
                check(row, k)


@pytest.mark.parametrize("vocab", [300, 1000, 49_152])
def test_end_of_a_long_prefix_is_exact(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    space = make_workspace(1, vocab)
    for kind, row in rows(vocab, rng).items():
        order = np.lexsort((np.arange(vocab), -row.astype(np.float64)))
        for k in (257, vocab // 3, vocab - 1, vocab, int(rng.integers(257, vocab))):
            cut, last = top_k_end(row, row.max(), max(k, 257), space, 0)
            inside = (row > cut) | ((row == cut) & (np.arange(vocab) <= last))
            expected = order[: max(k, 257)]
            expected = expected[row[expected] > -np.inf]
            np.testing.assert_array_equal(np.flatnonzero(inside), np.sort(expected), kind)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("vocab", [5, 100, 3000])
def test_a_row_that_holds_nan_or_infinity_has_no_top(vocab: int, bad: float) -> None:
    row = np.linspace(-1, 1, vocab).astype(np.float32)
    for at in (0, vocab // 2, vocab - 1):
        broken = row.copy()
        broken[at] = bad
        assert find(broken, 4)[0].size == 0
        assert np.isnan(_logsumexp(padded(broken), vocab))
    assert find(np.full(vocab, -np.inf, np.float32), 4)[0].size == 0
    assert np.isnan(_logsumexp(padded(np.full(vocab, -np.inf, np.float32)), vocab))
    assert find(row, 0)[0].size == 0


@pytest.mark.parametrize("vocab", [1, 17, 1000, 49_152])
def test_logsumexp(vocab: int) -> None:
    for kind, row in rows(vocab, np.random.default_rng(1)).items():
        exact = row.astype(np.float64)
        top = exact.max()
        if top == -np.inf:
            continue
        expected = top + np.log(np.exp(exact - top).sum())
        found = _logsumexp(padded(row), vocab)
        # 16 chains of vocab / 16 additions, each off by half a unit at most, and exp itself.
        assert found == pytest.approx(expected, rel=1e-12, abs=vocab * 2.0**-28 + 1e-6), kind
