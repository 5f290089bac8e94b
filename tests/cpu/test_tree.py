"""Draft trees against brute force, their links and masks, the walk, and every empty case."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from cute_kernels.cpu import tree as trees
from cute_kernels.cpu.state import MAX_DEPTH
from cute_kernels.cpu.tree import (
    MAX_NODES,
    Frontier,
    Tree,
    build_tree,
    child_with_token,
    make_frontier,
    make_tree,
    tree_of,
    walk,
)

Ranks = tuple[int, ...]
ROOT = 7
NAN, INF = np.float32(np.nan), np.float32(np.inf)


def candidates(
    logits: np.ndarray, k: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids, logprobs `[L, K]` and widths `[L]` of logits `[L, V]`; what is not a candidate is junk.

    Of equal logits the lower id comes first.
    """
    positions, vocab = logits.shape
    ids = rng.integers(0, vocab, (positions, k)).astype(np.int32)
    logprobs = rng.uniform(-1, 0, (positions, k)).astype(np.float32)
    widths = np.zeros(positions, np.int32)
    for d, row in enumerate(logits):
        if np.isnan(row).any():
            continue
        order = sorted(range(vocab), key=lambda i: (-row[i], i))[:k]
        top = np.float64(max(row.max(), -1e30))
        total = np.exp(row.astype(np.float64) - top).sum()
        widths[d] = len(order)
        ids[d, : len(order)] = order
        logprobs[d, : len(order)] = row[order] - np.float32(top + np.log(max(total, 1)))
    return ids, logprobs, widths


def brute_force(
    logprobs: np.ndarray, widths: np.ndarray, limit: int, budget: int
) -> list[tuple[Ranks, np.float32]]:
    """The tree's nodes in order, as (rank tuple, score), from the list of all prefixes."""
    level: list[tuple[Ranks, np.float32]] = [((), np.float32(0))]
    every: list[tuple[Ranks, np.float32]] = []
    for d in range(min(limit, len(logprobs))):
        row = logprobs[d, : widths[d]]
        if np.isnan(row).any():
            break
        level = [
            ((*ranks, r + 1), score + row[r])
            for ranks, score in level
            for r in range(min(len(row), budget))
            if row[r] > -np.inf
        ]
        every += level
    every.sort(key=lambda node: (-float(node[1]), node[0]))
    return every[:budget]


def ranks_of(tree: Tree, ids: np.ndarray) -> list[Ranks]:
    """The nodes' rank tuples, from tokens and parents alone."""
    found: list[Ranks] = [()]
    for row in range(1, tree.rows[0]):
        above = found[tree.parent[row]]
        found.append((*above, int(np.flatnonzero(ids[len(above)] == tree.token[row])[0]) + 1))
    return found[1:]


def check_links(tree: Tree) -> None:
    """Everything that follows from the parents: depths, masks, paths, children."""
    rows = int(tree.rows[0])
    children: list[list[int]] = [[] for _ in range(rows)]
    assert tree.parent[0] == -1 and tree.depth[0] == 0
    for row in range(rows):
        line, at = [row], row
        while at:
            assert 0 <= tree.parent[at] < at
            at = int(tree.parent[at])
            line.append(at)
        line.reverse()
        assert tree.depth[row] == len(line) - 1
        assert tree.path[row].tolist() == line + [-1] * (MAX_DEPTH + 1 - len(line))
        mask = sum(int(word) << 64 * i for i, word in enumerate(tree.mask[row]))
        assert mask == sum(1 << i for i in line)
        if row:
            children[tree.parent[row]].append(row)
    for row in range(rows):
        listed, at = [], int(tree.first_child[row])
        while at >= 0:
            listed.append(at)
            at = int(tree.next_sibling[at])
        assert listed == children[row]  # siblings ascend: they were taken in order of rank
        tokens = tree.token[listed].tolist()
        assert len(set(tokens)) == len(tokens)


