"""Draft trees for tests: random shapes, inputs for the builder, and what a tree must satisfy."""

from __future__ import annotations

import numpy as np

from cute_kernels.cpu.state import MAX_DEPTH
from cute_kernels.cpu.tree import Tree, build_tree, make_frontier, make_tree

Ranks = tuple[int, ...]
ROOT = 7


def chain(rows: int) -> list[int]:
    """Parents of a tree without branches."""
    return list(range(-1, rows - 1))


def bush(rows: int, rng: np.random.Generator, deep: float = 0.6) -> list[int]:
    """Random parents, no row deeper than MAX_DEPTH; `deep`: how often the newest row is one."""
    parents, depths = [-1], [0]
    while len(parents) < rows:
        parent = len(parents) - 1 if rng.random() < deep else int(rng.integers(len(parents)))
        if depths[parent] < MAX_DEPTH:
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return parents


def sharp(rng: np.random.Generator, positions: int, vocab: int, scale: float) -> np.ndarray:
    """Random logits `[positions, vocab]`; a large scale makes deep trees, a small one broad."""
    return (rng.standard_normal((positions, vocab)) * scale).astype(np.float32)


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
