"""The draft tree in the rivals' two forms: a heap in Python, and tensor operations on the device.

Both give the tree of `cute_kernels.cpu.tree`: the `budget` prefixes of highest score.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch


def best_first(
    logprobs: Sequence[Sequence[float]], ids: Sequence[Sequence[int]], root: int, budget: int
) -> tuple[list[int], list[int], list[int]]:
    """Tokens, parents (-1 for the root) and depths of a tree, in Python.

    logprobs, ids: [positions][candidates], best first. Equal scores: see the order of ranks.
    """
    tokens, parents, depths = [root], [-1], [0]
    if budget < 1 or not logprobs:
        return tokens, parents, depths
    width, deepest = len(logprobs[0]), len(logprobs)
    heap = [(-logprobs[0][0], (1,), 0, 0.0)]  # -score, ranks, parent row, parent's score
    while heap and len(tokens) <= budget:
        negative, ranks, parent, base = heapq.heappop(heap)
        depth, rank, row = len(ranks), ranks[-1], len(tokens)
        tokens.append(ids[depth - 1][rank - 1])
        parents.append(parent)
        depths.append(depth)
        if rank < width:
            score = base + logprobs[depth - 1][rank]
            heapq.heappush(heap, (-score, (*ranks[:-1], rank + 1), parent, base))
        if depth < deepest:
            score = logprobs[depth][0] - negative
            heapq.heappush(heap, (-score, (*ranks, 1), row, -negative))
    return tokens, parents, depths


def ancestor_mask(parents: Sequence[int]) -> np.ndarray:
    """[rows, rows] uint8: 1 where a row sees another: its ancestors and itself."""
    mask = np.zeros((len(parents), len(parents)), np.uint8)
    for row, parent in enumerate(parents):
        if parent >= 0:
            mask[row] = mask[parent]
        mask[row, row] = 1
    return mask


def root_paths(parents: Sequence[int], width: int) -> np.ndarray:
    """[rows, width] int64: the rows from the root on, a row's own repeated behind its end."""
    lines: list[list[int]] = []
    for row, parent in enumerate(parents):
        lines.append([*(lines[parent] if parent >= 0 else ()), row])
    return np.array([line + line[-1:] * (width - len(line)) for line in lines], np.int64)


def accept(tokens: Sequence[int], parents: Sequence[int], decided: Sequence[int]) -> list[int]:
    """The path of rows that the target's choices follow, the root first."""
    child = {(parents[row], tokens[row]): row for row in range(1, len(tokens))}
    path = [0]
    while (row := child.get((path[-1], decided[path[-1]]))) is not None:
        path.append(row)
    return path


@cache
def candidates(depth: int, budget: int, chain: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Every rank tuple that can be in a tree of `budget` nodes, whatever the scores.

    A prefix stands behind all that it dominates: those no longer, with no larger rank anywhere. So
    a tuple with more than `budget` of them (itself included) is never taken. Returns ranks [C,
    depth] (0 behind the end), in lexicographic order, prefixes first, and for each the candidates
    of its prefixes of length 0 .. depth [C, depth + 1]: 0 stands for the root, i + 1 for candidate
    i, and its own number is repeated behind its end.
    """
    ranks: list[tuple[int, ...]] = []
    places: list[list[int]] = []

    def open_children(
        prefix: tuple[int, ...], line: list[int], product: int, dominated: int
    ) -> None:
        if len(prefix) == depth:
            return
        rank = 1
        while dominated + product * rank <= budget and (rank == 1 or not chain):
            ranks.append((*prefix, rank))
            own = [*line, len(ranks)]
            places.append(own)
            open_children((*prefix, rank), own, product * rank, dominated + product * rank)
            rank += 1

    open_children((), [0], 1, 0)
    table = np.zeros((len(ranks), depth), np.int64)
    lines = np.zeros((len(ranks), depth + 1), np.int64)
    for i, (tuple_, line) in enumerate(zip(ranks, places)):
        table[i, : len(tuple_)] = tuple_
        lines[i] = line + [line[-1]] * (depth + 1 - len(line))
    return table, lines


@dataclass(frozen=True)
class Planted:
    """A tree's static buffers, one row a node, the root first.

    tokens, depths, parents [rows] int64; mask [rows, rows] uint8: 1 where a row sees another; paths
    [rows, depth + 1] int64: the rows from the root on, a row's own repeated behind its end.
    """

    tokens: torch.Tensor
    depths: torch.Tensor
    mask: torch.Tensor
    parents: torch.Tensor
    paths: torch.Tensor


class DeviceTree:
    """The tree by tensor operations over a fixed table of candidates: no heap, nothing dynamic.

    depth, budget: nodes; width: candidates of a position. Fills `into`.
    """

    def __init__(self, depth: int, budget: int, width: int, chain: bool, into: Planted) -> None:
        table, lines = candidates(depth, budget, chain)
        if len(table) < budget or table.max(initial=0) > width:
            raise ValueError(
                f"{width} candidates at each of {depth} positions make no tree of {budget} nodes"
            )
        device = into.tokens.device
        self.into, self.budget, self.depth = into, budget, depth
        length = (table > 0).sum(1)
        last = table[np.arange(len(table)), length - 1]

        def put(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values).to(device)

        # Into [depth][1 + width], where column 0 holds zeros: what a shorter prefix adds.
        self.terms = put((np.arange(depth) * (width + 1) + table).T.copy())
        self.lines, self.length = put(lines), put(length)
        self.id_at = put((length - 1) * width + last - 1)
        self.row_of = torch.zeros(len(table) + 1, dtype=torch.int64, device=device)
        self.numbers = torch.arange(1, budget + 1, device=device)
        self.ones = torch.ones(budget + 1, depth + 1, dtype=torch.uint8, device=device)

    def __call__(self, logprobs: torch.Tensor, ids: torch.Tensor, root: torch.Tensor) -> None:
        """logprobs, ids [depth, width], best first; root [1]."""
        t = self.into
        terms = torch.nn.functional.pad(logprobs, (1, 0)).flatten()[self.terms]
        score = terms[0]
        for d in range(1, self.depth):  # added in order: no prefix scores above its parent
            score = score + terms[d]
        # Stable: of equal scores the first in the table's order, where parents stand first.
        taken = torch.sort(score, descending=True, stable=True).indices[: self.budget]
        self.row_of[taken + 1] = self.numbers
        paths, length = self.row_of[self.lines[taken]], self.length[taken]
        t.paths[1:] = paths
        t.tokens[:1] = root
        t.tokens[1:] = ids.flatten()[self.id_at[taken]]
        t.depths[1:] = length
        t.parents[1:] = paths.gather(1, length[:, None] - 1)[:, 0]
        t.mask.zero_()
        t.mask.scatter_(1, t.paths, self.ones)
