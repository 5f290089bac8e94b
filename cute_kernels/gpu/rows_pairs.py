"""The row form for few rows (up to 64): y = epilogue(x @ W^T), two row tiles at a time.

As in the decode form the consumer warps split K: warp w multiplies its slice of K, and the partial
sums meet in shared memory and are added in warp order; so bits are the decode form's by its own
order of sums (gemm.py). Two row tiles of 16, a *pair*, are too much to be kept in registers for a
phase. So a *sweep* over the warp's slice of K multiplies as many tiles as there are registers for
their sums, in steps of a few chunks: a step's weights of all these tiles lie in the ring together,
and its activations were loaded from L2 a step ago, straight into the mma's operands.

More rows are further pairs: all sweep over a group of tiles before the next group comes, so that
its weights may still be in L2 (in wide models they are not: there 64 rows stream them twice).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.config import CHUNK
from cute_kernels.gpu.fragments import mma
from cute_kernels.gpu.gemm import plan_entry, warp_chunks
from cute_kernels.gpu.prompt_plan import COLUMNS_BYTES, FEW_TILES, ROW_TILE, pair_slots, pair_sweep
from cute_kernels.gpu.ring import advance
from cute_kernels.gpu.rows_ends import (
    finish,
    norm_weights_at,
    quad_square_sum,
    release_stages,
    scaled_rows,
    square_sums,
    stage_place,
)
from cute_kernels.gpu.tiles import tile_stride

SUMS = 16  # registers of a tile's sums: two row tiles, two chains, four values
VECTORS = 16  # registers of a chunk of a pair: two row tiles, two rows, four words


def group_size(left, most):
    """Tiles of the next sweep where `left` are left: evened out over the sweeps."""
    groups = (left + (most - 1)) // most
    return (left + groups - 1) // groups


# -- products ----------------------------------------------------------------------------------
def load_chunk(ahead, i, at, ok=None):
    """Chunk i of a pair into registers: [row tile][row g, g + 8][word]; zeros where not ok."""
    for part in range(4):
        to = at + part * 512
        words = sync.ld_fresh_words(to) if ok is None else sync.ld_fresh_words_if(ok, to)
        for e, word in enumerate(words):
            ahead[VECTORS * i + 4 * part + e] = word


def chunk_rows(ahead, i):
    """What `load_chunk` left: per row tile (vector of row g, of row g + 8)."""
    words = [ahead[VECTORS * i + e] for e in range(VECTORS)]
    return [(words[8 * r : 8 * r + 4], words[8 * r + 4 : 8 * r + 8]) for r in range(2)]


def note_squares(squares, rows):
    """Adds a chunk's squares; squares: [row tile][row g, g + 8][word of the vector]."""
    for r, vectors in enumerate(rows):
        sums = [[squares[8 * r + 4 * h + e] for e in range(4)] for h in range(2)]
        square_sums(sums, vectors)
        for h in range(2):
            for e in range(4):
                squares[8 * r + 4 * h + e] = sums[h][e]


