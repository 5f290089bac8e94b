"""One matrix of the step for 17 to 256 rows: y = epilogue(x @ W^T), the *row form*.

Consumer warps split the rows: a warp takes row tiles of 16 and all of K, so sums stay in registers
until they are finished. Weights come in the decode form's stream and order; the tiles of a *group*
lie in the ring together, each activation fragment (global memory, plain loads behind a grid
barrier) is multiplied with all of them, and a stage goes back when the warp has done all its rows.

Bits. An output is the decode form's to the last bit: the partial sum of every K warp there is
reproduced (chunk i, k16 step s -> chain s of two; the chains added), the partial sums are added in
warp order, then `down`'s parts in rank order; the sum of squares behind RMSNorm likewise. Rows do
not meet in an mma, so a result does not depend on the other rows either.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.config import CHUNK, TILE
from cute_kernels.gpu.embed import column_offset, token_address
from cute_kernels.gpu.epilogue import norm_factor, silu_times
from cute_kernels.gpu.fragments import bf16_pair, constant, mma, unpack_pair
from cute_kernels.gpu.gemm import add_square, plan_entry, warp_chunks
from cute_kernels.gpu.prompt_plan import (
    COLUMNS_BYTES,
    ROW_TILE,
    ROW_TILES,
    PromptBuffers,
    group_tiles,
)
from cute_kernels.gpu.ring import advance
from cute_kernels.gpu.sync import ptx_read
from cute_kernels.gpu.tiles import tile_stride

AHEAD = 4  # chunks of activations in flight a warp: 1 KiB each


class Rows:
    """Trace-time bundle of a chunk: rows, position (of its first row), row_tiles (Int32); act
    (prompt_plan.PromptBuffers), tokens, rope, embed_base, embed_table (Int64 addresses)."""


# -- global memory behind a grid barrier -------------------------------------------------------
def load_words(at):
    return ptx_read(
        "ld.global.L1::no_allocate.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];", [Uint32] * 4, at
    )


def load_quad(at):
    return ptx_read("ld.global.v4.f32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];", [Float32] * 4, at)


def store_quad(at, v):
    sync.ptx_do("st.global.v4.f32 [{$r0}], {{$r1},{$r2},{$r3},{$r4}};", at, *v)


def load_rows(at):
    """A chunk of a row tile: (this lane's vector of row g, of row g + 8)."""
    return load_words(at), load_words(at + 512)


@cute.jit
def store_tile(
    k: cutlass.Constexpr, p: cutlass.Constexpr, base: Int64, row_tile: Int32, tile: Int32,
    words: cutlass.Constexpr,
):  # fmt: skip
    """16 rows x 8 columns as the mma leaves them (words: columns 2 t, 2 t + 1 of rows g and g + 8)
    into an activation buffer. Lanes t and t ^ 1 swap one word, so that each stores two neighbours
    of one row. Rows beyond the chunk are not stored."""
    odd = k.lane & 1
    other = cute.arch.shuffle_sync_bfly(sync.select(odd, words[0], words[1]), offset=1)
    first, second = sync.select(odd, other, words[0]), sync.select(odd, words[1], other)
    row = row_tile * ROW_TILE + odd * 8 + (k.lane >> 2)
    slot = (k.lane >> 2) * 4 + (tile & 1) * 2 + ((k.lane & 3) >> 1)
    at = (tile >> 2) * COLUMNS_BYTES + (row >> 3) * 512 + slot * 16 + ((tile >> 1) & 1) * 8
    if row < p.rows:
        code = "st.global.v2.b32 [{$r0}], {{$r1},{$r2}};"
        sync.ptx_do(code, base + Int64(at), first, second)


@cute.jit
def store_gated(
    k: cutlass.Constexpr, p: cutlass.Constexpr, base: Int64, row_tile: Int32, tile: Int32,
    v: cutlass.Constexpr,
):  # fmt: skip
    """SwiGLU of a tile of (gate, up) columns: 16 rows x 4 columns. Lanes t and t ^ 1 make one word
    of row g and one of row g + 8."""
    h = [silu_times(v[0], v[1]), silu_times(v[2], v[3])]
    others = [cute.arch.shuffle_sync_bfly(x, offset=1) for x in h]
    odd = k.lane & 1
    word = sync.select(odd, bf16_pair(others[1], h[1]), bf16_pair(h[0], others[0]))
    row = row_tile * ROW_TILE + odd * 8 + (k.lane >> 2)
    slot = (k.lane >> 2) * 4 + (tile & 3)
    word_at = ((tile >> 2) & 1) * 2 + ((k.lane & 3) >> 1)
    at = (tile >> 3) * COLUMNS_BYTES + (row >> 3) * 512 + slot * 16 + word_at * 4
    if row < p.rows:
        sync.ptx_do("st.global.b32 [{$r0}], {$r1};", base + Int64(at), word)


def tile_words(v):
    return [bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3])]


