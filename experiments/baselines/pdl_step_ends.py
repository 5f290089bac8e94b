"""What a whole speculative step needs around the graph of phases, in Triton, one kernel each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cute_kernels.gpu.board import Desc

_ROWS, _POSITION = tl.constexpr(int(Desc.ROWS)), tl.constexpr(int(Desc.POSITION))
_COMMITTED, _AT = tl.constexpr(int(Desc.COMMITTED)), tl.constexpr(int(Desc.ROW_POSITION))
_PATH = tl.constexpr(int(Desc.PATH))


@triton.jit
def _describe(board, length, depths, paths, N: tl.constexpr, MOST: tl.constexpr):
    """The descriptor of a tree: its rows' positions and paths (four bits a depth)."""
    row = tl.arange(0, 16)
    ok = row < N
    n = tl.load(length).to(tl.int32)
    tl.store(board + _ROWS, N)
    tl.store(board + _POSITION, n)
    tl.store(board + _COMMITTED, n)
    depth = tl.load(depths + row, mask=ok, other=0).to(tl.int32)
    tl.store(board + _AT + row, n + depth, mask=ok)
    low, high = tl.zeros([16], tl.int32), tl.zeros([16], tl.int32)
    for d in tl.static_range(MOST):
        at = tl.load(paths + row * MOST + d, mask=ok & (d <= depth), other=0).to(tl.int32)
        if d < 8:
            low |= at << (4 * d)
        else:
            high |= at << (4 * d - 32)
    tl.store(board + _PATH + 2 * row, low, mask=ok)
    tl.store(board + _PATH + 2 * row + 1, high, mask=ok)


