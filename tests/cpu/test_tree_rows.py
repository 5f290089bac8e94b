"""Rows of draft trees through the whole forward step: the bits of plain decoding, on every path."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from cpu_step import TINY, Segment, Step
from tree_cases import bush, chain

from cute_kernels.cpu.attention import SPLIT_BLOCKS
from cute_kernels.cpu.state import PAGE

SPLIT = SPLIT_BLOCKS * PAGE
LENGTH = SPLIT + 130
# Around pages, around the 15 newest keys, around parts; 0: the root is the first token there is.
STARTS = [0, 1, 14, 15, 16, 47, 48, 49, 60, 61, 62, 63, 64, 65, 79, 80, 124, 127, 128, SPLIT - 1,
          SPLIT + 15, SPLIT + 63]  # fmt: skip


def star(rows: int) -> list[int]:
    return [-1] + [0] * (rows - 1)


def comb(rows: int) -> list[int]:
    """A spine whose every row has a second child before the next one: no two path rows join."""
    parents = [-1]
    while len(parents) < rows:
        spine = 0 if len(parents) < 3 else len(parents) - 1 - (len(parents) - 1) % 2
        parents.append(spine)
    return parents


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, TINY.vocab, LENGTH)


@pytest.fixture(scope="module")
def prefilled(tokens: np.ndarray) -> Callable[[int], Step]:
    """A step whose slot 1 holds the first `n` tokens and NaN after them; the same one each time."""
    step = Step()
    for i in range(0, LENGTH, PAGE):
        step.run([Segment(1, i, tokens[i : i + PAGE])], head_rows=[])
    k, v = step.kv.k.copy(), step.kv.v.copy()

    def at(n: int) -> Step:
        step.kv.k[:], step.kv.v[:] = np.nan, np.nan
        for i, page in enumerate(step.batch.pages[1]):
            for offset in range(max(0, min(PAGE, n - i * PAGE))):
                tile, lane = offset // 16, offset % 16
                step.kv.k[:, page, :, tile, :, lane] = k[:, page, :, tile, :, lane]
                step.kv.v[:, page, :, offset] = v[:, page, :, offset]
        return step

    return at


def plain(step: Step, n: int, drafted: np.ndarray, parents: list[int]) -> np.ndarray:
    """Logits of the tree's rows, each decoded plainly after its ancestors, depth first."""
    rows = len(parents)
    logits = np.full((rows, TINY.vocab), np.nan, np.float32)
    stack, depths = [0], [0] * rows
    while stack:
        row = stack.pop()
        if row:
            depths[row] = depths[parents[row]] + 1
        logits[row] = step.run([Segment(1, n + depths[row], [drafted[row]])])[0]
        stack += [child for child in range(rows) if parents[child] == row]
    return logits


def check(prefilled: Callable[[int], Step], n: int, parents: list[int], seed: int) -> None:
    drafted = np.random.default_rng(seed).integers(0, TINY.vocab, len(parents))
    together = prefilled(n).run([Segment(1, n, drafted, parents)])
    alone = plain(prefilled(n), n, drafted, parents)
    assert np.isfinite(alone).all()
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("n", STARTS)
def test_a_row_of_a_tree_has_the_bits_of_plain_decoding(
    prefilled: Callable[[int], Step], n: int
) -> None:
    rng = np.random.default_rng(n)
    for parents in (bush(33, rng), comb(31), chain(16)):
        check(prefilled, n, parents, n)


@pytest.mark.parametrize("rows", [2, 3, 16, 17, 64, 65, 128, 256])
def test_trees_of_any_size(prefilled: Callable[[int], Step], rows: int) -> None:
    rng = np.random.default_rng(rows)
    for n in (PAGE - 3, SPLIT + 70):
        check(prefilled, n, bush(rows, rng, deep=float(rng.choice([0.1, 0.5, 0.9]))), rows)
    check(prefilled, 2 * PAGE - 1, star(rows), rows)


def test_a_tree_that_is_a_chain_has_the_bits_of_a_prompts_rows(
    prefilled: Callable[[int], Step], tokens: np.ndarray
) -> None:
    for n in (50, 63, SPLIT):
        for rows in (1, 2, 16):
            as_tree = prefilled(n).run([Segment(1, n, tokens[:rows], chain(rows))])
            as_prompt = prefilled(n).run([Segment(1, n, tokens[:rows])])
            np.testing.assert_array_equal(as_tree, as_prompt)


@pytest.mark.parametrize("threads", [False, True])
def test_unequal_trees_beside_each_other_and_beside_a_prompt(
    tokens: np.ndarray, threads: bool
) -> None:
    rng = np.random.default_rng(3)
    drafted = rng.integers(0, TINY.vocab, 256)
    lengths = (61, 190, 3)
    trees = [bush(40, rng), comb(9), star(5)]
    cut = [drafted[:40], drafted[40:49], drafted[49:54]]
    alone = []
    for n, parents, row_tokens in zip(lengths, trees, cut):
        step = Step()
        step.run([Segment(0, 0, tokens[:n])], head_rows=[])
        alone.append(step.run([Segment(0, n, row_tokens, parents)]))
    step = Step()
    for slot, n in enumerate(lengths):
        step.run([Segment(slot, 0, tokens[:n])], head_rows=[])
    segments = [Segment(s, *rest) for s, rest in enumerate(zip(lengths, cut, trees))]
    for order in ((0, 1, 2), (2, 0, 1)):
        chosen = [segments[i] for i in order]
        got = step.run([chosen[0], Segment(3, 0, tokens[:70]), *chosen[1:]], threads=threads)
        rows = [*np.arange(len(cut[order[0]])), *np.arange(len(cut[order[0]]) + 70, len(got))]
        np.testing.assert_array_equal(got[rows], np.concatenate([alone[i] for i in order]))


def test_siblings_share_a_position_and_a_path_decides_what_a_row_sees(
    prefilled: Callable[[int], Step],
) -> None:
    """Same token, same depth: the same row under one parent, another row under another."""
    parents = [-1, 0, 0, 1, 1, 2]
    drafted = np.array([5, 6, 7, 9, 9, 9])
    logits = prefilled(70).run([Segment(1, 70, drafted, parents)])
    np.testing.assert_array_equal(logits[3], logits[4])
    assert (logits[3] != logits[5]).any()
    # A token on the path changes the row, one beside it does not.
    changed = prefilled(70).run([Segment(1, 70, np.array([5, 6, 8, 9, 10, 9]), parents)])
    np.testing.assert_array_equal(changed[[0, 1, 3]], logits[[0, 1, 3]])
    assert (changed[5] != logits[5]).any() and (changed[2] != logits[2]).any()