def add_residual(k, p, row_tile, tile, v):
    """The fp32 residual of this CTA's columns: read, added to, kept; and the sum as bf16 in x."""
    b = PromptBuffers.of(k.c)
    at = p.act + Int64(b.residual) + Int64((tile * ROW_TILES + row_tile) * 512 + k.lane * 16)
    v = [x + r for x, r in zip(v, load_quad(at), strict=True)]
    store_quad(at, v)
    store_tile(k, p, p.act + Int64(b.x), row_tile, tile, tile_words(v))


def part_at(k, tile, rank, row_tile):
    """Byte offset of a CTA's sums of a tile of `down` among the parts."""
    return Int64(((tile * k.c.team + rank) * ROW_TILES + row_tile) * 512 + k.lane * 16)


# -- products ----------------------------------------------------------------------------------
def square_sums(sums, vectors):
    """Adds a chunk's squares to four sums for each of rows g and g + 8, in the decode form's order
    of additions (gemm.row_squares)."""
    for half, vector in enumerate(vectors):
        for at, word in enumerate(vector):
            sums[half][at] = add_square(sums[half][at], word)


def add_squares(norms, sums):
    for half, (s0, s1, s2, s3) in enumerate(sums):
        total = (s0 + s1) + (s2 + s3)
        total = total + cute.arch.shuffle_sync_bfly(total, offset=1)
        norms[half] = norms[half] + (total + cute.arch.shuffle_sync_bfly(total, offset=2))


def keep(ahead, queue):
    for d, (r0, r1) in enumerate(queue):
        for e in range(4):
            ahead[8 * d + e], ahead[8 * d + 4 + e] = r0[e], r1[e]


