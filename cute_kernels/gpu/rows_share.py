"""A warp's share of a matrix in the row form: some row tiles and all of K, or, where there are few
row tiles, one of them and a part of K.

A part is a run of the decode form's K warps. The first part's warp adds their sums as they come;
the others leave each of theirs in the scratch for partial sums, and behind a barrier of the row
tile's warps the first adds them: the order of additions is the decode form's.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels.gpu import sync
from cute_kernels.gpu.fragments import constant
from cute_kernels.gpu.gemm import warp_chunks
from cute_kernels.gpu.prompt_plan import (
    COLUMNS_BYTES,
    ROW_TILES,
    group_tiles,
    k_parts,
    left_bytes,
)


class Share:
    """Trace-time. ways: numbers of parts that the build has code for. parts: that of this step;
    part: the warp's. tile, stride: its row tiles, those of the step or beyond. begin, length: the
    part's chunks of K."""

    def __init__(self, k, p, g):
        self.ways, self.chunks = k_parts(k.c, g.name), k.c.warps * warp_chunks(k, g)
        self.tile, self.stride, self.parts, self.part = k.wid, k.c.warps, Int32(1), Int32(0)
        self.begin, self.length = 0, self.chunks
        if len(self.ways) > 1:
            for parts in self.ways[1:]:
                fits = p.row_tiles * parts <= k.c.warps
                self.parts = sync.select_int(fits, Int32(parts), self.parts)
            self.tile = k.wid // self.parts
            self.part = k.wid - self.tile * self.parts
            alone = self.parts == 1
            self.stride = sync.select_int(alone, Int32(k.c.warps), Int32(ROW_TILES))
            self.length = self.chunks // self.parts
            self.begin = self.part * self.length


def part_chunk(w, d):
    """The d-th chunk of the part, which begins anew behind its last."""
    return Int64(w.begin + d % w.length) if len(w.ways) > 1 else d


def chunk_range(w, first, whole):
    """(low, high): the part's chunks of the `whole` from `first` on."""
    if len(w.ways) == 1:
        return Int32(0), Int32(whole)
    low = cutlass.max(w.begin - first, 0)
    return low, cutlass.min(w.begin + w.length - first, whole)


def chunk_at(w, at, after, first, i, whole):
    """Address of chunk i from `at` on, which is chunk `first` of all; from chunk `whole` on, from
    `after` (see multiply_slice). A part begins anew behind its last chunk."""
    if len(w.ways) == 1:
        return alone_at(at, after, i, whole)
    return shared_at(at, after, first, i, whole, w.parts, w.begin, w.length)


@cute.jit
def alone_at(at: Int64, after: Int64, i: Int32, whole: cutlass.Constexpr):
    base = at
    if i >= whole:
        base = after
    return base + Int64(i) * COLUMNS_BYTES


@cute.jit
def shared_at(at: Int64, after: Int64, first: Int32, i: Int32, whole: cutlass.Constexpr,
              parts: Int32, begin: Int32, length: Int32):  # fmt: skip
    base = at
    if parts > 1:
        i = begin + (first + i - begin) % length - first
    else:
        if i >= whole:
            base = after
    return base + Int64(i) * COLUMNS_BYTES


def start_sums(totals, norms):
    for i in range(cute.size(totals)):  # x + -0.0 is x to the last bit, x + 0.0 is not
        totals[i] = sync.as_float(constant(0x80000000))
    for i in range(cute.size(norms)):
        norms[i] = Float32(0.0)


def sums_place(k, g, w, warp):
    """Shared address of what K warp `warp` leaves for the row tile; warps of the first part leave
    nothing."""
    own = k.c.warps // w.parts
    return k.red + (w.tile * (k.c.warps - own) + warp - own) * left_bytes(k.c, g.name)


@cute.jit
def leave_sums(k: cutlass.Constexpr, g: cutlass.Constexpr, w: cutlass.Constexpr, warp: Int32,
               totals: cute.Tensor, norms: cute.Tensor):  # fmt: skip
    """What K warp `warp` has come to, and a new start."""
    n, at = group_tiles(k.c, g.name), sums_place(k, g, w, warp)
    for j in cutlass.range_constexpr(n):
        mine = [totals[4 * j + e] for e in range(4)]
        sync.sts_quad(at + j * 512 + k.lane * 16, mine)
    if cutlass.const_expr(g.normed):
        sync.sts_pair(at + n * 512 + k.lane * 8, norms[0], norms[1])
    start_sums(totals, norms)


@cute.jit
def gather_sums(k: cutlass.Constexpr, g: cutlass.Constexpr, w: cutlass.Constexpr,
                totals: cute.Tensor, norms: cute.Tensor):  # fmt: skip
    """The first part's warp: everything that was left, in order. Returns the row tile that the
    warp has to finish; one beyond all for the others."""
    n, row_tile = group_tiles(k.c, g.name), Int32(ROW_TILES)
    sync.group_sync(w.tile, w.parts * 32)
    if w.part == 0:
        row_tile = w.tile
        for warp in cutlass.range(k.c.warps // w.parts, k.c.warps, unroll=1):
            at = sums_place(k, g, w, warp)
            for j in cutlass.range_constexpr(n):
                more = sync.lds_quad(at + j * 512 + k.lane * 16)
                for e in cutlass.range_constexpr(4):
                    totals[4 * j + e] = totals[4 * j + e] + more[e]
            if cutlass.const_expr(g.normed):
                squares = sync.lds_pair(at + n * 512 + k.lane * 8)
                for h in cutlass.range_constexpr(2):
                    norms[h] = norms[h] + squares[h]
    sync.group_sync(w.tile, w.parts * 32)  # what was left has been read
    return row_tile
