"""How keys and values lie in pages, and which keys a row sums in which way. Free of cutlass.

A page holds 64 positions. A block is one (page, layer, kv head): 64 rows of K, then 64 of V, a row
being `head_dim` bf16 values. In row r the 16-byte piece i lies at i ^ (r & 7), so that ldmatrix
has no bank conflicts. K rows keep head dimensions in the order of `key_order`; V rows are plain.

Arrays may be numpy arrays or torch tensors: only indexing and reshaping are used.
"""

import numpy as np

PAGE = 64  # positions of a page
MAX_DEPTH = 15  # of a row below the root of its tree


def rotary_order(head_dim: int = 64) -> np.ndarray:
    """Dimensions of a rotary head as columns of q and k: 0, d/2, 1, d/2 + 1, ...: a rotary pair is
    two neighbouring columns, one word."""
    return np.arange(head_dim).reshape(2, head_dim // 2).T.reshape(-1)


def rotary_rows(heads: int, head_dim: int = 64) -> np.ndarray:
    """Row order of a projection to `heads` rotary heads: `rotary_order` in each."""
    return (np.arange(heads)[:, None] * head_dim + rotary_order(head_dim)).reshape(-1)


def key_order(head_dim: int = 64) -> np.ndarray:
    """order[i]: the head dimension at place i of a K row.

    Columns are in `rotary_order`; within 16 of them, pair p of lane t's four (4 t .. 4 t + 3) goes
    to place 8 p + 2 t, where ldmatrix hands it to the lane that holds the same part of Q.
    """
    column = np.arange(head_dim)
    t, e = (column & 15) >> 2, column & 3
    place = (column & ~15) + (e >> 1) * 8 + 2 * t + (e & 1)
    out = np.empty(head_dim, np.int64)
    out[place] = rotary_order(head_dim)
    return out


def swizzle_rows(x):
    """[..., rows, head_dim]: the 16-byte piece i of row r to i ^ (r & 7). Its own inverse."""
    rows, dim = np.arange(x.shape[-2]), x.shape[-1]
    pieces = np.arange(dim // 8)[None] ^ (rows % 8)[:, None]
    index = (pieces[:, :, None] * 8 + np.arange(8)).reshape(len(rows), dim)
    return x[..., rows[:, None], index]


def tail_start(position: int) -> int:
    """c(p): keys below it are summed in blocks of 64, from it on along the row's path."""
    return PAGE * (max(position - MAX_DEPTH, 0) // PAGE)


def paths(parents: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(depths [rows], paths [rows, 2] uint32) of a tree whose row i has parent parents[i] < i, the
    root -1. A path is the row's ancestors and itself, root first, 4 bits each: words of the
    descriptor (board.Desc.PATH). A chain of rows is a tree; so is a single row."""
    depth = np.zeros(len(parents), np.int64)
    words = np.zeros((len(parents), 2), np.uint32)
    for i, parent in enumerate(parents):
        if not -1 <= parent < i:
            raise ValueError(f"row {i} has parent {parent}; it must be an earlier row, or -1")
        if parent >= 0:
            depth[i], words[i] = depth[parent] + 1, words[parent]
        if depth[i] > MAX_DEPTH:
            raise ValueError(f"row {i} has depth {depth[i]}; the deepest is {MAX_DEPTH}")
        words[i, depth[i] // 8] |= np.uint32(i << int(depth[i] % 8 * 4))
    return depth, words
