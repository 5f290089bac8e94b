"""Weights and activations in the order in which the kernel wants them.

A warp's B fragment of two k16 steps is one 16-byte vector: lane (g, t) holds, of output column g,
k = 4 t .. 4 t + 3 of the first step and of the second. The same permutation of K is applied to
the activations, so the products are those of the plain layout. Arrays may be numpy arrays or torch
tensors (only reshape, transpose and indexing are used); torch is never imported here.
"""

import math

import numpy as np

from cute_kernels.gpu.config import CHUNK, LAYER_KINDS, TILE, Config
from cute_kernels.gpu.tiles import make_plan, tile_stride


def _axes(x, order):
    return x.permute(order) if hasattr(x, "permute") else x.transpose(order)


def pack_matrix(w, c: Config, name: str):
    """[N, K] 16-bit -> [tiles, split, passes, unit] with every unit in fragment order."""
    g = c.gemm(name)
    chunks = g.slab // CHUNK // c.k_warps
    # tile, column, split, pass, warp, chunk, k16 step, t, element
    v = w.reshape(g.tiles, TILE, g.split, g.passes, c.k_warps, chunks, 2, 4, 4)
    v = _axes(v, (0, 2, 3, 5, 4, 1, 7, 6, 8))
    return v.reshape(g.tiles, g.split, g.passes, TILE * g.slab)


def interleave(w):
    """[2 n, K] rows a0..., b0... -> a0, b0, a1, b1, ...: gate and up, or the two halves of a
    rotary head, meet in one thread's column pair."""
    n = w.shape[0] // 2
    return _axes(w.reshape(2, n, w.shape[1]), (1, 0, 2)).reshape(2 * n, w.shape[1])


def granule(c: Config) -> int:
    """Bytes of the pieces that streams are assembled from: divides every unit."""
    return math.gcd(*(g.unit_bytes for g in c.gemms))


def stream_index(c: Config, layers: int) -> tuple[np.ndarray, np.ndarray]:
    """How to assemble the streams from the packed matrices laid end to end in phase order.

    Returns (index, offsets): `index` lists granules in stream order, every one exactly once;
    offsets[cta, phase] is the byte at which that CTA's units of the phase begin, int64.
    """
    size, plan = granule(c), make_plan(c, layers)
    kinds = [*LAYER_KINDS] * layers + ["lm"]
    pieces: list[list[np.ndarray]] = [[] for _ in range(c.ctas)]
    lengths = np.zeros((c.ctas, len(kinds)), np.int64)
    base = 0
    for p, name in enumerate(kinds):
        g = c.gemm(name)
        per_unit, stride = g.unit_bytes // size, tile_stride(c, name)
        for cta in range(c.ctas):
            first, n = plan[cta, p, :2]
            tiles = first + np.arange(n) * stride
            part = cta % c.team if g.split > 1 else 0
            unit = (tiles[None, :] * g.split + part) * g.passes + np.arange(g.passes)[:, None]
            at = base + unit.reshape(-1, 1) * per_unit + np.arange(per_unit)
            pieces[cta].append(at.ravel())
            lengths[cta, p] = at.size * size
        base += g.tiles * g.split * g.passes * per_unit
    index = np.concatenate([np.concatenate(p) for p in pieces])
    flat = lengths.ravel()
    return index, (np.cumsum(flat) - flat).reshape(lengths.shape)


def to_fragments(x, c: Config):
    """[tile_rows, K] -> the order in which lanes load A fragments."""
    if c.half:
        v = x[:8].reshape(8, -1, 2, 4, 2, 2)  # g, chunk, step, t, pair, element
        return _axes(v, (1, 0, 3, 2, 4, 5)).reshape(-1)
    v = x.reshape(c.m_tiles, 2, 8, -1, 2, 4, 2, 2)  # m tile, half, g, chunk, step, t, pair, element
    return _axes(v, (3, 4, 0, 2, 5, 6, 1, 7)).reshape(-1)


def from_fragments(a, c: Config):
    """The inverse of `to_fragments`: [rows, K]."""
    if c.half:
        v = a.reshape(-1, 8, 4, 2, 2, 2)
        return _axes(v, (1, 0, 3, 2, 4, 5)).reshape(8, -1)
    v = a.reshape(-1, 2, c.m_tiles, 8, 4, 2, 2, 2)
    return _axes(v, (2, 6, 3, 0, 1, 4, 5, 7)).reshape(c.tile_rows, -1)


# -- attention ---------------------------------------------------------------------------------
def key_order() -> np.ndarray:
    """order[i]: the head dimension at place i of a K row (head_dim 64, rotary pairs d, d + 32).

    Q's columns are 0, 32, 1, 33, ...; within 16 of them, pair p of lane t's four (4 t .. 4 t + 3)
    goes to place 8 p + 2 t, where ldmatrix hands it to the lane that holds the same part of Q.
    """
    column = np.arange(64)
    dim = (column >> 1) + 32 * (column & 1)
    t, e = (column & 15) >> 2, column & 3
    place = (column & ~15) + (e >> 1) * 8 + 2 * t + (e & 1)
    out = np.empty(64, np.int64)
    out[place] = dim
    return out


def swizzle_rows(x):
    """[..., rows, 64]: the 16-byte piece i of row r goes to i ^ (r & 7)."""
    rows = np.arange(x.shape[-2]) % 8
    pieces = np.arange(8)[None] ^ rows[:, None]  # an involution
    index = (pieces[:, :, None] * 8 + np.arange(8)).reshape(len(rows), 64)
    return x[..., np.arange(len(rows))[:, None], index]


def rotary_rows(heads: int) -> np.ndarray:
    """Row order of a projection to `heads` rotary heads of 64: 0, 32, 1, 33, ... in each."""
    one = np.arange(64).reshape(2, 32).T.reshape(-1)
    return (np.arange(heads)[:, None] * 64 + one).reshape(-1)


def tail_start(position: int) -> int:
    """c(p): keys below it are summed in blocks, from it on one by one."""
    return 64 * (max(position - 15, 0) // 64)


def row_table(parents: list[int], committed: int) -> np.ndarray:
    """[16, 4] int32: position, c(p), and the row's path (its ancestors and itself, 4 bits each,
    root first) in two words. parents[i] < i; -1 for the root."""
    out = np.zeros((16, 4), np.uint32)
    for i, parent in enumerate(parents):
        path = [i]
        while parent >= 0:
            path.append(parent)
            parent = parents[parent]
        path.reverse()
        position = committed + len(path) - 1
        out[i, :2] = position, tail_start(position)
        for d, row in enumerate(path):
            out[i, 2 + d // 8] |= row << (d % 8 * 4)
    return out.view(np.int32)
