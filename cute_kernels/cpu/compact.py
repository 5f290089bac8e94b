"""Compaction: the accepted path's keys and values move to the positions they are committed at."""

from __future__ import annotations

from cute_kernels.cpu.simd import LANES
from cute_kernels.cpu.state import PAGE
from host.jit import jit


@jit
def compact_kv(kv, layer, pages, base, path, count, scratch):
    """Move one slot's KV of one layer from position `base + path[k]` to `base + k`, k < count.

    pages: [pages] int32, the slot's page table. path: [>= count] int32, rows of the tree from its
    root (0) on, strictly ascending. scratch: MAX_DEPTH * head_dim float32, private to the caller.
    Source and destination overlap: every row that moves is read before the first is written. Rows
    that stand where they belong are left alone, so a chain costs nothing. Keys keep their rotation:
    a row's position was `base` plus its depth, and its depth is k.
    """
    first = 0
    while first < count and path[first] == first:
        first += 1
    if first == count:
        return
    heads, size = kv.v.shape[2], kv.v.shape[4]
    for head in range(heads):
        for k in range(first, count):
            at = base + path[k]
            tile = kv.k[layer, pages[at // PAGE], head, at % PAGE // LANES]
            for d in range(size):
                scratch[(k - first) * size + d] = tile[d, at % LANES]
        for k in range(first, count):
            at = base + k
            tile = kv.k[layer, pages[at // PAGE], head, at % PAGE // LANES]
            for d in range(size):
                tile[d, at % LANES] = scratch[(k - first) * size + d]
        for k in range(first, count):
            at = base + path[k]
            values = kv.v[layer, pages[at // PAGE], head, at % PAGE]
            for d in range(size):
                scratch[(k - first) * size + d] = values[d]
        for k in range(first, count):
            at = base + k
            values = kv.v[layer, pages[at // PAGE], head, at % PAGE]
            for d in range(size):
                values[d] = scratch[(k - first) * size + d]
