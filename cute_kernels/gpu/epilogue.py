"""From the warps' partial sums of a group of tiles to finished words.

A thread owns two neighbouring columns of one row: it adds the warps' sums in warp order and applies
what follows the matrix. Rows that the step does not have are computed with the others and never
stored.

`down` may be split: the CTAs of a team multiply the same tiles by their own part of K. CTA r owns
tiles r, r + team, ...; the others publish their sums as words in device memory, and the owner adds
the parts in rank order.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.config import ROWS, TILE
from cute_kernels.gpu.fragments import bf16_pair, put_word, word_at
from cute_kernels.gpu.head import note_logits
from cute_kernels.gpu.prompt_plan import COLUMNS_BYTES
from cute_kernels.gpu.tiles import tile_stride

LOG2_E = 1.4426950408889634


def squares_at(k, g, warp, row):
    """Shared offset of one warp's sum for one row; as many copies as of the partial sums."""
    copy = k.c.red_buffers > 1 and g.name == "gu"
    return ((copy * k.c.warps + warp) * ROWS + row) * 4


def norm_factor(c, total):
    """RMSNorm's factor from a row's sum of squares."""
    return cute.math.rsqrt(total * (1.0 / c.shape.hidden) + c.shape.rms_eps, fastmath=True)


def row_factor(k, g, row):
    total = Float32(0.0)
    for w in range(k.c.warps):
        total = total + sync.lds(k.squares + squares_at(k, g, w, row))
    return norm_factor(k.c, total)


def silu_times(gate, up):
    return up * gate / (1.0 + cute.math.exp2(gate * -LOG2_E, fastmath=True))


def add_residual(k, own, v0, v1):
    """The fp32 residual of a CTA's own columns never leaves its shared memory."""
    at = k.residual + own * 512 + k.pair
    r0, r1 = sync.lds_pair(at)
    sync.sts_pair(at, v0 + r0, v1 + r1)
    return v0 + r0, v1 + r1


@cute.jit
def epilogue(
    k: cutlass.Constexpr,
    g: cutlass.Constexpr,
    rows: Int32,
    tile: Int32,
    own: Int32,
    v0: Float32,
    v1: Float32,
    dst: Int64,
    stats: cute.Tensor,
    tap: Int64,
):
    """Finished sums of two neighbouring columns of one row -> where they go; see gemm.run_phase."""
    col, ok = tile * TILE + 2 * k.t, k.row < rows
    if cutlass.const_expr(g.normed):
        f = row_factor(k, g, k.row)
        v0, v1 = v0 * f, v1 * f
    if cutlass.const_expr(g.name == "lm"):
        note_logits(k, stats, rows, col, v0, v1, dst)
    else:
        if cutlass.const_expr(g.owned):
            v0, v1 = add_residual(k, own, v0, v1)
        word = bf16_pair(v0, v1)
        if cutlass.const_expr(g.name == "gu"):  # columns are (gate, up); two lanes make one word
            h = silu_times(v0, v1)
            word = bf16_pair(h, cute.arch.shuffle_sync_bfly(h, offset=2))
            col, ok = tile * 4 + k.t, ok & ((k.t & 1) == 0)
        if cutlass.const_expr(g.name == "ckv"):
            store_row_word(ok, dst, k.row, col, word)
        elif cutlass.const_expr(g.name == "fc"):
            put_word(ok & (dst != 0), dst, k.row, col, word)
        else:
            put_word(ok, dst, k.row, col, word)
        if cutlass.const_expr(g.name == "down" and k.c.draft):
            store_row_word(ok & (tap != 0), tap, k.row, col, word)


@cute.jit
def store_row_word(ok: Boolean, base: Int64, row: Int32, col: Int32, word: Uint32):
    """Columns col, col + 1 of a row into a buffer in the row form's order."""
    if ok:
        at = base + Int64(word_at(row, col, COLUMNS_BYTES))
        sync.ptx_do("st.global.b32 [{$r0}], {$r1};", at, word)


