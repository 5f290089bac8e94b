"""Draft trees: the best prefixes under the drafter's marginals, and the walk that accepts a path.

The drafter gives, for each of L positions, candidates with log-probabilities. A prefix takes one
candidate from each of the first d positions; its score is the sum of their log-probabilities. The
tree is the `budget` prefixes of highest score, which is the tree of most expected accepted tokens
if the marginals were independent (DDTree, arXiv 2604.12989, algorithm 1). It is found best-first:
take the best open prefix, then open its next sibling and its first child.

Prefixes are ordered by (score descending, rank tuple ascending, a prefix before its extensions), so
equal scores leave nothing to chance. A score is always `parent's score + log-probability`, one
float32 addition: rounding is monotone, hence no prefix scores above its parent or above an earlier
sibling, and the order of a tree's nodes is the order of a global sort. (Sibling scores derived from
each other lose that, and make NaN of -inf.) So the best `B` nodes are the first `B` of any larger
tree, a parent stands before its children, and a chain is the tree of one candidate per position.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cute_kernels.cpu.state import MAX_DEPTH
from cute_kernels.cpu.vecmath import exp
from host.jit import jit

MAX_NODES = 255
"""Nodes of a tree, the root not counted; and the largest rank, which must fit a byte of the key."""

_NONE = np.float32(-np.inf)


class Tree(NamedTuple):
    """One tree of N = nodes + 1 rows, row 0 the root; or, with a leading axis, one for each slot.

    Only the first `rows[0]` rows are valid. To keep fewer of a tree's nodes, lower `rows[0]`.
    """

    rows: np.ndarray  # [1] int32: rows in use, the root counted
    token: np.ndarray  # [N] int32
    parent: np.ndarray  # [N] int32: always a lower row; -1 for the root
    depth: np.ndarray  # [N] int32: 0 for the root
    first_child: np.ndarray  # [N] int32: the child of best rank; -1 if none
    next_sibling: np.ndarray  # [N] int32: the sibling of next rank, always a higher row; -1 if none
    mask: np.ndarray  # [N, ceil(N / 64)] uint64: bit i: row i is an ancestor, or the row itself
    path: np.ndarray  # [N, MAX_DEPTH + 1] int32: rows from the root to the row itself, then -1
    score: np.ndarray  # [N] float32: log-probability of the prefix under the drafter's marginals
    expected: np.ndarray  # [N] float64: expected accepted tokens of the tree that ends at this row


class Frontier(NamedTuple):
    """Scratch of `build_tree`: the prefixes that were opened, and a heap of those still open."""

    score: np.ndarray  # [2 N] float32
    key: np.ndarray  # [2 N, 2] uint64: the rank tuple, a byte a rank from the top; 0 ends it
    rank: np.ndarray  # [2 N] int32: last rank, from 1
    origin: np.ndarray  # [2 N] int32: row that opened it: the parent (rank 1) or the sibling before
    heap: np.ndarray  # [N + 1] int32
    width: np.ndarray  # [MAX_DEPTH] int32: candidates in use per position


def make_tree(nodes: int, slots: int | None = None) -> Tree:
    """An empty tree for up to `nodes` nodes; with `slots`, one for each slot (see `tree_of`)."""
    if not 0 <= nodes <= MAX_NODES:
        raise ValueError(f"a tree has 0 to {MAX_NODES} nodes, not {nodes}")
    lead, n = () if slots is None else (slots,), nodes + 1

    def array(dtype: type, *shape: int) -> np.ndarray:
        return np.zeros((*lead, *shape), dtype)

    return Tree(
        rows=array(np.int32, 1),
        token=array(np.int32, n),
        parent=array(np.int32, n),
        depth=array(np.int32, n),
        first_child=array(np.int32, n),
        next_sibling=array(np.int32, n),
        mask=array(np.uint64, n, -(-n // 64)),
        path=array(np.int32, n, MAX_DEPTH + 1),
        score=array(np.float32, n),
        expected=array(np.float64, n),
    )


def make_frontier(nodes: int, workers: int | None = None) -> Frontier:
    """Scratch for trees of up to `nodes` nodes, for one builder at a time; with `workers`, one for
    each of them (see `frontier_of`)."""
    lead, n = () if workers is None else (workers,), nodes + 1
    return Frontier(
        score=np.zeros((*lead, 2 * n), np.float32),
        key=np.zeros((*lead, 2 * n, 2), np.uint64),
        rank=np.zeros((*lead, 2 * n), np.int32),
        origin=np.zeros((*lead, 2 * n), np.int32),
        heap=np.zeros((*lead, n + 1), np.int32),
        width=np.zeros((*lead, MAX_DEPTH), np.int32),
    )


@jit
def tree_of(trees, slot):
    """The tree of one slot, as views into the arrays of all."""
    return Tree(
        trees.rows[slot],
        trees.token[slot],
        trees.parent[slot],
        trees.depth[slot],
        trees.first_child[slot],
        trees.next_sibling[slot],
        trees.mask[slot],
        trees.path[slot],
        trees.score[slot],
        trees.expected[slot],
    )


@jit
def frontier_of(frontiers, worker):
    """The scratch of one worker, as views into the arrays of all."""
    return Frontier(
        frontiers.score[worker],
        frontiers.key[worker],
        frontiers.rank[worker],
        frontiers.origin[worker],
        frontiers.heap[worker],
        frontiers.width[worker],
    )


@jit
def _is_before(open_, a, b):
    """Whether prefix `a` is taken before prefix `b`."""
    if open_.score[a] != open_.score[b]:
        return open_.score[a] > open_.score[b]
    if open_.key[a, 0] != open_.key[b, 0]:
        return open_.key[a, 0] < open_.key[b, 0]
    return open_.key[a, 1] < open_.key[b, 1]


@jit
def _push(open_, size, item):
    """Put `item` on the heap of `size` prefixes; the new size."""
    heap, at = open_.heap, size
    while at > 0:
        above = (at - 1) // 2
        if not _is_before(open_, item, heap[above]):
            break
        heap[at] = heap[above]
        at = above
    heap[at] = item
    return size + 1


@jit
def _pop(open_, size):
    """Take the first prefix off the heap of `size` prefixes, which leaves `size - 1`."""
    heap, top = open_.heap, open_.heap[0]
    size -= 1
    item, at = heap[size], 0
    while True:
        below = 2 * at + 1
        if below >= size:
            break
        if below + 1 < size and _is_before(open_, heap[below + 1], heap[below]):
            below += 1
        if not _is_before(open_, heap[below], item):
            break
        heap[at] = heap[below]
        at = below
    heap[at] = item
    return top


@jit
def _open(open_, count, size, score, key_from, depth, rank, origin):
    """Open the prefix that ends with `rank` at `depth`; the new size of the heap.

    `key_from` is an opened prefix whose first `depth - 1` ranks it shares, or -1 at depth 1.
    """
    high, low = np.uint64(0), np.uint64(0)
    if key_from >= 0:
        high, low = open_.key[key_from, 0], open_.key[key_from, 1]
    shift = np.uint64(56 - 8 * ((depth - 1) % 8))
    byte, new = np.uint64(255) << shift, np.uint64(rank) << shift
    if depth <= 8:
        high = (high & ~byte) | new
    else:
        low = (low & ~byte) | new
    open_.score[count] = score
    open_.key[count, 0] = high
    open_.key[count, 1] = low
    open_.rank[count] = rank
    open_.origin[count] = origin
    return _push(open_, size, count)


@jit
def _usable_depth(logprobs, widths, depth_limit, most, open_):
    """How deep the tree may go; fills `open_.width` with the candidates in use per position.

    Candidates of probability 0 are left out. A position without candidates, or with a NaN or +inf
    among them, ends the tree.
    """
    limit = min(min(logprobs.shape[0], depth_limit), MAX_DEPTH)
    for d in range(limit):
        finite, wrong = 0, 0
        row = logprobs[d]
        for r in range(min(widths[d], row.size)):
            finite += row[r] > _NONE
            wrong += not (row[r] < -_NONE)
        if wrong > 0 or finite == 0:
            return d
        open_.width[d] = min(finite, most)
    return limit


@jit
def _add_row(tree, row, token, parent, score):
    """Row `row` below `parent` (-1: the root); sibling links are the caller's."""
    tree.token[row] = token
    tree.parent[row] = parent
    tree.score[row] = score
    tree.first_child[row] = -1
    tree.next_sibling[row] = -1
    if parent < 0:
        tree.depth[row] = 0
        tree.mask[row, :] = np.uint64(0)
        tree.path[row, :] = -1
        tree.expected[row] = 0.0
    else:
        tree.depth[row] = tree.depth[parent] + 1
        for i in range(tree.mask.shape[1]):
            tree.mask[row, i] = tree.mask[parent, i]
        for i in range(tree.path.shape[1]):
            tree.path[row, i] = tree.path[parent, i]
        tree.expected[row] = tree.expected[row - 1] + np.float64(exp(score))
    tree.mask[row, row // 64] |= np.uint64(1) << np.uint64(row % 64)
    tree.path[row, tree.depth[row]] = row


@jit
def build_tree(root_token, ids, logprobs, widths, depth_limit, budget, chain, tree, frontier):
    """Build the tree of at most `budget` nodes; (nodes, expected accepted tokens).

    ids, logprobs: [L, K], int32 and float32, a position's candidates sorted by (logit descending,
    id ascending); logprobs are logits less logsumexp over the whole vocabulary. widths: [L], how
    many candidates a position has; 0 where its logits held NaN. The tree goes at most
    min(L, depth_limit, MAX_DEPTH) deep and has fewer nodes where there are no more prefixes; in
    every empty case it is the root alone. With `chain`, each position has its first candidate only.
    Expected accepted tokens: the sum of exp(score) over the nodes, the bonus token not counted.
    """
    most = max(min(min(budget, tree.token.shape[0] - 1), MAX_NODES), 0)
    limit = _usable_depth(logprobs, widths, depth_limit, most, frontier)
    if chain:
        frontier.width[:] = 1
    _add_row(tree, 0, root_token, -1, np.float32(0.0))
    rows, count, size = 1, 0, 0
    if limit > 0 and most > 0:
        size = _open(frontier, 0, 0, logprobs[0, 0], -1, 1, 1, 0)
        count = 1
    while size > 0:
        best = _pop(frontier, size)
        size -= 1
        rank, origin = frontier.rank[best], np.int64(frontier.origin[best])
        parent = origin if rank == 1 else np.int64(tree.parent[origin])
        depth = np.int64(tree.depth[parent]) + 1
        _add_row(tree, rows, ids[depth - 1, rank - 1], parent, frontier.score[best])
        if rank == 1:
            tree.first_child[origin] = rows
        else:
            tree.next_sibling[origin] = rows
        if rows == most:
            rows += 1
            break
        if rank < frontier.width[depth - 1]:
            score = tree.score[parent] + logprobs[depth - 1, rank]
            if score > _NONE:
                size = _open(frontier, count, size, score, best, depth, rank + 1, rows)
                count += 1
        if depth < limit:
            score = tree.score[rows] + logprobs[depth, 0]
            if score > _NONE:
                size = _open(frontier, count, size, score, best, depth + 1, 1, rows)
                count += 1
        rows += 1
    tree.rows[0] = rows
    return rows - 1, tree.expected[rows - 1]


@jit
def child_with_token(tree, row, token):
    """The child of `row` that holds `token`, or -1. Siblings never share a token."""
    child = tree.first_child[row]
    while 0 <= child < tree.rows[0]:
        if tree.token[child] == token:
            return child
        child = tree.next_sibling[child]
    return np.int32(-1)


@jit
def walk(tree, decided):
    """The last accepted row, where `decided[row]` is the token the target chooses after a row.

    Reads `decided` along the path only. The path is `tree.path[row, : tree.depth[row] + 1]`, the
    accepted tokens are those of its rows but the root, and the bonus token is `decided[row]`.
    """
    row = np.int32(0)
    while True:
        child = child_with_token(tree, row, decided[row])
        if child < 0:
            return row
        row = child