@cute.jit
def multiply_step(
    k: cutlass.Constexpr, g: cutlass.Constexpr, places: cutlass.Constexpr, scales: Int64,
    after: Int64, more: Int32, first_sweep: cutlass.Boolean, ahead: cute.Tensor, sums: cute.Tensor,
    squares: cute.Tensor,
):  # fmt: skip
    """The chunks of a step, which `ahead` holds, times the weights in the stages at `places`; then
    `ahead` holds the chunks from `after` on (more = 0: nothing). Returns a word that depends on
    every load of weights."""
    s, seen = pair_sweep(k.c, g.name), Uint32(0)
    for i in cutlass.range_constexpr(s.chunks):
        if cutlass.const_expr(g.normed):
            if first_sweep:
                note_squares(squares, chunk_rows(ahead, i))
        rows = chunk_rows(ahead, i)
        if cutlass.const_expr(g.name == "lm"):
            rows = [scaled_rows(vectors, scales + i * 64) for vectors in rows]
        for j in cutlass.range_constexpr(s.tiles):
            at = places[j // s.together] + (j % s.together) * s.piece_bytes + i * (k.c.warps * 512)
            weights = sync.lds_words(at)
            seen = seen | weights[0]
            for r in cutlass.range_constexpr(2):
                r0, r1 = rows[r]
                for step in cutlass.range_constexpr(2):
                    e0 = SUMS * j + 8 * r + 4 * step
                    a = [r0[2 * step], r1[2 * step], r0[2 * step + 1], r1[2 * step + 1]]
                    chain = [sums[e0 + e] for e in range(4)]
                    chain = mma(chain, a, weights[2 * step : 2 * step + 2])
                    for e in cutlass.range_constexpr(4):
                        sums[e0 + e] = chain[e]
        load_chunk(ahead, i, after + i * COLUMNS_BYTES, more)
        cute.arch.sync_warp()  # else the compiler puts these loads behind the step's last mma
    return seen


def zero(values):
    for i in range(cute.size(values)):
        values[i] = Float32(0.0)


# -- the warps' sums meet ----------------------------------------------------------------------
def square_at(k, warp, row_tile, row):
    """Shared address of a warp's sum of squares of a row; the head's results have this place."""
    return k.results + ((warp * FEW_TILES + row_tile) * ROW_TILE + row) * 4


@cute.jit
def publish_squares(k: cutlass.Constexpr, pair: Int32, squares: cute.Tensor):
    for r in cutlass.range_constexpr(2):
        for h in cutlass.range_constexpr(2):
            total = quad_square_sum([squares[8 * r + 4 * h + e] for e in range(4)])
            if (k.lane & 3) == 0:
                sync.sts(square_at(k, k.wid, 2 * pair + r, 8 * h + (k.lane >> 2)), total)


def pair_norms(k, row_tile):
    """Sums of squares of rows g and g + 8, the warps' added in order."""
    out = []
    for h in range(2):
        total = Float32(0.0)
        for w in range(k.c.warps):
            total = total + sync.lds(square_at(k, w, row_tile, 8 * h + (k.lane >> 2)))
        out.append(total)
    return out


def warps_sum(k, slot):
    """A tile's sums in this slot, those of the warps added in order."""
    at = k.red + slot * (k.c.warps * 512) + k.lane * 16
    v = sync.lds_quad(at)
    for w in range(1, k.c.warps):
        v = [x + y for x, y in zip(v, sync.lds_quad(at + w * 512), strict=True)]
    return v


@cute.jit
def meet(
    k: cutlass.Constexpr, p: cutlass.Constexpr, g: cutlass.Constexpr, ends: cutlass.Constexpr,
    pair: Int32, tile0: Int32, left: Int32, sums: cute.Tensor,
):  # fmt: skip
    """A sweep's sums (tile, row tile of the pair), as many at a time as there are slots for: every
    warp leaves its own, then each finishes one."""
    slots, count = pair_slots(k.c), 2 * pair_sweep(k.c, g.name).tiles
    turns = (2 * left + (slots - 1)) // slots
    for turn in cutlass.range(turns, unroll=1):
        for t in cutlass.range_constexpr(-(-count // slots)):
            if turn == t:
                for slot in cutlass.range_constexpr(min(slots, count - t * slots)):
                    e0 = 8 * (t * slots + slot)
                    v = [sums[e0 + e] + sums[e0 + 4 + e] for e in range(4)]
                    sync.sts_quad(k.red + (slot * k.c.warps + k.wid) * 512 + k.lane * 16, v)
        sync.consumer_sync(k.c.warps * 32)
        index = turn * slots + k.wid
        j, row_tile = index >> 1, 2 * pair + (index & 1)
        if (k.wid < slots) & (j < left) & (row_tile < p.row_tiles):
            norms = pair_norms(k, row_tile) if g.normed else None
            tile = tile0 + j * tile_stride(k.c, g.name)
            finish(k, p, g, ends, row_tile, tile, warps_sum(k, k.wid), norms)
        sync.consumer_sync(k.c.warps * 32)


# -- the phase ---------------------------------------------------------------------------------
@cute.jit
def pairs_gemm(
    k: cutlass.Constexpr, p: cutlass.Constexpr, g: cutlass.Constexpr, ends: cutlass.Constexpr,
    phase: Int32, stage: Int32, parity: Int32,
):  # fmt: skip
    """Consumer warps' part of one matrix. Returns the place in the ring."""
    c, s = k.c, pair_sweep(k.c, g.name)
    first_chunk = k.wid * warp_chunks(k, g)
    if cutlass.const_expr(g.split > 1):
        first_chunk = first_chunk + k.rank * (g.slab // CHUNK)
    src = ends.source + Int64(first_chunk * COLUMNS_BYTES + k.lane * 16)
    sums = cute.make_rmem_tensor(cute.make_layout(SUMS * s.tiles), Float32)
    squares = cute.make_rmem_tensor(cute.make_layout(16), Float32)
    ahead = cute.make_rmem_tensor(cute.make_layout(VECTORS * s.chunks), Uint32)
    for i in cutlass.range_constexpr(s.chunks):
        load_chunk(ahead, i, src + i * COLUMNS_BYTES)  # also where the plan has no tile
    tile0, n, _, _ = plan_entry(k, phase)
    pairs, pair, done = (p.row_tiles + 1) // 2, Int32(0), Int32(0)
    while done < n:
        left = group_size(n - done, s.tiles)
        used = (left + (s.together - 1)) // s.together  # stages of a step
        zero(sums)
        zero(squares)
        at, next_pair, next_done = src + Int64(pair * 2048), pair + 1, done
        if next_pair == pairs:
            next_pair, next_done = Int32(0), done + left
        for step in cutlass.range(s.steps, unroll=1):
            after, more = at + s.chunks * COLUMNS_BYTES, Int32(1)
            if step == s.steps - 1:
                after, more = src + Int64(next_pair * 2048), Int32(next_done < n)
            scales = Int64(0)
            if cutlass.const_expr(g.name == "lm"):
                scales = norm_weights_at(k, ends.source, at)
            first = stage
            for _ in cutlass.range(used, unroll=1):
                sync.wait_parity(k.ring.full + stage * 8, parity)
                stage, parity = advance(k.ring, stage, parity)
            # tiles beyond the group: whatever lies there, its sums not used
            places = [
                stage_place(k, first, cutlass.min(Int32(i), used - 1)) + k.wid * 512
                for i in range(-(-s.tiles // s.together))
            ]
            seen = multiply_step(k, g, places, scales, after, more, done == 0, ahead, sums, squares)
            release_stages(k, first, used, seen)
            at = after
        if cutlass.const_expr(g.normed):
            if done == 0:
                publish_squares(k, pair, squares)
        meet(k, p, g, ends, pair, tile0 + done * tile_stride(c, g.name), left, sums)
        pair, done = next_pair, next_done
    return stage, parity
