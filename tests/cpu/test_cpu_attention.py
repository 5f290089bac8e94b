"""Attention: canonical order, row invariance, unwritten memory, work division."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from cpu_step import TINY, Segment, Step

from cute_kernels.cpu import attention
from cute_kernels.cpu.attention import FEW_ROWS, SPLIT_BLOCKS, TAIL
from cute_kernels.cpu.state import PAGE

CONFIG = dataclasses.replace(TINY, layers=1)
SPLIT = SPLIT_BLOCKS * PAGE
# Around pages, around the 15 newest keys, around parts, and far out.
POSITIONS = sorted(
    {0, 1, 2, 14, 15, 16, 62, 63, 64, 65, 77, 78, 79, 80}
    | {base + d for base in (128, 2 * SPLIT) for d in (-4, -3, -2, -1, 0, 1)}
    | {SPLIT + d for d in (-1, 0, 1, 14, 15, 16, 63, 64, 77, 78, 79, 80)}
    | {2 * SPLIT + 79}
)


class Attention:
    """One layer with random queries, keys and values for one sequence in slot 1."""

    def __init__(
        self, length: int = 2 * SPLIT + 128, seed: int = 0, scale: float = CONFIG.head_dim**-0.5
    ) -> None:
        rng = np.random.default_rng(seed)
        c = CONFIG
        self.step = Step(c, rows=256, slots=3, pages=length // PAGE + 4, workers=2)
        self.q = rng.standard_normal((length, c.heads, c.head_dim)).astype(np.float32) * scale
        self.k = rng.standard_normal((length, c.kv_heads, c.head_dim)).astype(np.float32)
        self.v = rng.standard_normal((length, c.kv_heads, c.head_dim)).astype(np.float32)

    def write(self, slot: int, keys: int, filler: float = np.nan) -> None:
        """Positions below `keys` into the slot's pages, `filler` everywhere else."""
        kv, pages = self.step.kv, self.step.batch.pages[slot]
        for page in pages:
            kv.k[0, page], kv.v[0, page] = filler, filler
        for position in range(keys):
            page, offset = pages[position // PAGE], position % PAGE
            kv.k[0, page, :, offset // 16, :, offset % 16] = self.k[position]
            kv.v[0, page, :, offset] = self.v[position]

    def run(
        self,
        segments: list[tuple[int, int, int]],
        threads: bool = False,
        order: np.ndarray | None = None,
    ) -> np.ndarray:
        """Rows of segments (slot, first position, rows); `[rows, heads, head_dim]`.

        `order` permutes the rows of the only segment, as a tree's rows do not ascend.
        """
        step, c = self.step, CONFIG
        step.load([Segment(slot, start, [0] * rows) for slot, start, rows in segments])
        row, group = int(step.batch.count[0]), c.heads // c.kv_heads
        if order is not None:
            step.batch.position[:row] = step.batch.position[:row][order]
            attention.build_attention_work(step.dims, step.batch)
        for r in range(row):
            query = self.q[step.batch.position[r]].reshape(c.kv_heads, group, c.head_dim)
            step.acts.q[:, r * group : (r + 1) * group] = query
        for name in ("part_ml", "part_o", "attn", "scratch"):
            getattr(step.acts, name)[:] = np.nan
        step.phase("attend", 0, threads)
        step.phase("merge", 0, threads)
        size = c.heads * c.head_dim
        return step.acts.attn[:row, :size].reshape(row, c.heads, c.head_dim).copy()

    def exact(self, position: int) -> np.ndarray:
        """The row in float64."""
        group = CONFIG.heads // CONFIG.kv_heads
        out = np.empty((CONFIG.heads, CONFIG.head_dim))
        for head in range(CONFIG.heads):
            k = self.k[: position + 1, head // group].astype(np.float64)
            s = k @ self.q[position, head].astype(np.float64)
            p = np.exp(s - s.max())
            out[head] = p @ self.v[: position + 1, head // group].astype(np.float64) / p.sum()
        return out

    def plain(self, position: int) -> np.ndarray:
        """The row in float32 numpy."""
        group = CONFIG.heads // CONFIG.kv_heads
        out = np.empty((CONFIG.heads, CONFIG.head_dim), np.float32)
        for head in range(CONFIG.heads):
            s = self.k[: position + 1, head // group] @ self.q[position, head]
            p = np.exp(s - s.max())
            out[head] = p @ self.v[: position + 1, head // group] / p.sum()
        return out


@pytest.fixture(scope="module")
def case() -> Attention:
    return Attention()


@pytest.fixture(scope="module")
def alone(case: Attention) -> Callable[[int], np.ndarray]:
    """The row at a position, computed by itself with nothing but NaN after it; kept."""
    known: dict[int, np.ndarray] = {}

    def row(position: int) -> np.ndarray:
        if position not in known:
            case.write(1, position + 1)
            known[position] = case.run([(1, position, 1)])[0]
        return known[position]

    return row


def test_accuracy(case: Attention, alone: Callable[[int], np.ndarray]) -> None:
    exact = np.array([case.exact(position) for position in POSITIONS])
    ours = np.array([alone(position) for position in POSITIONS]) - exact
    plain = np.array([case.plain(position) for position in POSITIONS]) - exact
    assert np.square(ours).mean() <= 4 * np.square(plain).mean()
    assert np.abs(ours).max() <= 3 * np.abs(plain).max()


def test_large_scores_do_not_overflow() -> None:
    case = Attention(length=256, scale=40.0)
    case.write(1, 201)
    np.testing.assert_allclose(case.run([(1, 200, 1)])[0], case.exact(200), atol=2e-4)


def test_a_row_has_the_same_bits_in_any_segment(
    case: Attention, alone: Callable[[int], np.ndarray]
) -> None:
    last = 2 * SPLIT + 79
    for rows in (2, 3, FEW_ROWS, FEW_ROWS + 1, 33, 64, 100, 256):
        for end in {rows, 64 + rows // 2, SPLIT + 1, SPLIT + 79, 2 * SPLIT + 16, last + 1}:
            if end < rows:
                continue
            case.write(1, end)
            together = case.run([(1, end - rows, rows)])
            wanted = [p for p in POSITIONS if end - rows <= p < end]
            # The reference rows rewrite the pages, so they are computed after the segment.
            for position in wanted:
                np.testing.assert_array_equal(
                    together[position - (end - rows)], alone(position), str((rows, end, position))
                )


def test_a_row_has_the_same_bits_beside_other_slots(
    case: Attention, alone: Callable[[int], np.ndarray]
) -> None:
    wanted = {position: alone(position) for position in (63, 78, SPLIT + 79, 2 * SPLIT + 79)}
    for position, row in wanted.items():
        case.write(0, 300)
        case.write(1, position + 1)
        case.write(2, 90)
        before = [(0, 200, 100), (2, 88, 2)]
        for segments in ([*before, (1, position, 1)], [(1, position, 1), *before],
                         [before[1], (1, position, 1), before[0]]):  # fmt: skip
            at = sum(rows for slot, _, rows in segments[: segments.index((1, position, 1))])
            for threads in (False, True):
                np.testing.assert_array_equal(case.run(segments, threads)[at], row)


@pytest.mark.parametrize("middle", [79 + PAGE, SPLIT + 79])
@pytest.mark.parametrize("rows", [9, 40])
def test_rows_need_not_ascend(
    case: Attention, alone: Callable[[int], np.ndarray], rows: int, middle: int
) -> None:
    first = middle - rows // 2  # some rows have one block, or one part, more than others
    wanted = np.array([alone(position) for position in range(first, first + rows)])
    case.write(1, first + rows)
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(rows)
        got = case.run([(1, first, rows)], order=order)
        np.testing.assert_array_equal(got, wanted[order])


def test_what_unwritten_memory_holds_changes_nothing(case: Attention) -> None:
    for position in (0, 14, 62, 78, 79, 127, SPLIT + 14, SPLIT + 80):
        results = set()
        for filler in (np.nan, np.inf, -1e30, 0.0):
            case.write(1, position + 1, filler)
            out = case.run([(1, position, 1)])
            assert np.isfinite(out).all()
            results.add(out.tobytes())
        assert len(results) == 1


def test_workers_do_not_change_bits(alone: Callable[[int], np.ndarray], case: Attention) -> None:
    position = SPLIT + 79
    row = alone(position)
    case.write(1, position + 1)
    for workers in (1, 2, 5):
        other = Step(CONFIG, rows=256, slots=3, pages=24, workers=workers)
        before, case.step.acts = case.step.acts, other.acts
        case.step.workers = workers
        try:
            np.testing.assert_array_equal(case.run([(1, position - 99, 100)])[99], row)
        finally:
            case.step.acts, case.step.workers = before, 2


def test_the_tail_is_fifteen_to_seventy_nine_keys() -> None:
    for position in range(1000):
        start = attention.first_tail_key(position)
        assert start % PAGE == 0
        keys = position - start + 1
        assert keys <= TAIL + PAGE
        if start:
            assert keys > TAIL
    assert attention.first_tail_key(78) == 0
    assert attention.first_tail_key(79) == 64


def test_every_part_has_exactly_one_writer() -> None:
    step = Step(TINY, rows=256, slots=4, pages=80)
    rng = np.random.default_rng(0)
    for _ in range(50):
        segments, left = [], 256
        for slot in rng.permutation(4):
            rows = int(rng.choice([1, 2, 15, 16, 17, 40, 100]))
            if rows > left:
                continue
            left -= rows
            start = int(rng.integers(0, 80 * PAGE - rows))
            segments.append(Segment(int(slot), start, [0] * rows))
        step.load(segments)
        b = step.batch
        written: set[tuple[int, int]] = set()
        for slot, first, rows, head, split, end in b.item[: b.count[3]]:
            assert end > split
            for row in range(first, first + rows):
                assert b.slot[row] == slot
                blocks = attention.first_tail_key(int(b.position[row])) // PAGE
                if blocks > split * SPLIT_BLOCKS:
                    part = (int(head), int(b.part[row, 0]) + int(split))
                    assert part not in written
                    written.add(part)
                if b.part[row, 1] > 1:  # a row with parts of its own: this item does one of them
                    assert end == split + 1
        expected = {
            (head, int(b.part[row, 0]) + i)
            for row in range(b.count[0])
            for head in range(TINY.kv_heads)
            for i in range(b.part[row, 1])
        }
        assert written == expected
        assert len(expected) == b.count[4] * TINY.kv_heads
        assert b.count[4] * 3 <= step.acts.part_o.shape[1]
