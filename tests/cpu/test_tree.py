"""Draft trees against brute force: order, ties, -inf, NaN, every empty case."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tree_cases import ROOT, brute_force, build, candidates, check_links, ranks_of, sharp

from cute_kernels.cpu.state import MAX_DEPTH
from cute_kernels.cpu.tree import (
    MAX_NODES,
    build_tree,
    child_with_token,
    make_frontier,
    make_tree,
    walk,
)

NAN, INF = np.float32(np.nan), np.float32(np.inf)


def random_logits(rng: np.random.Generator) -> np.ndarray:
    """Small vocabularies, exact ties within and between positions, -inf, rows with NaN."""
    positions, vocab = int(rng.integers(1, 5)), int(rng.choice([1, 2, 3, 5]))
    kind = rng.integers(4)
    logits = rng.standard_normal((positions, vocab)).astype(np.float32) * 3
    if kind == 0:
        logits = rng.integers(-2, 1, (positions, vocab)).astype(np.float32)
    if kind == 1:
        logits[:] = rng.permutation(logits[0])  # positions tie with each other
    if kind == 2:
        logits[:] = 0
    if rng.random() < 0.4:
        logits[rng.random(logits.shape) < 0.3] = -np.inf
    if rng.random() < 0.2:
        logits[rng.integers(positions), rng.integers(vocab)] = np.nan
    return logits


def test_equals_brute_force() -> None:
    rng = np.random.default_rng(0)
    ties, full, cut = 0, 0, 0
    for _ in range(1000):
        logits = random_logits(rng)
        budget = int(rng.choice([1, 2, 3, 7, 16, 40, 255]))
        k = min(int(rng.integers(1, logits.shape[1] + 3)), 256)
        ids, logprobs, widths = candidates(logits, k, rng)
        if rng.random() < 0.3:  # sums of multiples of 1/4 are exact: ties across the whole tree
            logprobs = np.where(logprobs > -np.inf, np.floor(logprobs * 4) / 4, logprobs)
        limit = int(rng.choice([0, 1, 2, MAX_DEPTH]))
        tree, nodes, expected = build(ids, logprobs, widths, budget, limit=limit)
        wanted = brute_force(logprobs, widths, limit, budget)
        assert ranks_of(tree, ids) == [ranks for ranks, _ in wanted]
        scores = np.array([score for _, score in wanted], np.float32)
        assert tree.score[1 : nodes + 1].tobytes() == scores.tobytes()
        assert expected == pytest.approx(np.exp(scores.astype(np.float64)).sum(), rel=1e-5)
        check_links(tree)
        ties += len(set(scores.tolist())) < nodes
        full += nodes == budget
        cut += bool(np.isnan(logits).any())
    assert min(ties, full, 1000 - full, cut) > 100


def test_equals_brute_force_where_only_deep_ranks_differ() -> None:
    rng = np.random.default_rng(11)
    for _ in range(20):
        logits = np.full((MAX_DEPTH, 3), -np.inf, np.float32)
        for d, width in enumerate(rng.permutation([1] * 10 + [2, 2, 2, 3, 3])):
            logits[d, rng.permutation(3)[:width]] = 0
        ids, logprobs, widths = candidates(logits, 3, rng)
        tree, _, _ = build(ids, logprobs, widths, MAX_NODES)
        wanted = brute_force(logprobs, widths, MAX_DEPTH, MAX_NODES)
        assert ranks_of(tree, ids) == [ranks for ranks, _ in wanted]
        check_links(tree)


def test_a_nan_candidate_cuts_the_tree_even_where_the_width_does_not_say_so() -> None:
    rng = np.random.default_rng(1)
    for where, wrong in itertools.product(range(4), (NAN, INF)):
        ids, logprobs, widths = candidates(np.zeros((4, 3), np.float32), 3, rng)
        logprobs[where, 2] = wrong
        tree, nodes, _ = build(ids, logprobs, widths, 255)
        assert tree.depth[: nodes + 1].max() == where
        assert nodes == sum(3**d for d in range(1, where + 1))


def test_ties_of_logits_go_to_the_lower_id_and_ties_of_scores_to_the_lower_ranks() -> None:
    rng = np.random.default_rng(2)
    ids, logprobs, widths = candidates(np.zeros((2, 2), np.float32), 2, rng)
    assert ids.tolist() == [[0, 1], [0, 1]]
    tree, nodes, _ = build(ids, logprobs, widths, 100)
    assert nodes == 6
    assert ranks_of(tree, ids) == [(1,), (2,), (1, 1), (1, 2), (2, 1), (2, 2)]
    certain = np.zeros((3, 1), np.float32)  # log 1: a prefix ties with its extensions
    tree, nodes, _ = build(np.zeros((3, 1), np.int32), certain, np.ones(3, np.int32), 9)
    assert tree.parent[: nodes + 1].tolist() == [-1, 0, 1, 2]


def test_a_score_is_one_addition_to_its_parents_score() -> None:
    """A score derived from the sibling before would break these ties, and make NaN of -inf."""
    rng = np.random.default_rng(3)
    for _ in range(200):
        row = np.sort(rng.uniform(-9, 0, 6).astype(np.float32))[::-1]
        row[1] = row[2] = row[3]
        row[5] = -np.inf
        logprobs = np.stack([np.sort(rng.uniform(-9, 0, 6).astype(np.float32))[::-1], row])
        ids = np.tile(np.arange(6, dtype=np.int32), (2, 1))
        tree, nodes, _ = build(ids, logprobs, np.full(2, 6, np.int32), 255)
        assert nodes == 6 + 6 * 5
        assert not np.isnan(tree.score[: nodes + 1]).any()
        for r in range(1, nodes + 1):
            rank, parent = tree.token[r], tree.parent[r]
            assert tree.score[r] == tree.score[parent] + logprobs[tree.depth[r] - 1, rank]


def test_scores_that_overflow_to_minus_infinity_are_left_out() -> None:
    far = np.full((2, 2), -2e38, np.float32)
    ids = np.array([[0, 1], [0, 1]], np.int32)
    _, nodes, expected = build(ids, far, np.full(2, 2, np.int32), 20)
    assert nodes == 2 and expected == 0


def test_two_positions_of_two_tokens_give_six_nodes_whatever_the_budget() -> None:
    ids, logprobs, widths = candidates(
        np.array([[0.5, 0], [1, -1]], np.float32), 2, np.random.default_rng(0)
    )
    for budget in (6, 7, 100, 255):
        assert build(ids, logprobs, widths, budget)[1] == 6
    assert build(ids, logprobs, widths, 5)[1] == 5


@pytest.mark.parametrize("chain", [False, True])
def test_empty_cases_give_the_root_alone(chain: bool) -> None:
    ids, logprobs, widths = candidates(
        np.zeros((3, 4), np.float32), 4, np.random.default_rng(0)
    )  # fmt: skip
    none = np.zeros_like(widths)
    nothing = np.full_like(logprobs, -np.inf)
    empty: list[tuple[np.ndarray, np.ndarray, np.ndarray, int, int]] = [
        (ids, logprobs, widths, 0, MAX_DEPTH),
        (ids, logprobs, widths, -3, MAX_DEPTH),
        (ids, logprobs, widths, 8, 0),
        (ids, logprobs, widths, 8, -1),
        (ids, logprobs, none, 8, MAX_DEPTH),
        (ids, nothing, widths, 8, MAX_DEPTH),
        (ids[:0], logprobs[:0], widths[:0], 8, MAX_DEPTH),
        (ids[:, :0].copy(), logprobs[:, :0].copy(), widths, 8, MAX_DEPTH),
    ]
    for i, l, w, budget, limit in empty:
        tree, nodes, expected = build(i, l, w, budget, limit=limit, chain=chain, capacity=8)
        assert (nodes, expected) == (0, 0)
        check_links(tree)
        assert all(child_with_token(tree, 0, token) == -1 for token in (-1, 0, 3, 99))


def test_a_dropped_tree_leaves_nothing_of_the_one_before() -> None:
    ids, logprobs, widths = candidates(np.zeros((3, 4), np.float32), 4, np.random.default_rng(0))
    tree, frontier = make_tree(30), make_frontier(30)
    build_tree(ROOT, ids, logprobs, widths, 3, 30, False, tree, frontier)
    assert child_with_token(tree, 0, 2) > 0
    build_tree(ROOT, ids, logprobs, widths, 3, 0, False, tree, frontier)
    assert walk(tree, np.zeros(31, np.int32)) == 0


def test_token_zero_is_an_ordinary_token() -> None:
    logits = np.zeros((3, 5), np.float32)
    logits[:, 0] = 4
    ids, logprobs, widths = candidates(logits, 5, np.random.default_rng(0))
    tree, nodes, _ = build(ids, logprobs, widths, 12)
    assert nodes == 12 and (tree.token[1:13] == 0).sum() >= 3
    row = walk(tree, np.zeros(13, np.int32))
    assert tree.depth[row] == 3 and tree.token[tree.path[row, 1:4]].tolist() == [0, 0, 0]


@pytest.mark.parametrize("positions", [7, 15])
def test_the_depth_is_bounded_by_the_drafted_positions_and_not_by_the_budget(
    positions: int,
) -> None:
    rng = np.random.default_rng(positions)
    ids, logprobs, widths = candidates(sharp(rng, positions, 300, 40), 256, rng)
    largest, nodes, _ = build(ids, logprobs, widths, MAX_NODES)
    assert nodes == MAX_NODES and largest.depth.max() == positions
    for budget in range(0, MAX_NODES, 3):  # a smaller tree is the beginning of a larger one
        tree, nodes, expected = build(ids, logprobs, widths, budget)
        assert nodes == budget and expected == largest.expected[budget]
        for name in ("token", "parent", "depth", "path", "score"):
            assert np.array_equal(
                getattr(tree, name)[: budget + 1], getattr(largest, name)[: budget + 1]
            )


def test_lowering_the_rows_is_the_same_as_a_smaller_budget() -> None:
    rng = np.random.default_rng(5)
    ids, logprobs, widths = candidates(sharp(rng, 4, 8, 1), 8, rng)
    for budget in range(40):
        large, small = build(ids, logprobs, widths, 60)[0], build(ids, logprobs, widths, budget)[0]
        large.rows[0] = budget + 1
        for row, token in itertools.product(range(budget + 1), range(8)):
            assert child_with_token(large, row, token) == child_with_token(small, row, token)


def test_too_large_a_tree_is_refused() -> None:
    for nodes in (-1, MAX_NODES + 1):
        with pytest.raises(ValueError) as caught:
            make_tree(nodes)
        assert str(caught.value) == f"a tree has 0 to 255 nodes, not {nodes}"