# -- sums of a group ---------------------------------------------------------------------------
def part_at(k, tile, q):
    """Byte offset, among a copy's partial sums, of CTA q's pair for a tile."""
    return Int64((tile * k.c.team + q) * 512 + k.pair)


def add_warps(k, at):
    pairs = [sync.lds_pair(at + w * 512) for w in range(k.c.warps)]
    v0, v1 = pairs[0]
    for p0, p1 in pairs[1:]:
        v0, v1 = v0 + p0, v1 + p1
    return v0, v1


@cute.jit
def send_part(k: cutlass.Constexpr, g: cutlass.Constexpr, rows: Int32, tile: Int32, index: Int32,
              v0: Float32, v1: Float32, parts: Int64):  # fmt: skip
    """This CTA's part of a tile's sums to the tile's owner."""
    if (index & (g.split - 1)) == k.rank:
        sync.sts_pair(k.own + (index // g.split) * 512 + k.pair, v0, v1)
    else:
        if k.row < rows:
            words = [sync.as_bits(v0), sync.as_bits(v1)]
            sync.st_words(parts + part_at(k, tile, k.rank), words)


@cute.jit
def reduce_group(
    k: cutlass.Constexpr,
    g: cutlass.Constexpr,
    rows: Int32,
    tile0: Int32,
    done: Int32,
    left: Int32,
    which: Int32,
    dst: Int64,
    parts: Int64,
    stats: cute.Tensor,
    tap: Int64,
):
    """Thread (tile j, pair) adds the warps' partial sums of its two columns, in warp order."""
    c = k.c
    if k.j < left:
        at = k.red + (which * c.group + k.j) * (c.warps * 512) + k.pair
        v0, v1 = add_warps(k, at)
        index = done + k.j
        if cutlass.const_expr(g.split > 1):
            send_part(k, g, rows, tile0 + index, index, v0, v1, parts)
        else:
            tile = tile0 + index * tile_stride(c, g.name)
            epilogue(k, g, rows, tile, index, v0, v1, dst, stats, tap)


def ask_parts(k, g, rows, u, tile0, n, parts):
    """One round of loads, all in flight together; returns the largest word awaited."""
    awaited = []
    for i in range(k.c.own_tiles):
        own = i * g.split + k.rank
        for q in range(g.split):
            ok = Int32(Boolean(k.rank != q) & (own < n) & (k.row < rows))
            at = 2 * (i * g.split + q)
            u[at], u[at + 1] = sync.ld_pair_words_if(ok, parts + part_at(k, tile0 + own, q))
            awaited.append(sync.larger(u[at], u[at + 1]))
    return sync.largest(awaited)


@cute.jit
def finish_team(
    k: cutlass.Constexpr,
    g: cutlass.Constexpr,
    rows: Int32,
    tile0: Int32,
    n: Int32,
    dst: Int64,
    parts: Int64,
    tap: Int64,
):
    """The owner of a tile adds the parts of its team, in rank order; tile r of a group belongs to
    the threads of its slot, so that own parts stay in the thread that made them."""
    c = k.c
    if k.j == k.rank:
        u = cute.make_rmem_tensor(cute.make_layout(2 * c.own_tiles * g.split), Uint32)
        worst = ask_parts(k, g, rows, u, tile0, n, parts)
        tries, since = Int32(0), Int64(0)
        while worst == Uint32(sync.EMPTY):
            worst = ask_parts(k, g, rows, u, tile0, n, parts)
            tries, since = sync.overdue(tries, since)
        for i in cutlass.range_constexpr(c.own_tiles):
            if i * g.split + k.rank < n:
                o0, o1 = sync.lds_pair(k.own + i * 512 + k.pair)
                v0, v1 = Float32(0.0), Float32(0.0)
                for q in cutlass.range_constexpr(g.split):
                    at = 2 * (i * g.split + q)
                    p0, p1 = o0, o1
                    if k.rank != q:
                        p0, p1 = sync.as_float(u[at]), sync.as_float(u[at + 1])
                    v0, v1 = v0 + p0, v1 + p1
                tile = tile0 + i * g.split + k.rank
                epilogue(k, g, rows, tile, Int32(i), v0, v1, dst, u, tap)