def build(
    ids: np.ndarray, logprobs: np.ndarray, widths: np.ndarray, budget: int, *,
    limit: int = MAX_DEPTH, chain: bool = False, capacity: int | None = None,
) -> tuple[Tree, int, float]:  # fmt: skip
    """A tree built into arrays that held something else before."""
    tree = make_tree(budget if capacity is None else capacity)
    for array in tree:
        array[:] = 99
    frontier = make_frontier(len(tree.token) - 1)
    nodes, expected = build_tree(
        ROOT, ids, logprobs, widths, limit, budget, chain, tree, frontier
    )  # fmt: skip
    assert tree.rows[0] == nodes + 1 and tree.token[0] == ROOT
    return tree, nodes, expected


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


def sharp(rng: np.random.Generator, positions: int, vocab: int, scale: float) -> np.ndarray:
    return (rng.standard_normal((positions, vocab)) * scale).astype(np.float32)


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


def test_depth_one_accepts_none_or_one() -> None:
    ids, logprobs, widths = candidates(np.zeros((1, 4), np.float32), 4, np.random.default_rng(0))
    tree, nodes, _ = build(ids, logprobs, widths, 64)
    assert nodes == 4 and tree.parent[1:5].tolist() == [0, 0, 0, 0]
    for token in range(4):
        decided = np.full(5, token, np.int32)
        assert walk(tree, decided) == token + 1
    assert walk(tree, np.full(5, 4, np.int32)) == 0


@pytest.mark.parametrize("budget", [1, 3, 7, 15, 63, 255])
@pytest.mark.parametrize("limit", [1, 4, 7, 15])
def test_a_tree_of_one_candidate_is_the_chain(budget: int, limit: int) -> None:
    rng = np.random.default_rng(budget)
    ids, logprobs, widths = candidates(sharp(rng, 15, 50, 2), 32, rng)
    chain, nodes, expected = build(ids, logprobs, widths, budget, limit=limit, chain=True)
    assert nodes == min(budget, limit)
    assert chain.parent[: nodes + 1].tolist() == list(range(-1, nodes))
    assert chain.token[1 : nodes + 1].tolist() == ids[:nodes, 0].tolist()
    spine = build(ids, logprobs, np.ones_like(widths), budget, limit=limit)
    narrow = build(ids[:, :1].copy(), logprobs[:, :1].copy(), widths, budget, limit=limit)
    for other in (spine, narrow):
        assert other[1:] == (nodes, expected)
        for got, wanted in zip(other[0], chain):
            assert got.tobytes() == wanted.tobytes()
    check_links(chain)


def test_unequal_trees_of_several_slots_do_not_touch_each_other() -> None:
    rng = np.random.default_rng(6)
    every, frontier = make_tree(63, slots=3), make_frontier(63)
    inputs = [candidates(sharp(rng, p, 9, 1), 9, rng) for p in (3, 7, 1)]
    for slot, budget in ((1, 63), (0, 20), (2, 5), (1, 40)):
        build_tree(100 + slot, *inputs[slot], 15, budget, False, tree_of(every, slot), frontier)
    for slot, budget in ((0, 20), (1, 40), (2, 5)):
        ids = inputs[slot][0]
        tree, alone = tree_of(every, slot), build(*inputs[slot], budget)[0]
        assert tree.token[0] == 100 + slot and tree.rows[0] == budget + 1
        assert ranks_of(tree, ids) == ranks_of(alone, ids)
        check_links(tree)


def test_the_walk_accepts_the_longest_path_of_decided_tokens() -> None:
    rng = np.random.default_rng(7)
    depths = set()
    for _ in range(300):
        ids, logprobs, widths = candidates(sharp(rng, 5, 3, 1), 3, rng)
        tree, nodes, _ = build(ids, logprobs, widths, int(rng.integers(0, 60)))
        decided = rng.integers(-1, 4, nodes + 1).astype(np.int32)
        prefixes = {(): 0}
        for row in range(1, nodes + 1):
            line = tree.path[row, 1 : tree.depth[row] + 1]
            prefixes[tuple(tree.token[line].tolist())] = row
        accepted: tuple[int, ...] = ()
        while (longer := (*accepted, int(decided[prefixes[accepted]]))) in prefixes:
            accepted = longer
        row = walk(tree, decided)
        assert row == prefixes[accepted] and tree.depth[row] == len(accepted)
        depths.add(len(accepted))
    assert depths >= {0, 1, 2, 3}


