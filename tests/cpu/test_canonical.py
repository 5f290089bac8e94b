"""The reference of canonical order: one arithmetic for a row, whatever is committed or drafted."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cpu_step import TINY, Segment, Step
from tree_cases import bush, chain

from cute_kernels.cpu import attention
from megadecode import canonical
from megadecode.canonical import BLOCK, DEEPEST, SPLIT_BLOCKS, attend

D = 8
SPLIT = SPLIT_BLOCKS * BLOCK
OFFSETS = (60, 61, 62, 63, 64, 65)  # n mod 64 in {60..63, 0, 1}


class Case:
    """Queries, keys and values of `n` committed positions and a tree; other slots hold NaN."""

    def __init__(self, n: int, parents: list[int], seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        used, slots = n + len(parents), n + len(parents) + 100
        self.n = n
        self.q = rng.standard_normal((len(parents), D)).astype(np.float32)
        self.keys, self.values = np.full((2, slots, D), np.nan, np.float32)
        self.keys[:used] = rng.standard_normal((used, D))
        self.values[:used] = rng.standard_normal((used, D))
        self.paths: list[list[int]] = []
        for row, parent in enumerate(parents):
            self.paths.append([*self.paths[parent], row] if row else [0])

    def row(self, row: int) -> np.ndarray:
        return attend(self.q[row], self.keys, self.values, self.n, self.paths[row])

    def seen(self, row: int) -> list[int]:
        return [*range(self.n), *(self.n + i for i in self.paths[row])]

    def committed(self, row: int, ancestors: int) -> np.ndarray:
        """The row once `ancestors` rows of its path are committed and the rest is another tree."""
        seen = self.seen(row)
        root = self.n + ancestors
        keys, values = np.full((2, root + 60, D), np.nan, np.float32)
        keys[:root], values[:root] = self.keys[seen[:root]], self.values[seen[:root]]
        path = [0]
        for at in seen[root:]:
            keys[root + path[-1]], values[root + path[-1]] = self.keys[at], self.values[at]
            path.append(path[-1] + 1 + 2 * (at % 2))
        return attend(self.q[row], keys, values, root, path[:-1])


@pytest.mark.parametrize("n", [0, 1, 7, *OFFSETS, *(BLOCK + o for o in OFFSETS), SPLIT + 62])
@pytest.mark.parametrize("shape", ["chain", "bush"])
def test_a_row_has_the_same_bits_whether_its_ancestors_are_committed_or_drafted(
    n: int, shape: str
) -> None:
    rng = np.random.default_rng(n)
    parents = chain(DEEPEST + 1) if shape == "chain" else bush(30, rng)
    case = Case(n, parents, seed=n)
    depths = {len(path) - 1 for path in case.paths}
    assert shape == "bush" or depths == set(range(DEEPEST + 1))
    for row, path in enumerate(case.paths):
        wanted = case.row(row)
        assert np.isfinite(wanted).all()
        for ancestors in {0, 1, len(path) // 2, len(path) - 1} - {len(path)}:
            assert case.committed(row, ancestors).tobytes() == wanted.tobytes()


def test_the_order_is_one_even_where_another_would_round_differently() -> None:
    """The data of these tests can tell orders apart."""
    case = Case(3 * BLOCK, chain(1))
    row = case.row(0)
    again = canonical.merge(
        canonical.take(case.q[0], case.keys[:1], case.values[:1]),
        canonical.take(case.q[0], case.keys[1 : case.n + 1], case.values[1 : case.n + 1]),
    )
    np.testing.assert_allclose(again.sums / again.weight, row, rtol=1e-4, atol=1e-6)
    assert (again.sums / again.weight != row).any()


def test_splits_and_blocks_ascend_and_the_tail_comes_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(canonical, "SPLIT_BLOCKS", 2)
    case = Case(7 * BLOCK + 20, chain(1), seed=9)
    q, keys, values = case.q[0], case.keys[: case.n + 1], case.values[: case.n + 1]
    pieces = [
        canonical.take(q, keys[i : i + BLOCK], values[i : i + BLOCK])
        for i in range(0, 7 * BLOCK, BLOCK)
    ]
    splits = [canonical.merge(*pieces[i : i + 2]) for i in (0, 2, 4)] + [pieces[6]]
    tail = canonical.take(q, keys[7 * BLOCK :], values[7 * BLOCK :])

    def merged(order: list[canonical.Partial]) -> np.ndarray:
        total = order[0]
        for part in order[1:]:
            total = canonical.merge(total, part)
        return total.sums / total.weight

    assert case.row(0).tobytes() == merged([*splits, tail]).tobytes()
    for other in ([*splits[::-1], tail], [tail, *splits], [*pieces, tail]):
        assert (merged(other) != case.row(0)).any()


def test_merging_nothing_changes_no_bit() -> None:
    rng = np.random.default_rng(1)
    q, keys, values = rng.standard_normal((3, 5, D)).astype(np.float32)
    some = canonical.take(q[0] * 9, keys, values)
    for merged in (
        canonical.merge(some, canonical.nothing(D)),
        canonical.merge(canonical.nothing(D), some),
    ):
        assert merged.top == some.top and merged.weight == some.weight
        assert merged.sums.tobytes() == some.sums.tobytes()


def test_a_row_does_not_depend_on_other_rows() -> None:
    rng = np.random.default_rng(2)
    for n in (62, 64, 130):
        case = Case(n, bush(40, rng), seed=n)
        before = [case.row(row).tobytes() for row in range(40)]
        for other in range(0, 40, 7):
            changed = Case(n, [-1])
            changed.q, changed.paths = case.q, case.paths
            changed.keys, changed.values = case.keys.copy(), case.values.copy()
            changed.keys[n + other] = np.nan
            changed.values[n + other] = 1e9
            for row, path in enumerate(case.paths):
                assert (changed.row(row).tobytes() == before[row]) == (other not in path)


def test_each_visible_key_counts_and_no_other() -> None:
    case = Case(66, bush(20, np.random.default_rng(3)), seed=4)
    row = max(range(20), key=lambda i: len(case.paths[i]))
    wanted = case.row(row)
    seen = set(case.seen(row))
    keys, values = case.keys.copy(), case.values.copy()
    for slot in range(len(case.keys)):
        # A key changed; a key as good as hidden, by a score so low that its weight is 0.
        for key in (keys[slot] + np.float32(0.5), -1e4 * case.q[row]):
            case.keys[slot] = key
            assert (case.row(row) != wanted).any() == (slot in seen)
            case.keys[slot] = keys[slot]
        case.values[slot] = values[slot] + np.float32(0.5)
        assert (case.row(row) != wanted).any() == (slot in seen)
        case.values[slot] = values[slot]
    assert case.row(row).tobytes() == wanted.tobytes()


def test_what_stands_in_unwritten_slots_takes_no_part() -> None:
    for n in (0, 63, 2 * BLOCK):
        case = Case(n, chain(3), seed=n)
        before = [case.row(row) for row in range(3)]
        case.keys[n + 3 :], case.values[n + 3 :] = 7, -7
        for row in range(3):
            assert case.row(row).tobytes() == before[row].tobytes()


def test_accuracy() -> None:
    ours, plain = [], []
    for n in (0, 5, 63, 200, SPLIT + 100):
        for scale in (0.3, 2.0):
            case = Case(n, chain(12), seed=n)
            case.q *= np.float32(scale)
            for row in range(12):
                seen = case.seen(row)
                results = []
                for kind in (np.float64, np.float32):
                    s = case.keys[seen].astype(kind) @ case.q[row].astype(kind)
                    p = np.exp(s - s.max())
                    results.append(p @ case.values[seen].astype(kind) / p.sum())
                ours.append(np.abs(case.row(row) - results[0]).max())
                plain.append(np.abs(results[1] - results[0]).max())
    assert max(ours) <= 2 * max(plain) + np.finfo(np.float32).eps
    assert np.mean(ours) <= 3 * np.mean(plain)


def test_large_scores_do_not_overflow() -> None:
    case = Case(80, chain(4))
    case.q *= np.float32(200)
    for row in range(4):
        assert np.isfinite(case.row(row)).all()


@pytest.mark.parametrize("path", [[], [1], [0] * 17])
def test_a_path_that_is_none_is_refused(path: list[int]) -> None:
    with pytest.raises(ValueError) as caught:
        attend(np.zeros(D, np.float32), *np.zeros((2, 40, D), np.float32), 3, path)
    assert str(caught.value) == f"a path is 1 to 16 rows and begins with 0, not {path}"


def test_the_tail_begins_where_the_cpu_device_begins_it() -> None:
    for position in range(5 * BLOCK):
        assert canonical.tail_start(position) == attention.first_tail_key(position)
        assert 0 <= position - canonical.tail_start(position) < BLOCK + DEEPEST
        assert canonical.tail_start(position + DEEPEST) <= max(position, 0)


@pytest.mark.parametrize("n", [0, 62, 64, 127, SPLIT + 63])
def test_the_cpu_device_computes_it_within_rounding(n: int) -> None:
    config = dataclasses.replace(TINY, layers=1)
    size, group = config.head_dim, config.heads // config.kv_heads
    rng = np.random.default_rng(n)
    parents = bush(40, rng)
    step = Step(config)
    k = rng.standard_normal((n + 40, config.kv_heads, size)).astype(np.float32)
    v = rng.standard_normal((n + 40, config.kv_heads, size)).astype(np.float32)
    for at in range(n + 40):
        page, offset = step.batch.pages[2, at // BLOCK], at % BLOCK
        step.kv.k[0, page, :, offset // 16, :, offset % 16] = k[at]
        step.kv.v[0, page, :, offset] = v[at]
    segment = Segment(2, n, [0] * 40, parents)
    step.load([segment])
    q = rng.standard_normal((40, config.heads, size)).astype(np.float32) / np.float32(size**0.5)
    step.acts.q[:, : 40 * group] = (
        q.reshape(40, config.kv_heads, group, size)
        .swapaxes(0, 1)
        .reshape(config.kv_heads, -1, size)
    )
    step.phase("attend")
    step.phase("merge")
    for row in (0, 1, 7, 20, 39):
        got = step.acts.attn[row, : config.heads * size].reshape(config.heads, size)
        for head in range(config.heads):
            kv_head = head // group
            wanted = attend(q[row, head], k[:, kv_head], v[:, kv_head], n, segment.paths()[row])
            np.testing.assert_allclose(got[head], wanted, rtol=1e-5, atol=2e-6)
