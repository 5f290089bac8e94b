"""A step's small decisions, in Triton, one kernel each: candidates, tree, walk.

What tensor operations do in dozens of launches (core.py, trees.py), for a graph that is to be
compared with a kernel. The same results: equal scores and equal tokens fall the same way.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from experiments.baselines.trees import Planted, candidates

PARTS = 16  # programs that share a row of logits


@triton.jit
def _some(logits, values, places, stats, columns, stride, WIDTH: tl.constexpr, K: tl.constexpr,
          PARTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """A part of a row: its WIDTH largest logits and their columns, its maximum and sum of exp."""
    row, part = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, BLOCK)
    at = part * BLOCK + c
    v = tl.load(logits + row * stride + at, mask=at < columns, other=float("-inf"))
    most = tl.max(v, 0)
    tl.store(stats + (row * PARTS + part) * 2, most)
    tl.store(stats + (row * PARTS + part) * 2 + 1, tl.sum(tl.exp(v - most), 0))
    to = (row * PARTS + part) * K
    for i in range(WIDTH):
        largest, place = tl.max(v, 0, return_indices=True)
        tl.store(values + to + i, largest)
        tl.store(places + to + i, part * BLOCK + place)
        v = tl.where(c == place, float("-inf"), v)


@triton.jit
def _best(values, places, stats, tokens, logprobs, ids, WIDTH: tl.constexpr, K: tl.constexpr,
          PARTS: tl.constexpr):  # fmt: skip
    """A row's WIDTH best of its parts', by logit and then by column, as log-probabilities."""
    row = tl.program_id(0)
    p, i = tl.arange(0, PARTS), tl.arange(0, PARTS * K)
    most = tl.load(stats + (row * PARTS + p) * 2)
    top = tl.max(most, 0)
    total = tl.sum(tl.load(stats + (row * PARTS + p) * 2 + 1) * tl.exp(most - top), 0)
    lse = top + tl.log(total)
    real = i % K < WIDTH
    v = tl.load(values + row * PARTS * K + i, mask=real, other=float("-inf"))
    at = tl.load(places + row * PARTS * K + i, mask=real, other=0)
    for k in range(WIDTH):
        largest, place = tl.max(v, 0, return_indices=True)
        column = tl.sum(tl.where(i == place, at, 0), 0)
        tl.store(logprobs + row * WIDTH + k, largest - lse)
        tl.store(ids + row * WIDTH + k, tl.load(tokens + column))
        v = tl.where(i == place, float("-inf"), v)


class Rank:
    """The best `width` candidates of each of `rows` rows of logits fp32 [rows, stride]."""

    def __init__(self, rows: int, columns: int, width: int, tokens: torch.Tensor) -> None:
        self.rows, self.columns, self.width, self.tokens = rows, columns, width, tokens
        self.k = triton.next_power_of_2(width)
        self.block = triton.next_power_of_2(-(-columns // PARTS))
        device = tokens.device
        self.values = torch.zeros(rows, PARTS, self.k, device=device)
        self.places = torch.zeros(rows, PARTS, self.k, dtype=torch.int32, device=device)
        self.stats = torch.zeros(rows, PARTS, 2, device=device)

    def __call__(self, logits: torch.Tensor, logprobs: torch.Tensor, ids: torch.Tensor) -> None:
        """logprobs fp32, ids int64 [rows, width]."""
        sizes: dict[str, Any] = dict(WIDTH=self.width, K=self.k, PARTS=PARTS)
        _some[(self.rows, PARTS)](
            logits, self.values, self.places, self.stats, self.columns, logits.stride(0),
            BLOCK=self.block, **sizes,
        )  # fmt: skip
        _best[(self.rows,)](
            self.values, self.places, self.stats, self.tokens, logprobs, ids, **sizes
        )


@triton.jit
def _plant(logprobs, ids, root, ranks, lines, lengths, scores, row_of, tokens, depths, mask,
           parents, paths, C, WIDTH: tl.constexpr, L: tl.constexpr, N: tl.constexpr,
           CP: tl.constexpr, CHUNK: tl.constexpr, CELLS: tl.constexpr):  # fmt: skip
    i = tl.arange(0, CP)
    real = i < C
    score = tl.where(real, 0.0, float("-inf"))
    last = tl.zeros([CP], tl.int32)
    length = tl.load(lengths + i, mask=real, other=0)
    for d in tl.static_range(L):  # added in order: no prefix scores above its parent
        rank = tl.load(ranks + d * C + i, mask=real, other=0)
        score += tl.load(logprobs + d * WIDTH + rank - 1, mask=rank > 0, other=0.0)
        last = tl.where(rank > 0, rank, last)
    tl.store(scores + i, score)
    cells = tl.arange(0, CELLS)
    tl.store(mask + cells, tl.zeros([CELLS], tl.uint8), mask=cells < N * N)
    tl.debug_barrier()
    before = tl.zeros([CP], tl.int32)
    for j0 in range(0, CP, CHUNK):
        j = j0 + tl.arange(0, CHUNK)
        other = tl.load(scores + j)
        ahead = (other[None, :] > score[:, None]) | (
            (other[None, :] == score[:, None]) & (j[None, :] < i[:, None])
        )
        before += tl.sum(ahead.to(tl.int32), 1)
    taken = real & (before < N - 1)
    row = before + 1
    tl.store(row_of + i + 1, tl.where(taken, row, 0), mask=real)
    tl.debug_barrier()
    token = tl.load(ids + (length - 1) * WIDTH + last - 1, mask=taken, other=0)
    tl.store(tokens + row, token, mask=taken)
    tl.store(depths + row, length.to(tl.int64), mask=taken)
    for d in tl.static_range(L + 1):
        line = tl.load(lines + i * (L + 1) + d, mask=taken, other=0)
        at = tl.load(row_of + line, mask=taken & (line > 0), other=0)
        tl.store(paths + row * (L + 1) + d, at.to(tl.int64), mask=taken)
        tl.store(mask + row * N + at, tl.full([CP], 1, tl.uint8), mask=taken)
        tl.store(parents + row, at.to(tl.int64), mask=taken & (d == length - 1))
        tl.store(paths + d, tl.zeros([], tl.int64))
    tl.store(tokens, tl.load(root))
    tl.store(depths, tl.zeros([], tl.int64))
    tl.store(parents, tl.zeros([], tl.int64))
    tl.store(mask, tl.full([], 1, tl.uint8))


class Plant:
    """trees.DeviceTree in one kernel."""

    def __init__(self, depth: int, budget: int, width: int, chain: bool, into: Planted) -> None:
        table, lines = candidates(depth, budget, chain)
        device = into.tokens.device

        def put(values: Any) -> torch.Tensor:
            return torch.from_numpy(values).to(device, torch.int32).contiguous()

        self.into, self.depth, self.width, self.count = into, depth, width, len(table)
        self.ranks, self.lines = put(table.T.copy()), put(lines)
        self.lengths = put((table > 0).sum(1))
        self.padded = triton.next_power_of_2(len(table))
        self.scores = torch.zeros(self.padded, device=device)
        self.row_of = torch.zeros(len(table) + 1, dtype=torch.int32, device=device)

    def __call__(self, logprobs: torch.Tensor, ids: torch.Tensor, root: torch.Tensor) -> None:
        t = self.into
        n = len(t.tokens)
        _plant[(1,)](
            logprobs, ids, root, self.ranks, self.lines, self.lengths, self.scores, self.row_of,
            t.tokens, t.depths, t.mask, t.parents, t.paths, self.count, WIDTH=self.width,
            L=self.depth, N=n, CP=self.padded, CHUNK=min(16, self.padded),
            CELLS=triton.next_power_of_2(n * n), num_warps=8,
        )  # fmt: skip


@triton.jit
def _accept(tokens, decided, depths, mask, parents, paths, count, anchor, path, out,
            N: tl.constexpr, NP: tl.constexpr, MOST: tl.constexpr, P: tl.constexpr,
            FORCED: tl.constexpr):  # fmt: skip
    i, j = tl.arange(0, NP), tl.arange(0, NP)
    k = tl.arange(0, P)
    depth = tl.load(depths + i, mask=i < N, other=-1)
    said = tl.load(decided + tl.load(parents + j, mask=j < N, other=0), mask=j < N, other=0)
    match = (tl.load(tokens + j, mask=j < N, other=0) == said) | (j == 0)
    cell = (i < N)[:, None] & (j < N)[None, :]
    seen = tl.load(mask + i[:, None] * N + j[None, :], mask=cell, other=0)
    wrong = tl.sum(((seen != 0) & (match[None, :] == 0)).to(tl.int32), 1)
    reached = tl.where((wrong == 0) & (i < N), depth, -1)
    if FORCED >= 0:
        reached = tl.where((depth <= FORCED) & (i < N), depth, -1)
    a = tl.max(reached, 0)
    best = tl.min(tl.where(reached == a, i, NP), 0)
    bonus = tl.load(decided + best)
    here = tl.load(paths + best * MOST + k, mask=k < MOST, other=0)
    row = tl.where(k <= a, here, k.to(tl.int64))
    tl.store(path + k, row, mask=k < MOST)
    after = tl.load(paths + best * MOST + k + 1, mask=(k < a) & (k + 1 < MOST), other=0)
    token = tl.where(k < a, tl.load(tokens + after), bonus)
    tl.store(out + 1 + k, token, mask=k < MOST)
    tl.store(out, a + 1)
    tl.store(count, a + 1)
    tl.store(anchor, bonus)


def accept(
    t: Planted, decided: torch.Tensor, count: torch.Tensor, anchor: torch.Tensor,
    path: torch.Tensor, out: torch.Tensor, forced: int | None,
) -> None:  # fmt: skip
    """core.Core.accept in one kernel."""
    n, most = t.paths.shape
    _accept[(1,)](
        t.tokens, decided, t.depths, t.mask, t.parents, t.paths, count, anchor, path, out,
        N=n, NP=triton.next_power_of_2(n), MOST=most, P=triton.next_power_of_2(most),
        FORCED=-1 if forced is None else forced,
    )  # fmt: skip
