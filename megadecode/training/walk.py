"""The engine's walk over a text that is already known: how many tokens each step would commit.

Speculation never changes a text. So once the target has written one, what a step commits depends on
the drafter's candidates at the step's anchor alone, and these on nothing but the anchor's position:
all steps that any policy could take are known from one drafter pass per position. Trees are built
by the engine's own code.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cute_kernels.cpu.tree import (
    MAX_NODES,
    Frontier,
    Tree,
    build_tree,
    child_with_token,
    make_frontier,
    make_tree,
)
from host.jit import jit

CHAIN = "chain"
_BATCH = 256


@dataclass(frozen=True)
class Policy:
    """A way to speculate: chains of all drafted positions, or trees of `budget` nodes."""

    name: str
    budget: int
    chain: bool = False


def policies(rows: Sequence[int] = (4, 8, 16, 32, 64, 128), chain: bool = True) -> list[Policy]:
    """The chain, and trees of N verify rows each (N - 1 nodes, the root not counted)."""
    found = [Policy(CHAIN, MAX_NODES, chain=True)] if chain else []
    return found + [Policy(f"N={n}", n - 1) for n in rows]


@jit
def _true_rows(
    ids: Any, logprobs: Any, widths: Any, truth: Any, depth: Any, budget: int, chain: bool,
    tree: Tree, frontier: Frontier, out: Any,
) -> None:  # fmt: skip
    for a in range(ids.shape[0]):
        out[a, :] = 0
        build_tree(0, ids[a], logprobs[a], widths[a], depth[a], budget, chain, tree, frontier)
        row = 0
        for d in range(min(truth.shape[1], depth[a])):
            row = child_with_token(tree, row, truth[a, d])
            if row < 0:
                break
            out[a, d] = row


def true_rows(
    ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    widths: NDArray[np.int32],
    truth: NDArray[np.int32],
    depth: NDArray[np.int32],
    budget: int,
    chain: bool = False,
) -> NDArray[np.int32]:
    """[anchors, L]: where the text stands in each anchor's tree of `budget` nodes.

    ids, logprobs [anchors, L, K] and widths [anchors, L]: candidates as `build_tree` takes them.
    truth [anchors, L]: the tokens that follow each anchor, -1 behind the text's end. depth
    [anchors]: the deepest node allowed. Entry d is the tree row of the text's token d + 1, which
    is its rank in the order in which nodes are taken: the row is part of every tree of at least
    that many nodes. 0 where the text has left the tree.
    """
    out = np.zeros(truth.shape, np.int32)

    def work(first: int) -> None:
        part = slice(first, first + _BATCH)
        _true_rows(
            ids[part], logprobs[part], widths[part], truth[part], depth[part], budget, chain,
            make_tree(budget), make_frontier(budget), out[part],
        )  # fmt: skip

    starts = range(0, len(ids), _BATCH)
    with ThreadPoolExecutor(min(len(starts) or 1, os.cpu_count() or 1)) as pool:
        list(pool.map(work, starts))
    return out


def accepted(rows: NDArray[np.int32], budget: int) -> NDArray[np.int64]:
    """[anchors]: drafted tokens that a tree of `budget` nodes has right, from `true_rows`."""
    inside = (rows > 0) & (rows <= budget)
    return np.asarray(np.cumprod(inside, axis=1).sum(axis=1))


def walk(accepted_at: NDArray[np.int64]) -> list[int]:
    """Tokens that each verify step commits over one text.

    `accepted_at[k]` is for the anchor at the text's token k; the text has one token more than that:
    the first one comes of the prompt, before any step.
    """
    commits, at, last = [], 0, len(accepted_at)
    while at < last:
        commits.append(min(int(accepted_at[at]) + 1, last - at))
        at += commits[-1]
    return commits
