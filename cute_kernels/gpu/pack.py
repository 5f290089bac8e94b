"""Weights and activations in the order in which the kernel wants them.

A warp's B fragment of two k16 steps is one 16-byte vector: lane (g, t) holds, of output column g,
k = 4 t .. 4 t + 3 of the first step and of the second. Activations lie in the same order, a row in
place of a column: [chunk of 32 k][block of 8 rows][lane][16 bytes], where lane (g, t) of a block
holds row 8 block + g. So the products are those of the plain layout, a token's vectors in the
packed head are its embedding as activations, and the A registers of step s are word 2 s of blocks 0
and 1, then word 2 s + 1 of both. Decode has 2 blocks, a prompt chunk 32.

Arrays may be numpy arrays or torch tensors (only reshape, transpose and indexing are used); torch
is never imported here.
"""

import math

import numpy as np

from cute_kernels.gpu.config import CHUNK, TILE, Config, DraftShape
from cute_kernels.gpu.tiles import assign, draft_phases, make_plan, target_phases, tile_stride


def _axes(x, order):
    return x.permute(order) if hasattr(x, "permute") else x.transpose(order)


def pad_rows(w, rows: int):
    """[n, K] -> [rows, K], zeros below: a vocabulary that is no multiple of a tile."""
    if w.shape[0] == rows:
        return w
    shape = (rows, w.shape[1])
    out = w.new_zeros(shape) if hasattr(w, "new_zeros") else np.zeros(shape, w.dtype)
    out[: w.shape[0]] = w
    return out


def pack_matrix(w, c: Config, name: str):
    """[N, K] 16-bit -> [tiles, split, unit] with every unit in fragment order.

    N is padded with zeros to a multiple of 8: a vocabulary may be odd."""
    g = c.gemm(name)
    chunks, tiles = g.slab // CHUNK // c.warps, -(-w.shape[0] // TILE)
    # tile, column, split, warp, chunk, k16 step, t, element
    v = pad_rows(w, tiles * TILE).reshape(tiles, TILE, g.split, c.warps, chunks, 2, 4, 4)
    v = _axes(v, (0, 2, 4, 3, 1, 6, 5, 7))
    return v.reshape(tiles, g.split, TILE * g.slab)


def interleave(w):
    """[2 n, K] rows a0..., b0... -> a0, b0, a1, b1, ...: gate and up, or the two halves of a
    rotary head, meet in one thread's column pair."""
    n = w.shape[0] // 2
    return _axes(w.reshape(2, n, w.shape[1]), (1, 0, 2)).reshape(2 * n, w.shape[1])


def granule(c: Config) -> int:
    """Bytes of the pieces that streams are assembled from: divides every unit."""
    return math.gcd(*(g.unit_bytes for g in (*c.gemms, *c.draft_gemms)))


def stream_index(c: Config, layers: int) -> tuple[np.ndarray, np.ndarray]:
    """How to assemble the streams from the packed matrices laid end to end in phase order.

    Returns (index, offsets): `index` lists granules in stream order, every one exactly once;
    offsets[cta, phase] is the byte at which that CTA's units of the phase begin, int64.
    """
    return _index(c, target_phases(c, layers))


def draft_stream_index(c: Config, draft: DraftShape) -> tuple[np.ndarray, np.ndarray]:
    """The same of the drafter's own streams: its phases, without the head where the target's
    serves."""
    phases = draft_phases(c, draft)
    return _index(c, phases if draft.columns else phases[:-1])


def _index(c: Config, phases: list[tuple[str, int]]) -> tuple[np.ndarray, np.ndarray]:
    size, plan = granule(c), assign(c, phases)
    pieces: list[list[np.ndarray]] = [[] for _ in range(c.ctas)]
    lengths = np.zeros((c.ctas, len(phases)), np.int64)
    base = 0
    for p, (name, count) in enumerate(phases):
        g = c.gemm(name)
        per_unit, stride = g.unit_bytes // size, tile_stride(c, name)
        for cta in range(c.ctas):
            first, n = plan[cta, p, :2]
            tiles = first + np.arange(n) * stride
            part = cta % c.team if g.split > 1 else 0
            at = base + (tiles[:, None] * g.split + part) * per_unit + np.arange(per_unit)
            pieces[cta].append(at.ravel())
            lengths[cta, p] = at.size * size
        base += count * g.split * per_unit
    index = np.concatenate([np.concatenate(p) for p in pieces])
    flat = lengths.ravel()
    return index, (np.cumsum(flat) - flat).reshape(lengths.shape)


def embed_table(c: Config, layers: int | None = None) -> np.ndarray:
    """int64 [tiles of the vocabulary]: byte offset of a tile's unit. With `layers`, in the stream
    of that many layers (a tied head); without, in an embedding that is packed on its own."""
    g = c.gemm("lm")
    if layers is None:
        return np.arange(g.tiles, dtype=np.int64) * g.unit_bytes
    _, offsets = stream_index(c, layers)
    plan, out = make_plan(c, layers), np.empty(g.tiles, np.int64)
    for cta in range(c.ctas):
        first, n = plan[cta, -1, :2]
        out[first : first + n] = offsets[cta, -1] + np.arange(n) * g.unit_bytes
    return out


def norm_row(g):
    """[hidden] weights of the final norm as one row of activations: [chunk, t, step, 4]."""
    return _axes(g.reshape(-1, 2, 4, 4), (0, 2, 1, 3)).reshape(-1)


def to_fragments(x, blocks: int = 2):
    """[8 blocks, K] -> activations in the order described above, flat."""
    v = x.reshape(blocks, 8, -1, 2, 4, 4)  # block, g, chunk, step, t, element
    return _axes(v, (2, 0, 1, 4, 3, 5)).reshape(-1)


def from_fragments(a, blocks: int = 2):
    """The inverse of `to_fragments`: [8 blocks, K]."""
    v = a.reshape(-1, blocks, 8, 4, 2, 4)
    return _axes(v, (1, 2, 0, 4, 3, 5)).reshape(8 * blocks, -1)