def k_warp_products(k, g, n, places, ahead, at, after, totals, norms):
    """What one K warp of the decode form adds to every output: its chunks of K, chains, sum."""
    chunks = warp_chunks(k, g)
    depth, per_copy = min(AHEAD, chunks), chunks // g.copies_per_unit
    queue = [([ahead[8 * d + e] for e in range(4)], [ahead[8 * d + 4 + e] for e in range(4)])
             for d in range(depth)]  # fmt: skip
    chains = [[[Float32(0.0)] * 4, [Float32(0.0)] * 4] for _ in range(n)]
    sums = [[Float32(0.0)] * 4, [Float32(0.0)] * 4]
    for i in range(chunks):
        vectors, more = queue.pop(0), i + depth
        queue.append(
            load_rows(at + more * COLUMNS_BYTES if more < chunks
                      else after + (more - chunks) * COLUMNS_BYTES)
        )  # fmt: skip
        weights = [
            sync.lds_words(places[j][i // per_copy] + (i % per_copy) * (k.c.warps * 512))
            for j in range(n)
        ]
        if g.normed:
            square_sums(sums, vectors)
        r0, r1 = vectors
        for s in range(2):
            a = [r0[2 * s], r1[2 * s], r0[2 * s + 1], r1[2 * s + 1]]
            for j in range(n):
                chains[j][s] = mma(chains[j][s], a, weights[j][2 * s : 2 * s + 2])
    keep(ahead, queue)
    for j in range(n):
        for e in range(4):
            totals[4 * j + e] = totals[4 * j + e] + (chains[j][0][e] + chains[j][1][e])
    if g.normed:
        add_squares(norms, sums)


@cute.jit
def multiply_rows(
    k: cutlass.Constexpr, g: cutlass.Constexpr, n: cutlass.Constexpr, places: cutlass.Constexpr,
    src: Int64, totals: cute.Tensor, norms: cute.Tensor,
):  # fmt: skip
    """totals[4 j + e] = this row tile's sums with the n tiles at `places` (shared addresses by
    tile and copy); norms[half] = the row's sum of squares over K."""
    chunks = warp_chunks(k, g)
    depth, span = min(AHEAD, chunks), chunks * COLUMNS_BYTES
    ahead = cute.make_rmem_tensor(cute.make_layout(8 * depth), Uint32)
    keep(ahead, [load_rows(src + d * COLUMNS_BYTES) for d in range(depth)])
    for i in cutlass.range_constexpr(4 * n):  # x + -0.0 is x to the last bit, x + 0.0 is not
        totals[i] = sync.as_float(constant(0x80000000))
    norms[0], norms[1] = Float32(0.0), Float32(0.0)
    at, offset = src, Int32(0)
    for w in cutlass.range(k.c.warps, unroll=1):
        after = at
        if w < k.c.warps - 1:  # what is read ahead in the last turn is not used
            after = at + span
        here = [[p + offset for p in copies] for copies in places]
        k_warp_products(k, g, n, here, ahead, at, after, totals, norms)
        at, offset = after, offset + 512


# -- the phase ---------------------------------------------------------------------------------
def finish(k, p, g, row_tile, tile, v, norms):
    """Finished sums of a tile -> where they go."""
    b = PromptBuffers.of(k.c)
    if g.normed:
        f = [norm_factor(k.c, norms[h]) for h in range(2)]
        v = [x * f[e >> 1] for e, x in enumerate(v)]
    if g.name == "qkv":
        store_tile(k, p, p.act + Int64(b.q), row_tile, tile, tile_words(v))
    elif g.name == "gu":
        store_gated(k, p, p.act + Int64(b.h), row_tile, tile, v)
    elif g.split > 1:
        store_quad(p.act + Int64(b.parts) + part_at(k, tile, k.rank, row_tile), v)
    else:
        add_residual(k, p, row_tile, tile, v)


@cute.jit
def finish_if(
    k: cutlass.Constexpr, p: cutlass.Constexpr, g: cutlass.Constexpr, ok: cutlass.Boolean,
    row_tile: Int32, tile: Int32, totals: cute.Tensor, j: cutlass.Constexpr, norms: cute.Tensor,
):  # fmt: skip
    if ok:
        finish(k, p, g, row_tile, tile, [totals[4 * j + e] for e in range(4)], norms)


def stage_place(k, stage, i):
    """Shared address of this lane in the i-th stage from `stage` on."""
    at = stage + i
    at = at - sync.as_int(sync.select(at >= k.ring.n, Uint32(k.ring.n), Uint32(0)))
    return k.ring.base + at * k.ring.stage_bytes + k.lane * 16


@cute.jit
def rows_gemm(
    k: cutlass.Constexpr, p: cutlass.Constexpr, g: cutlass.Constexpr, phase: Int32,
    stage: Int32, parity: Int32,
):  # fmt: skip
    """Consumer warps' part of one matrix. Returns the place in the ring. Where `down` is split its
    parts still have to be added: `add_parts`, a barrier later."""
    c, b, n_group = k.c, PromptBuffers.of(k.c), group_tiles(k.c, g.name)
    source = {"qkv": b.x, "o": b.a, "gu": b.x, "down": b.h}[g.name]
    src = p.act + Int64(source) + Int64(k.lane * 16)
    if cutlass.const_expr(g.split > 1):
        src = src + Int64(k.rank * (g.slab // CHUNK * COLUMNS_BYTES))
    tile0, n, _, _ = plan_entry(k, phase)
    totals = cute.make_rmem_tensor(cute.make_layout(4 * n_group), Float32)
    norms = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    done, groups = Int32(0), (n + (n_group - 1)) // n_group
    while done < n:
        left = (n - done + groups - 1) // groups
        groups = groups - 1
        taken, first = left * g.copies_per_unit, stage
        for _ in cutlass.range(taken, unroll=1):
            sync.wait_parity(k.ring.full + stage * 8, parity)
            stage, parity = advance(k.ring, stage, parity)
        # tiles beyond the group: the last one again, its sums not used
        places = [
            [
                stage_place(k, first, cutlass.min(Int32(j), left - 1) * g.copies_per_unit + i)
                for i in range(g.copies_per_unit)
            ]
            for j in range(n_group)
        ]
        row_tile, seen = k.wid, Uint32(0)
        while row_tile < p.row_tiles:
            multiply_rows(k, g, n_group, places, src + Int64(row_tile * 1024), totals, norms)
            for j in cutlass.range_constexpr(n_group):
                seen = seen | sync.as_bits(totals[4 * j])  # no sum before its weights are read
                tile = tile0 + (done + j) * tile_stride(c, g.name)
                finish_if(k, p, g, j < left, row_tile, tile, totals, j, norms)
            row_tile = row_tile + c.warps
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            for _ in cutlass.range(taken, unroll=1):
                sync.release_after(k.ring.empty + first * 8, [seen], k.zero)
                first = first + 1
                if first == k.ring.n:
                    first = Int32(0)
        done = done + left
    return stage, parity


def part_sum(k, p, row_tile, tile):
    base = p.act + Int64(PromptBuffers.of(k.c).parts)
    parts = [load_quad(base + part_at(k, tile, q, row_tile)) for q in range(k.c.team)]
    v = [Float32(0.0)] * 4
    for part in parts:
        v = [x + p for x, p in zip(v, part, strict=True)]
    return v


@cute.jit
def add_parts(k: cutlass.Constexpr, p: cutlass.Constexpr, phase: Int32):
    """The owner of a tile of a split `down` adds its team's parts in rank order."""
    c = k.c
    tile0, n, _, _ = plan_entry(k, phase)
    own = (n - k.rank + c.team - 1) // c.team
    i = k.wid
    while i < own * p.row_tiles:
        tile, row_tile = tile0 + (i // p.row_tiles) * c.team + k.rank, i % p.row_tiles
        add_residual(k, p, row_tile, tile, part_sum(k, p, row_tile, tile))
        i = i + c.warps


# -- embeddings --------------------------------------------------------------------------------
def row_token(k, p, row):
    """Address of a row's embedding (embed.py); rows beyond the chunk get the last one's."""
    at = p.position + cutlass.min(row, p.rows - 1)
    return token_address(
        k, ptx_read("ld.global.b32 {$w0}, [{$r0}];", [Int32], p.tokens + Int64(at) * 4)
    )


@cute.jit
def embed_rows(k: cutlass.Constexpr, p: cutlass.Constexpr):
    """x = the tokens' embeddings: copies of 16-byte vectors, (32 columns, 8 rows) a warp at a
    time over all warps of the grid."""
    c, x = k.c, p.act + Int64(PromptBuffers.of(k.c).x)
    chunks = c.shape.hidden // CHUNK
    i = k.wid * c.ctas + k.bid
    while i < (p.rows + 7) // 8 * chunks:
        chunk, block = i % chunks, i // chunks
        row = block * 8 + (k.lane >> 2)
        col = chunk * CHUNK + (k.lane & 3) * 4
        words = sync.ld_constant_words(row_token(k, p, row) + column_offset(k, col))
        if row < p.rows:
            to = x + Int64(chunk * COLUMNS_BYTES + block * 512 + k.lane * 16)
            sync.ptx_do("st.global.v4.b32 [{$r0}], {{$r1},{$r2},{$r3},{$r4}};", to, *words)
        i = i + c.warps * c.ctas


@cute.jit
def embed_residual(k: cutlass.Constexpr, p: cutlass.Constexpr, phase: Int32):
    """The same as fp32 for this CTA's own columns; phase: of some `o`, whose tiles they are."""
    c, residual = k.c, p.act + Int64(PromptBuffers.of(k.c).residual)
    tile0, n, _, _ = plan_entry(k, phase)
    i = k.wid
    while i < n * p.row_tiles:
        tile, row_tile = tile0 + (i // p.row_tiles) * tile_stride(c, "o"), i % p.row_tiles
        row = row_tile * ROW_TILE + (k.lane >> 2)
        at = column_offset(k, tile * TILE + 2 * (k.lane & 3))
        lo = ptx_read("ld.global.nc.b32 {$w0}, [{$r0}];", [Uint32], row_token(k, p, row) + at)
        hi = ptx_read("ld.global.nc.b32 {$w0}, [{$r0}];", [Uint32], row_token(k, p, row + 8) + at)
        to = residual + Int64((tile * ROW_TILES + row_tile) * 512 + k.lane * 16)
        store_quad(to, [*unpack_pair(lo), *unpack_pair(hi)])
        i = i + c.warps