@triton.jit
def _features(act, taps, path, fresh, layer_stride, T: tl.constexpr, HIDDEN: tl.constexpr,
              PADDED: tl.constexpr):  # fmt: skip
    """Row path[k] of a tap's residual stream, out of the phases' order, as fresh row k."""
    k, t = tl.program_id(0), tl.program_id(1)
    h = tl.arange(0, PADDED)
    ok = h < HIDDEN
    row = tl.load(path + k).to(tl.int32)
    layer = tl.load(taps + t)
    chunk, step, lane, e = h // 32, h % 32 // 16, h % 16 // 4, h % 4
    at = ((((chunk * 2 + row // 8) * 8 + row % 8) * 4 + lane) * 2 + step) * 4 + e
    v = tl.load(act + layer * layer_stride + at, mask=ok)
    tl.store(fresh + k * (T * HIDDEN) + t * HIDDEN + h, v, mask=ok)


@triton.jit
def _move(pool, pages, length, path, count, L: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
          MOST: tl.constexpr, P: tl.constexpr):  # fmt: skip
    """Keys or values of one head: row path[k] of the step to place k. Pages as in kv_layout.py:
    the 16-byte piece i of a row lies at i ^ (row & 7)."""
    layer, head, half = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    k, d = tl.arange(0, P), tl.arange(0, D)
    n = tl.load(length)
    row = tl.load(path + k, mask=k < MOST, other=0)
    moves = (k < MOST) & (k < tl.load(count)) & (row != k)

    here, there = n + row, n + k
    for_all = ((layer * KV + head) * 2 + half) * (64 * D)
    page_bytes = L * KV * 2 * 64 * D
    from_page = tl.load(pages + here // 64, mask=moves, other=0).to(tl.int64)
    to_page = tl.load(pages + there // 64, mask=moves, other=0).to(tl.int64)
    source = from_page * page_bytes + for_all + here % 64 * D
    target = to_page * page_bytes + for_all + there % 64 * D
    taken = (d[None, :] // 8 ^ (here % 8)[:, None]) * 8 + d[None, :] % 8
    put = (d[None, :] // 8 ^ (there % 8)[:, None]) * 8 + d[None, :] % 8
    v = tl.load(pool + source[:, None] + taken, mask=moves[:, None])
    tl.debug_barrier()  # everything is read before anything is written
    tl.store(pool + target[:, None] + put, v, mask=moves[:, None])


@triton.jit
def _embed_block(anchor, mask_id, length, embed, scale, board, x, residual, HIDDEN: tl.constexpr,
                 PADDED: tl.constexpr):  # fmt: skip
    """A row of a drafter's block, as pdl_ends._embed; the first notes where the block begins."""
    row = tl.program_id(0)
    h = tl.arange(0, PADDED)
    ok = h < HIDDEN
    token = tl.zeros([], tl.int64) + mask_id
    if row == 0:
        token = tl.load(anchor)
        n = tl.load(length).to(tl.int32)
        tl.store(board + _POSITION, n)
        tl.store(board + _COMMITTED, n)
    v = (tl.load(embed + token * HIDDEN + h, mask=ok).to(tl.float32) * scale).to(tl.bfloat16)
    chunk, step, t, e = h // 32, h % 32 // 16, h % 16 // 4, h % 4
    at = ((((chunk * 2 + row // 8) * 8 + row % 8) * 4 + t) * 2 + step) * 4 + e
    tl.store(x + at, v, mask=ok)
    tl.store(residual + (h // 8 * 16 + row) * 8 + h % 8, v.to(tl.float32), mask=ok)


@triton.jit
def _put_context(joint, pool, pages, norms, rope, place, count, length, eps, row_stride,
                 LAYERS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Key (normed, rotated, in the pages' order) and value of one new position, layer and head."""
    i, layer, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    c = tl.load(count)
    if i < c:
        p = tl.load(length) - c + i
        h = tl.arange(0, D // 2)
        at = joint + i * row_stride + (layer * 2 * KV + head) * D
        lo, hi = tl.load(at + h).to(tl.float32), tl.load(at + D // 2 + h).to(tl.float32)
        factor = 1.0 / tl.sqrt((tl.sum(lo * lo, 0) + tl.sum(hi * hi, 0)) / D + eps)
        w = norms + ((layer + 1) * 2 + 1) * D
        lo = lo * factor * tl.load(w + h)
        hi = hi * factor * tl.load(w + D // 2 + h)
        cos, sin = (
            tl.load(rope + (p * (D // 2) + h) * 2),
            tl.load(rope + (p * (D // 2) + h) * 2 + 1),
        )
        page = tl.load(pages + p // 64).to(tl.int64)
        row = p % 64
        to = pool + (((page * (LAYERS + 1) + layer + 1) * KV + head) * 2) * (64 * D) + row * D
        for half in tl.static_range(2):
            turned = lo * cos - hi * sin if half == 0 else hi * cos + lo * sin
            e = tl.load(place + half * (D // 2) + h)
            tl.store(to + (e // 8 ^ (row % 8)) * 8 + e % 8, turned.to(tl.bfloat16))
        d = tl.arange(0, D)
        v = tl.load(at + KV * D + d)
        tl.store(to + 64 * D + (d // 8 ^ (row % 8)) * 8 + d % 8, v)


def embed_block(
    anchor: torch.Tensor, mask_id: int, length: torch.Tensor, embed: torch.Tensor, rows: int,
    scale: float, board: torch.Tensor, x: torch.Tensor, residual: torch.Tensor,
) -> None:  # fmt: skip
    """A block: the anchor [1], then MASK. board: its position goes there."""
    hidden = embed.shape[1]
    _embed_block[(rows,)](
        anchor, mask_id, length, embed, scale, board, x, residual, HIDDEN=hidden,
        PADDED=triton.next_power_of_2(hidden),
    )  # fmt: skip


def put_context(
    joint: torch.Tensor, pool: torch.Tensor, pages: torch.Tensor, norms: torch.Tensor,
    rope: torch.Tensor, place: torch.Tensor, count: torch.Tensor, length: torch.Tensor, eps: float,
) -> None:  # fmt: skip
    """joint bf16 [rows, layers * 2 * kv heads * head_dim]: keys and values of the `count` positions
    below `length`. pool, norms: with an empty layer in front. place [head_dim]: of kv_layout."""
    _, layers, kv_heads, _, _, d = pool.shape
    _put_context[(len(joint), layers - 1, kv_heads)](
        joint, pool, pages, norms, rope, place, count, length, eps, joint.stride(0),
        LAYERS=layers - 1, KV=kv_heads, D=d, num_warps=1,
    )  # fmt: skip


def describe(
    board: torch.Tensor, length: torch.Tensor, depths: torch.Tensor, paths: torch.Tensor
) -> None:
    """board int32; length [1], depths [N], paths [N, most] int64; N at most 16."""
    _describe[(1,)](board, length, depths, paths, N=len(depths), MOST=paths.shape[1])


def gather_features(
    act: torch.Tensor, first: int, stride: int, taps: torch.Tensor, path: torch.Tensor,
    fresh: torch.Tensor,
) -> None:  # fmt: skip
    """act: bf16, a layer's x at `first` + layer * `stride` elements; taps int32; path [most];
    fresh [most, taps * hidden]."""
    hidden = fresh.shape[1] // len(taps)
    _features[(len(path), len(taps))](
        act[first:], taps, path, fresh, stride, T=len(taps), HIDDEN=hidden,
        PADDED=triton.next_power_of_2(hidden),
    )  # fmt: skip


def move_rows(
    pool: torch.Tensor, pages: torch.Tensor, length: torch.Tensor, path: torch.Tensor,
    count: torch.Tensor,
) -> None:  # fmt: skip
    """pool [pages, layers, kv heads, 2, 64, head_dim]."""
    _, layers, kv_heads, _, _, d = pool.shape
    _move[(layers, kv_heads, 2)](
        pool, pages, length, path, count, L=layers, KV=kv_heads, D=d, MOST=len(path),
        P=triton.next_power_of_2(len(path)),
    )  # fmt: skip