def test_the_walk_reads_decisions_of_its_path_only() -> None:
    rng = np.random.default_rng(8)
    ids, logprobs, widths = candidates(sharp(rng, 6, 4, 1), 4, rng)
    tree, nodes, _ = build(ids, logprobs, widths, 50)
    for goal in range(nodes + 1):
        decided = np.full(nodes + 1, -1, np.int32)
        line = tree.path[goal, : tree.depth[goal] + 1]
        decided[line[:-1]] = tree.token[line[1:]]
        assert walk(tree, decided) == goal


def fuzz(rng: np.random.Generator) -> Iterator[None]:
    """Any values in any arrays: no access outside them, a valid tree, the same one twice."""
    guard = 5
    tree = make_tree(MAX_NODES)
    frontier = Frontier(*(np.concatenate([a, a[:guard]]) for a in make_frontier(MAX_NODES)))
    while True:
        positions, k = int(rng.integers(0, 17)), int(rng.integers(0, 257))
        capacity = int(rng.choice([0, 1, 2, 15, 63, 64, 65, 127, 128, 255]))
        n = capacity + 1
        scale = float(rng.choice([0.01, 1, 10, 1000]))
        logprobs = -np.sort(rng.gamma(1, scale, (positions, k)).astype(np.float32), axis=1)
        if rng.random() < 0.3:
            logprobs = np.floor(logprobs)
        if rng.random() < 0.3:
            logprobs[rng.random(logprobs.shape) < 0.02] = rng.choice([-INF, INF, NAN])
            logprobs = -np.sort(-logprobs, axis=1)
        ids = rng.permuted(np.tile(np.arange(k, dtype=np.int32), (positions, 1)), axis=1)
        widths = rng.integers(0, k + 3, positions).astype(np.int32)
        if rng.random() < 0.7:
            widths[:] = k
        budget, limit = int(rng.integers(-2, 300)), int(rng.integers(-1, 20))
        chain = bool(rng.random() < 0.2)
        for array in (*tree, *frontier):
            array[:] = 77
        view = Tree(*(a if a.size == 1 else a[:n] for a in tree))
        scratch = Frontier(
            *(a[: 2 * n] for a in frontier[:4]), frontier.heap[: n + 1], frontier.width[:MAX_DEPTH]
        )
        build_tree(ROOT, ids, logprobs, widths, limit, budget, chain, view, scratch)
        rows = int(view.rows[0])
        assert 1 <= rows <= max(min(budget, capacity), 0) + 1
        assert rows <= n
        for array in tree[1:]:
            assert (array[rows:] == 77).all()
        for array, used in zip(frontier, scratch):
            assert (array[len(used) :] == 77).all()
        assert (np.diff(view.score[:rows]) <= 0).all()
        node = np.arange(1, rows)
        parent, depth = view.parent[1:rows], view.depth[1:rows]
        assert (parent < node).all() and (depth == view.depth[parent] + 1).all()
        assert depth.max(initial=0) <= min(max(limit, 0), positions, MAX_DEPTH)
        pairs = set(zip(parent.tolist(), view.token[1:rows].tolist()))
        assert len(pairs) == rows - 1
        assert (view.path[node, depth] == node).all()
        assert (view.path[node, depth - 1] == parent).all()
        bits = np.unpackbits(view.mask[:rows].view(np.uint8), axis=1, bitorder="little")
        assert (bits.sum(1) == view.depth[:rows] + 1).all()
        assert np.isfinite(view.score[:rows]).all() and np.isfinite(view.expected[:rows]).all()
        yield


def test_fuzz() -> None:
    for _ in itertools.islice(fuzz(np.random.default_rng(9)), 1000):
        pass


@pytest.mark.slow
def test_fuzz_of_twenty_thousand_trees() -> None:
    for _ in itertools.islice(fuzz(np.random.default_rng(10)), 20_000):
        pass


def test_too_large_a_tree_is_refused() -> None:
    for nodes in (-1, MAX_NODES + 1):
        with pytest.raises(ValueError) as caught:
            trees.make_tree(nodes)
        assert str(caught.value) == f"a tree has 0 to 255 nodes, not {nodes}"
