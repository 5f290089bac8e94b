"""Attention of a few tree rows over a long context: split over the keys, in Triton.

The strong form of a rival's verify attention: query heads that share a key head stand in one tile,
the context is read without any mask, the tree's own rows through an N x N mask, the length comes
from device memory so that one captured graph serves every length, and a second small kernel merges
the splits by their maxima and sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MASKED = -1.0e30  # finite: a split whose keys are all hidden weighs nothing and makes no NaN


@triton.jit
def _rows_of(table, keys, seen, PAGE: tl.constexpr):
    """Where keys lie: themselves, or through a page table of PAGE positions."""
    if PAGE == 0:
        return keys
    page = tl.load(table + keys // PAGE, mask=seen, other=0)
    return page * PAGE + keys % PAGE


@triton.jit
def _block(q, k, v, table, tree, keys, end, n, row, most, total, acc, scale, WINDOW: tl.constexpr,
           one, N: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, SCALAR: tl.constexpr,
           TREE: tl.constexpr):  # fmt: skip
    """One block of keys: new maximum, sum and output. SCALAR: a stride that the compiler does not
    know to be 1, so that it loads value by value."""
    d = tl.arange(0, D)
    if SCALAR:
        d = d * one
    inside = keys < end
    at = _rows_of(table, keys, inside, PAGE)
    tile = at[:, None] * D + d[None, :]
    kk = tl.load(k + tile, mask=inside[:, None], other=0.0)
    s = tl.dot(q, tl.trans(kk), input_precision="ieee") * scale
    visible = inside[None, :] & (row[:, None] < N)
    if TREE:
        t = keys - n
        own = visible & (t[None, :] >= 0)
        seen = tl.load(tree + row[:, None] * N + t[None, :], mask=own, other=0)
        visible = visible & (seen != 0)
    if WINDOW > 0:
        distance = n + row[:, None] - keys[None, :]
        visible = visible & (distance < WINDOW) & (-distance < WINDOW)
    new = tl.maximum(most, tl.max(tl.where(visible, s, MASKED_C), 1))
    p = tl.where(visible, tl.exp2(s - new[:, None]), 0.0)
    old = tl.exp2(most - new)
    vv = tl.load(v + tile, mask=inside[:, None], other=0.0)
    acc = acc * old[:, None] + tl.dot(p.to(vv.dtype), vv, input_precision="ieee")
    return new, total * old + tl.sum(p, 1), acc


MASKED_C = tl.constexpr(MASKED)


@triton.jit(do_not_specialize=["one", "splits"])
def _split(q, k, v, table, tree, length, part, stats, q_row, head_stride, scale, splits, one,
           N: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
           M: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
           PAGE: tl.constexpr, SCALAR: tl.constexpr):  # fmt: skip
    head, split = tl.program_id(0), tl.program_id(1)
    n = tl.load(length)
    total_keys = n + N
    first = 0
    if WINDOW > 0:
        first = tl.maximum(n - WINDOW + 1, 0)
    chunk = tl.cdiv(tl.cdiv(total_keys - first, splits), BLOCK) * BLOCK
    start = first + split * chunk
    end = tl.minimum(start + chunk, total_keys)
    m = tl.arange(0, M)
    row, d = m // GROUP, tl.arange(0, D)
    q_at = (row * q_row + (head * GROUP + m % GROUP) * D)[:, None] + d[None, :]
    qq = tl.load(q + q_at, mask=(row < N)[:, None], other=0.0)
    k += head * head_stride
    v += head * head_stride
    most = tl.full([M], MASKED_C, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    offsets = tl.arange(0, BLOCK)
    context_end = tl.minimum(end, n)
    for j in range(start, context_end, BLOCK):
        most, total, acc = _block(qq, k, v, table, tree, j + offsets, context_end, n, row, most,
                                  total, acc, scale, WINDOW, one, N, D, PAGE, SCALAR,
                                  False)  # fmt: skip
    for j in range(tl.maximum(start, n), end, BLOCK):
        most, total, acc = _block(qq, k, v, table, tree, j + offsets, end, n, row, most,
                                  total, acc, scale, WINDOW, one, N, D, PAGE, SCALAR,
                                  True)  # fmt: skip
    if start < end:
        at = head * splits + split
        tl.store(part + (at * M + m)[:, None] * D + d[None, :], acc)
        tl.store(stats + at * 2 * M + m, most)
        tl.store(stats + at * 2 * M + M + m, total)


@triton.jit(do_not_specialize=["splits"])
def _merge(part, stats, length, out, splits, N: tl.constexpr, GROUP: tl.constexpr,
           KV_HEADS: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
           WINDOW: tl.constexpr, S: tl.constexpr):  # fmt: skip
    row, query_head = tl.program_id(0), tl.program_id(1)
    head = query_head // GROUP
    m = row * GROUP + query_head % GROUP
    n = tl.load(length)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(n - WINDOW + 1, 0)
    span = n + N - first
    chunk = tl.cdiv(tl.cdiv(span, splits), BLOCK) * BLOCK
    s, d = tl.arange(0, S), tl.arange(0, D)
    used = s < tl.cdiv(span, chunk)
    at = head * splits + s
    most = tl.load(stats + at * 2 * M + m, mask=used, other=MASKED_C)
    total = tl.load(stats + at * 2 * M + M + m, mask=used, other=0.0)
    weight = tl.exp2(most - tl.max(most, 0))
    rows = tl.load(part + (at * M + m)[:, None] * D + d[None, :], mask=used[:, None], other=0.0)
    sums = tl.sum(rows * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out + (row * (KV_HEADS * GROUP) + query_head) * D + d, sums.to(out.dtype.element_ty))


class SplitKv:
    """Scratch and launch for one shape. Called inside captured graphs.

    rows: N. splits: programs per key head; 0: as many as fill `sms`. block: keys a tile.
    """

    def __init__(
        self, rows: int, heads: int, kv_heads: int, head_dim: int, device: torch.device,
        splits: int = 0, block: int = 64, window: int | None = None, page: int = 0, sms: int = 132,
        scalar: bool = False,
    ) -> None:  # fmt: skip
        self.rows, self.heads, self.kv_heads, self.d = rows, heads, kv_heads, head_dim
        self.group = heads // kv_heads
        self.m = max(16, triton.next_power_of_2(rows * self.group))
        self.splits = splits or max(1, sms // kv_heads)
        self.block, self.window, self.page, self.scalar = block, window or 0, page, scalar
        shape = (kv_heads, self.splits, self.m)
        self.part = torch.zeros(*shape, head_dim, device=device)
        self.stats = torch.zeros(kv_heads, self.splits, 2, self.m, device=device)
        self.no_table = torch.zeros(1, dtype=torch.int32, device=device)

    def __call__(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tree: torch.Tensor,
        length: torch.Tensor, table: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """[rows, heads * head_dim] of q [rows, heads, head_dim]; keys, values [kv heads, positions,
        head_dim]; tree [rows, rows] uint8; length [1] int64; table: int32, with pages."""
        out = torch.empty(self.rows, self.heads * self.d, dtype=q.dtype, device=q.device)
        table = self.no_table if table is None else table
        shape = dict(
            N=self.rows, GROUP=self.group, KV_HEADS=self.kv_heads, D=self.d, M=self.m,
            BLOCK=self.block, WINDOW=self.window,
        )  # fmt: skip
        if q.stride(1) != self.d or q.stride(2) != 1 or not keys[0].is_contiguous():
            raise ValueError("heads of a row lie side by side, positions of a key head one by one")
        scale = self.d**-0.5 * 1.4426950408889634
        _split[(self.kv_heads, self.splits)](
            q, keys, values, table, tree, length, self.part, self.stats, q.stride(0),
            keys.stride(0), scale, self.splits, 1, PAGE=self.page, SCALAR=self.scalar,
            num_warps=4 if self.m < 128 else 8,
            **shape,
        )  # fmt: skip
        _merge[(self.rows, self.heads)](
            self.part, self.stats, length, out, self.splits,
            S=max(16, triton.next_power_of_2(self.splits)), num_warps=4, **shape,
        )  # fmt: skip
        return out
