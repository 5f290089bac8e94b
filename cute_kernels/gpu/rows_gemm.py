"""One matrix of the step for 17 to 256 rows: y = epilogue(x @ W^T), the *row form*.

Up to 64 rows: rows_pairs.py. Beyond, here: consumer warps split the rows: a warp takes row tiles of
16 (up to `rounds` of them) and all of K, so sums stay in registers until they are finished. Weights
come from the decode form's stream. What bounds this form is reading activations from L2, so a
*group* of tiles is multiplied in one sweep over K: the sweep goes slice by slice (the weights of
some of the decode form's K warps, a stage of the ring per tile), and in a slice over the warp's row
tiles; a fragment of activations, read ahead with plain loads, meets all tiles of the group.

Bits. An output is the decode form's to the last bit: the partial sum of every K warp there is
reproduced (chunk i, k16 step s -> chain s of two; the chains added), the partial sums are added in
warp order, then `down`'s parts in rank order; the sum of squares behind RMSNorm likewise. Rows do
not meet in an mma, so a result does not depend on the other rows either.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.config import CHUNK
from cute_kernels.gpu.fragments import constant, mma
from cute_kernels.gpu.gemm import plan_entry, warp_chunks
from cute_kernels.gpu.keys import load_words
from cute_kernels.gpu.prompt_plan import (
    COLUMNS_BYTES,
    FEW_TILES,
    chunks_ahead,
    group_tiles,
    pair_sweep,
    rounds,
    slice_count,
    slice_warps,
)
from cute_kernels.gpu.ring import advance, issue
from cute_kernels.gpu.rows_ends import (
    add_squares,
    finish,
    norm_weights_at,
    release_stages,
    scaled_rows,
    square_sums,
    stage_place,
)
from cute_kernels.gpu.rows_pairs import group_size, pairs_gemm
from cute_kernels.gpu.tiles import tile_stride


def load_rows(at):
    """A chunk of a row tile: (this lane's vector of row g, of row g + 8)."""
    return load_words(at), load_words(at + 512)


# -- products ----------------------------------------------------------------------------------
def keep(ahead, queue):
    for d, (r0, r1) in enumerate(queue):
        for e in range(4):
            ahead[8 * d + e], ahead[8 * d + 4 + e] = r0[e], r1[e]


def k_warp_products(k, g, n, places, ahead, sources, totals, norms, scales):
    """What one K warp of the decode form adds to every output: its chunks of K, chains, sum.

    places: shared addresses of its weights by tile. ahead: this lane's activations of the chunks
    that come next; sources: where those behind them lie, as many as are taken here. scales: of
    `lm`, this lane's weights of the final norm for the first chunk."""
    chunks, step_bytes = warp_chunks(k, g), slice_warps(k.c, g.name) * 512
    queue = [
        ([ahead[8 * d + e] for e in range(4)], [ahead[8 * d + 4 + e] for e in range(4)])
        for d in range(chunks_ahead(k.c, g.name))
    ]
    chains = [[[Float32(0.0)] * 4, [Float32(0.0)] * 4] for _ in range(n)]
    sums = [[Float32(0.0)] * 4, [Float32(0.0)] * 4]
    for i in range(chunks):
        vectors = queue.pop(0)
        queue.append(load_rows(sources[i]))
        if g.normed:
            square_sums(sums, vectors)
        r0, r1 = vectors if g.name != "lm" else scaled_rows(vectors, scales + i * 64)
        a = [[r0[2 * s], r1[2 * s], r0[2 * s + 1], r1[2 * s + 1]] for s in range(2)]
        for j in range(n):
            weights = sync.lds_words(places[j] + i * step_bytes)
            for s in range(2):
                chains[j][s] = mma(chains[j][s], a[s], weights[2 * s : 2 * s + 2])
    keep(ahead, queue)
    for j in range(n):
        for e in range(4):
            totals[4 * j + e] = totals[4 * j + e] + (chains[j][0][e] + chains[j][1][e])
    if g.normed:
        add_squares(norms, sums)


def rotate(values, n):
    """The first n of some registers to the end: whose turn it is has index 0."""
    size = cute.size(values)
    if n < size:
        old = [values[i] for i in range(size)]
        for i in range(size):
            values[i] = old[(i + n) % size]


def start_sums(totals, norms):
    for i in range(cute.size(totals)):  # x + -0.0 is x to the last bit, x + 0.0 is not
        totals[i] = sync.as_float(constant(0x80000000))
    for i in range(cute.size(norms)):
        norms[i] = Float32(0.0)


# -- the phase ---------------------------------------------------------------------------------
@cute.jit
def finish_row_tile(
    k: cutlass.Constexpr, p: cutlass.Constexpr, g: cutlass.Constexpr, ends: cutlass.Constexpr,
    row_tile: Int32, tile0: Int32, left: Int32, totals: cute.Tensor, norms: cute.Tensor,
):  # fmt: skip
    """The first `left` of a group's tiles, from tile0 on."""
    for j in cutlass.range_constexpr(group_tiles(k.c, g.name)):
        if j < left:
            v = [totals[4 * j + e] for e in range(4)]
            finish(k, p, g, ends, row_tile, tile0 + j * tile_stride(k.c, g.name), v, norms)


@cute.jit
def chunk_at(at: Int64, after: Int64, i: Int32, whole: cutlass.Constexpr):
    """Address of chunk i from `at` on; from chunk `whole` on, from `after`."""
    base = at
    if i >= whole:
        base = after
    return base + Int64(i) * COLUMNS_BYTES


@cute.jit
def multiply_slice(
    k: cutlass.Constexpr, p: cutlass.Constexpr, g: cutlass.Constexpr, source: Int64,
    places: cutlass.Constexpr, at: Int64, last: cutlass.Boolean, ahead: cute.Tensor,
    totals: cute.Tensor, norms: cute.Tensor,
):  # fmt: skip
    """A slice's part of all sums of this warp. source: of all activations; at: this lane's of its
    first row tile at the slice's first chunk. Returns a word that depends on every load of weights.
    """
    c, n, chunks = k.c, group_tiles(k.c, g.name), warp_chunks(k, g)
    whole = slice_warps(c, g.name) * chunks  # chunks of the slice
    round_bytes, seen, row_tile = c.warps * 1024, Uint32(0), k.wid
    begin = at - Int64((slice_count(c, g.name) - 1) * whole * COLUMNS_BYTES)  # from the last slice
    for _ in cutlass.range(rounds(c, g.name), unroll=1):
        if row_tile < p.row_tiles:
            after = at + round_bytes  # the next row tile, the next slice, or the next sweep
            if row_tile + c.warps >= p.row_tiles:
                after = at + whole * COLUMNS_BYTES - Int64((row_tile - k.wid) * 1024)
                if last:
                    after = begin - Int64((row_tile - k.wid) * 1024)
            after, offset = after - whole * COLUMNS_BYTES, Int32(0)
            for first in cutlass.range(0, whole, chunks, unroll=1):
                next_chunks = [first + chunks_ahead(c, g.name) + i for i in range(chunks)]
                sources = [chunk_at(at, after, i, whole) for i in next_chunks]
                mine, scales = [place + offset for place in places], None
                if cutlass.const_expr(g.name == "lm"):
                    scales = norm_weights_at(k, source, at + Int64(first) * COLUMNS_BYTES)
                k_warp_products(k, g, n, mine, ahead, sources, totals, norms, scales)
                offset = offset + 512
            for j in cutlass.range_constexpr(n):
                seen = seen | sync.as_bits(totals[4 * j])
        at, row_tile = at + round_bytes, row_tile + c.warps
        begin = begin + round_bytes
        rotate(totals, 4 * n)
        rotate(norms, 2)
    return seen


@cute.jit
def wide_gemm(
    k: cutlass.Constexpr, p: cutlass.Constexpr, g: cutlass.Constexpr, ends: cutlass.Constexpr,
    phase: Int32, stage: Int32, parity: Int32,
):  # fmt: skip
    """Consumer warps' part for more than 64 rows. Returns the place in the ring."""
    c, n_group = k.c, group_tiles(k.c, g.name)
    src = ends.source + Int64(k.wid * 1024 + k.lane * 16)
    if cutlass.const_expr(g.split > 1):
        src = src + Int64(k.rank * (g.slab // CHUNK * COLUMNS_BYTES))
    tile0, n, _, _ = plan_entry(k, phase)
    slices, slice_bytes = slice_count(c, g.name), slice_warps(c, g.name) * warp_chunks(k, g)
    totals = cute.make_rmem_tensor(cute.make_layout(rounds(c, g.name) * 4 * n_group), Float32)
    norms = cute.make_rmem_tensor(cute.make_layout(rounds(c, g.name) * 2), Float32)
    depth = chunks_ahead(c, g.name)
    ahead = cute.make_rmem_tensor(cute.make_layout(8 * depth), Uint32)
    keep(ahead, [load_rows(src + d * COLUMNS_BYTES) for d in range(depth)])
    done = Int32(0)
    while done < n:
        left = group_size(n - done, n_group)
        start_sums(totals, norms)
        at = src
        for q in cutlass.range(slices, unroll=1):
            first = stage
            for _ in cutlass.range(left, unroll=1):
                sync.wait_parity(k.ring.full + stage * 8, parity)
                stage, parity = advance(k.ring, stage, parity)
            # tiles beyond the group: the last one again, its sums not used
            places = [
                stage_place(k, first, cutlass.min(Int32(j), left - 1)) for j in range(n_group)
            ]
            last = q == slices - 1
            seen = multiply_slice(k, p, g, ends.source, places, at, last, ahead, totals, norms)
            release_stages(k, first, left, seen)
            at = at + slice_bytes * COLUMNS_BYTES
        row_tile = k.wid
        for _ in cutlass.range(rounds(c, g.name), unroll=1):
            if row_tile < p.row_tiles:
                tile = tile0 + done * tile_stride(c, g.name)
                finish_row_tile(k, p, g, ends, row_tile, tile, left, totals, norms)
            row_tile = row_tile + c.warps
            rotate(totals, 4 * n_group)
            rotate(norms, 2)
        done = done + left
    return stage, parity


@cute.jit
def rows_gemm(
    k: cutlass.Constexpr, p: cutlass.Constexpr, g: cutlass.Constexpr, ends: cutlass.Constexpr,
    phase: Int32, stage: Int32, parity: Int32,
):  # fmt: skip
    """Consumer warps' part of one matrix. Returns the place in the ring. Where `down` is split its
    parts still have to be added: `add_parts`, a barrier later."""
    if p.row_tiles <= FEW_TILES:
        stage, parity = pairs_gemm(k, p, g, ends, phase, stage, parity)
    else:
        stage, parity = wide_gemm(k, p, g, ends, phase, stage, parity)
    return stage, parity


# -- the producer ------------------------------------------------------------------------------
class Order:
    """Trace-time: the order in which `rows_gemm` takes the weights of a matrix; Int32.

    group: most tiles of a sweep. A sweep takes a part of every tile's unit `passes` times, the
    parts `turn` times one behind the other (`width` bytes on), then from the first again (more rows
    than a sweep has sums for). together: tiles in a stage. Of a tile: `pieces` of `size` bytes,
    `stride` bytes apart; together > 1: one piece."""

    def __init__(self, k, p, g):
        c, few = k.c, p.row_tiles <= FEW_TILES
        s, slices = pair_sweep(c, g.name), slice_count(c, g.name)
        pieces = 1 if slices == 1 else warp_chunks(k, g)

        def pick(a, b):
            return sync.select_int(few, Int32(a), Int32(b))

        self.group, self.together = pick(s.tiles, group_tiles(c, g.name)), pick(s.together, 1)
        self.turn = pick(s.steps, slices)
        self.passes = pick(s.steps * ((p.row_tiles + 1) // 2), slices)
        self.width = pick(s.piece_bytes, slice_warps(c, g.name) * 512)
        self.pieces, self.size = (
            pick(0, pieces),
            pick(s.piece_bytes, g.unit_bytes // slices // pieces),
        )
        self.stride = pick(g.unit_bytes, c.warps * 512)


@cute.jit
def produce_rows(
    k: cutlass.Constexpr, p: cutlass.Constexpr, g: cutlass.Constexpr, n: Int32, at: Int64,
    stage: Int32, parity: Int32, issued: Int32, landed: Int32, landed_parity: Int32,
):  # fmt: skip
    """The producer warp's part: the weights of n tiles, whose units begin at `at`, in the order in
    which `rows_gemm` takes them: [group][pass][tile]. Returns the state of `ring.issue`."""
    order, done = Order(k, p, g), Int32(0)
    while done < n:
        left, turn = group_size(n - done, order.group), Int32(0)
        for _ in cutlass.range(order.passes, unroll=1):
            unit, rest = at + Int64(turn * order.width), left
            while rest > 0:
                pieces = cutlass.max(order.pieces, cutlass.min(rest, order.together))
                stage, parity, issued, landed, landed_parity = issue(
                    k.ring, unit, order.size, stage, parity, issued, landed, landed_parity,
                    (pieces, order.stride),
                )  # fmt: skip
                unit = unit + Int64(order.together * g.unit_bytes)
                rest = rest - order.together
            turn = turn + 1
            if turn == order.turn:
                turn = Int32(0)
        at = at + Int64(left) * g.unit_bytes
        done = done + left
    return stage, parity, issued, landed, landed_parity
