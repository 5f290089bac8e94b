"""The walk along a draft tree, chains, trees of several slots, and trees of anything at all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from tree_cases import ROOT, build, candidates, check_links, ranks_of, sharp

from cute_kernels.cpu.state import MAX_DEPTH
from cute_kernels.cpu.tree import (
    MAX_NODES,
    Frontier,
    Tree,
    build_tree,
    make_frontier,
    make_tree,
    tree_of,
    walk,
)

NAN, INF = np.float32(np.nan), np.float32(np.inf)


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
