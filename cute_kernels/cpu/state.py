"""What the CPU device's phases read and write, as tuples of arrays that numba passes by reference.

Sizes: L layers, P pages, R row capacity of a step, H hidden, F ffn, V vocabulary rounded up to 32,
G = query heads per key/value head, D head dimension, S slots.
A *tile* is 16 output columns: a packed matrix is `[N/16, K, 16]`, so that one vector load gives 16
outputs of one k and a tile is one contiguous stream.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from host.jit import jit

PAGE = 64
"""KV positions in a page."""

MAX_DEPTH = 15
"""Depth of the deepest row of a draft tree, the root's being 0."""


class Dims(NamedTuple):
    """Sizes as plain integers."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int


class Weights(NamedTuple):
    """Packed weights, float32 or bfloat16 as uint16, one copy; norms and biases float32.

    `qkv` holds the query heads, then the key heads, then the value heads, each head D/16 tiles. In
    query and key heads tile 2i holds dimensions 16i..16i+15 and tile 2i+1 those D/2 further on, so
    that a pair of tiles has 16 rotation pairs; in value heads tiles are in order.
    `gate_up` alternates: tile 2i is the gate of outputs 16i..16i+15, tile 2i+1 their up projection.
    `embed` is `head` itself when the model ties them.
    """

    embed: np.ndarray  # [V/16, H, 16]
    qkv: np.ndarray  # [L, (heads + 2 * kv_heads) * D / 16, H, 16]
    out: np.ndarray  # [L, H/16, heads * D, 16]
    gate_up: np.ndarray  # [L, 2 * F/16, H, 16]
    down: np.ndarray  # [L, H/16, F, 16]
    head: np.ndarray  # [V/16, H, 16]
    attn_norm: np.ndarray  # [L, H] float32
    ffn_norm: np.ndarray  # [L, H] float32
    final_norm: np.ndarray  # [H] float32
    rope: np.ndarray  # [positions, 2, D/2] float32: cosines, then sines
    eps: np.ndarray  # [1] float32
    q_norm: np.ndarray  # [L, D] float32, RMSNorm of each query head; [L, 0] where there is none
    k_norm: np.ndarray  # [L, D] float32, the same of each key head
    qkv_bias: np.ndarray  # [L, (heads + 2 * kv_heads) * D] float32, outputs in the order of `qkv`;
    #                       [L, 0] where there is none


class Kv(NamedTuple):
    """Paged keys and values. Keys are packed like weights (16 positions are a tile, K = D)."""

    k: np.ndarray  # [L, P, kv_heads, PAGE/16, D, 16] float32
    v: np.ndarray  # [L, P, kv_heads, PAGE, D] float32


class Batch(NamedTuple):
    """The rows of one step, written by the scheduler before the first phase.

    A segment is a run of positions of one sequence (a prompt's chunk, one decode row), where all
    depths are 0, or a draft tree. A tree's first row is its root, at the first position that is not
    committed; a row's `position` is the root's plus its depth. Siblings share a position, so keys
    and values are stored elsewhere: those of the segment's row i at root + i, see `kv_position`.
    """

    count: Any  # [8] int64: rows, head rows, segments, attention items, parts
    token: np.ndarray  # [R] int32
    slot: np.ndarray  # [R] int32
    position: np.ndarray  # [R] int32, absolute
    depth: np.ndarray  # [R] int32: in the draft tree; 0 for its root and for rows of no tree
    path: np.ndarray  # [R, MAX_DEPTH + 1] int32: rows of the tree, counted from the root (0), down
    #                   to the row itself; `depth + 1` are read, the first is always 0
    head_row: np.ndarray  # [head rows] int32: the row each row of logits belongs to
    segment: np.ndarray  # [segments, 3] int32: slot, first row, rows (one slot's consecutive rows)
    pages: np.ndarray  # [S, pages per slot] int32: page table
    item: np.ndarray  # [items, ...] int32: attention work, see attention.py
    part: np.ndarray  # [R, 2] int32: first part and number of parts of a row's attention


class Acts(NamedTuple):
    """Activations of one step, float32. `*` is padded so that rows do not share cache sets."""

    x: np.ndarray  # [R, H*] residual stream
    q: np.ndarray  # [kv_heads, R * G, D] rotated queries
    attn: np.ndarray  # [R, heads * D*] attention output
    h: np.ndarray  # [R, F*] SwiGLU product
    logits: np.ndarray  # [head rows, V]
    part_ml: np.ndarray  # [kv_heads, part rows, 2] running maximum and sum of a part
    part_o: np.ndarray  # [kv_heads, part rows, D] weighted values of a part
    scratch: np.ndarray  # [workers, scratch words] float32, private to a worker


class Model(NamedTuple):
    """Everything a model's phases work on; a target and its drafter have one each."""

    dims: Dims
    weights: Weights
    kv: Kv
    batch: Batch
    acts: Acts


def make_batch(*, rows: int, head_rows: int, slots: int, pages_per_slot: int, items: int) -> Batch:
    """An empty row table: `rows` rows, `items` attention work items, a page table per slot."""
    return Batch(
        count=np.zeros(8, np.int64),
        token=np.zeros(rows, np.int32),
        slot=np.zeros(rows, np.int32),
        position=np.zeros(rows, np.int32),
        depth=np.zeros(rows, np.int32),
        path=np.zeros((rows, MAX_DEPTH + 1), np.int32),
        head_row=np.zeros(head_rows, np.int32),
        segment=np.zeros((slots + 1, 3), np.int32),
        pages=np.zeros((slots, pages_per_slot), np.int32),
        item=np.zeros((items, 6), np.int32),
        part=np.zeros((rows, 2), np.int32),
    )


@jit
def root_position(batch, row):
    """The position of the root of the row's tree: that of the row itself where there is no tree."""
    return batch.position[row] - batch.depth[row]


@jit
def kv_position(batch, row):
    """Where in its slot's pages the row's key and value are stored."""
    return root_position(batch, row) + batch.path[row, batch.depth[row]]
