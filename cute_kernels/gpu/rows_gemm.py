"""One matrix of the step for 17 to 256 rows: y = epilogue(x @ W^T), the *row form*.

Consumer warps split the rows: a warp takes row tiles of 16 (up to `rounds` of them) and all of K,
so sums stay in registers until they are finished. Weights come from the decode form's stream. What
bounds this form is reading activations from L2, so a *group* of tiles is multiplied in one sweep
over K: the sweep goes slice by slice (the weights of some of the decode form's K warps, a stage of
the ring per tile), and in a slice over the warp's row tiles; a fragment of activations, read ahead
with plain loads, meets all tiles of the group.

Bits. An output is the decode form's to the last bit: the partial sum of every K warp there is
reproduced (chunk i, k16 step s -> chain s of two; the chains added), the partial sums are added in
warp order, then `down`'s parts in rank order; the sum of squares behind RMSNorm likewise. Rows do
not meet in an mma, so a result does not depend on the other rows either.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.config import CHUNK, TILE
from cute_kernels.gpu.core import arg
from cute_kernels.gpu.epilogue import norm_factor, silu_times
from cute_kernels.gpu.fragments import bf16_pair, bf16_product, mma
from cute_kernels.gpu.gemm import add_square, plan_entry, warp_chunks
from cute_kernels.gpu.keys import load_words
from cute_kernels.gpu.prompt_plan import (
    COLUMNS_BYTES,
    ROW_TILE,
    ROW_TILES,
    PromptBuffers,
    chunks_ahead,
    group_tiles,
    rounds,
    slice_count,
    slice_warps,
)
from cute_kernels.gpu.ring import advance, issue
from cute_kernels.gpu.rows_share import (
    Share,
    chunk_at,
    chunk_range,
    gather_sums,
    leave_sums,
    part_chunk,
    start_sums,
)
from cute_kernels.gpu.sync import ptx_read
from cute_kernels.gpu.tiles import tile_stride


class Rows:
    """Trace-time bundle of a step: rows, position (of its first row), row_tiles (Int32); act
    (Int64, prompt_plan.PromptBuffers). draft: whether the build speculates; if so, tree: Int32, 1
    where the rows are those of Arg.ROW_TABLE, 0 where they are a prompt's."""


class Ends:
    """Trace-time: source and to, where a matrix finds and leaves activations of the row form (of
    `lm`: logits). Where sums go into the residual (o, down, fc): fresh, None or Int32: where not 0
    the residual counts as 0; tap, None or Int64: where the rows go besides, 0: nowhere."""

    def __init__(self, source, to, fresh=None, tap=None):
        self.source, self.to, self.fresh, self.tap = source, to, fresh, tap


# -- global memory behind a grid barrier -------------------------------------------------------
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


@cute.jit
def store_tap(k: cutlass.Constexpr, p: cutlass.Constexpr, tap: Int64, row_tile: Int32, tile: Int32,
              words: cutlass.Constexpr):  # fmt: skip
    if tap != 0:
        store_tile(k, p, tap, row_tile, tile, words)


def add_residual(k, p, ends, row_tile, tile, v):
    """The fp32 residual of this CTA's columns: read, added to, kept; and the sum as bf16."""
    at = p.act + Int64(PromptBuffers.of(k.c).residual)
    at = at + Int64((tile * ROW_TILES + row_tile) * 512 + k.lane * 16)
    old = load_quad(at)
    if ends.fresh is not None:
        old = [sync.choose(ends.fresh, 0.0, x) for x in old]
    v = [x + r for x, r in zip(v, old, strict=True)]
    store_quad(at, v)
    store_tile(k, p, ends.to, row_tile, tile, tile_words(v))
    if ends.tap is not None:
        store_tap(k, p, ends.tap, row_tile, tile, tile_words(v))


@cute.jit
def store_logits(k: cutlass.Constexpr, p: cutlass.Constexpr, logits: Int64, row_tile: Int32,
                 tile: Int32, v: cutlass.Constexpr):  # fmt: skip
    """16 rows x 8 columns of fp32 [rows, Config.logit_stride]."""
    row, col = row_tile * ROW_TILE + (k.lane >> 2), tile * TILE + 2 * (k.lane & 3)
    at = logits + (Int64(row) * k.c.logit_stride + Int64(col)) * 4
    for h in cutlass.range_constexpr(2):
        if row + 8 * h < p.rows:
            to = at + 8 * h * k.c.logit_stride * 4
            sync.ptx_do("st.global.v2.f32 [{$r0}], {{$r1},{$r2}};", to, v[2 * h], v[2 * h + 1])


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


def scaled_rows(vectors, at):
    """A chunk times the final norm's weights, products rounded to bf16 (gemm.scale_by_norm)."""
    weights = sync.ld_constant_words(at)
    return [[bf16_product(x, w) for x, w in zip(v, weights, strict=True)] for v in vectors]


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


# -- the phase ---------------------------------------------------------------------------------
def finish(k, p, g, ends, row_tile, tile, v, norms):
    """Finished sums of a tile -> where they go."""
    if g.normed:
        f = [norm_factor(k.c, norms[h]) for h in range(2)]
        v = [x * f[e >> 1] for e, x in enumerate(v)]
    if g.name == "qkv":
        store_tile(k, p, ends.to, row_tile, tile, tile_words(v))
    elif g.name == "gu":
        store_gated(k, p, ends.to, row_tile, tile, v)
    elif g.name == "lm":
        store_logits(k, p, ends.to, row_tile, tile, v)
    elif g.split > 1:
        parts = p.act + Int64(PromptBuffers.of(k.c).parts)
        store_quad(parts + part_at(k, tile, k.rank, row_tile), v)
    else:
        add_residual(k, p, ends, row_tile, tile, v)


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


def norm_at(k, offset):
    """This lane's weights of the final norm for the chunk in which `offset` lies."""
    chunk = Int32(offset >> (COLUMNS_BYTES.bit_length() - 1))
    return arg(k, Arg.FINAL_NORM) + Int64(chunk * 64 + (k.lane & 3) * 16)


@cute.jit
def multiply_slice(
    k: cutlass.Constexpr, p: cutlass.Constexpr, g: cutlass.Constexpr, w: cutlass.Constexpr,
    source: Int64, places: cutlass.Constexpr, at: Int64, q: Int32, ahead: cute.Tensor,
    totals: cute.Tensor, norms: cute.Tensor,
):  # fmt: skip
    """Slice q's part of all sums of this warp. w: its Share. source: of all activations; at: this
    lane's of its first row tile at the slice's first chunk. Returns a word that depends on every
    load of weights."""
    c, n, chunks = k.c, group_tiles(k.c, g.name), warp_chunks(k, g)
    whole, slices = slice_warps(c, g.name) * chunks, slice_count(c, g.name)  # chunks of a slice
    round_bytes, seen, row_tile = w.stride * 1024, Uint32(0), w.tile
    begin = at - Int64((slices - 1) * whole * COLUMNS_BYTES)  # of the sweep, from the last slice
    low, high = chunk_range(w, q * whole, whole)
    for _ in cutlass.range(rounds(c, g.name), unroll=1):
        if row_tile < p.row_tiles:
            after = at + round_bytes  # the next row tile, the next slice, or the next sweep
            if row_tile + w.stride >= p.row_tiles:
                after = at + whole * COLUMNS_BYTES - Int64((row_tile - w.tile) * 1024)
                if q == slices - 1:
                    after = begin - Int64((row_tile - w.tile) * 1024)
            after, offset = after - whole * COLUMNS_BYTES, low // chunks * 512
            for first in cutlass.range(low, high, chunks, unroll=1):
                next_chunks = [first + chunks_ahead(c, g.name) + i for i in range(chunks)]
                sources = [chunk_at(w, at, after, q * whole, i, whole) for i in next_chunks]
                mine, scales = [place + offset for place in places], None
                if cutlass.const_expr(g.name == "lm"):
                    scales = norm_at(k, at - source + Int64(first) * COLUMNS_BYTES)
                k_warp_products(k, g, n, mine, ahead, sources, totals, norms, scales)
                for j in cutlass.range_constexpr(n):
                    seen = seen | sync.as_bits(totals[4 * j])
                if cutlass.const_expr(len(w.ways) > 1):
                    if w.part > 0:
                        leave_sums(k, g, w, q * slice_warps(c, g.name) + first // chunks, totals,
                                   norms)  # fmt: skip
                offset = offset + 512
        at, row_tile = at + round_bytes, row_tile + w.stride
        begin = begin + round_bytes
        rotate(totals, 4 * n)
        rotate(norms, 2)
    return seen


def stage_place(k, stage, i):
    """Shared address of this lane in the i-th stage from `stage` on."""
    at = stage + i
    at = at - sync.as_int(sync.select(at >= k.ring.n, Uint32(k.ring.n), Uint32(0)))
    return k.ring.base + at * k.ring.stage_bytes + k.lane * 16


def group_size(k, g, n, done):
    """Tiles of the next group: the rest, evened out."""
    most = group_tiles(k.c, g.name)
    groups = (n - done + (most - 1)) // most
    return (n - done + groups - 1) // groups


@cute.jit
def rows_gemm(
    k: cutlass.Constexpr, p: cutlass.Constexpr, g: cutlass.Constexpr, ends: cutlass.Constexpr,
    phase: Int32, stage: Int32, parity: Int32,
):  # fmt: skip
    """Consumer warps' part of one matrix. Returns the place in the ring. Where `down` is split its
    parts still have to be added: `add_parts`, a barrier later."""
    c, n_group, w = k.c, group_tiles(k.c, g.name), Share(k, p, g)
    src = ends.source + Int64(w.tile * 1024 + k.lane * 16)
    if cutlass.const_expr(g.split > 1):
        src = src + Int64(k.rank * (g.slab // CHUNK * COLUMNS_BYTES))
    tile0, n, _, _ = plan_entry(k, phase)
    slices, slice_bytes = slice_count(c, g.name), slice_warps(c, g.name) * warp_chunks(k, g)
    totals = cute.make_rmem_tensor(cute.make_layout(rounds(c, g.name) * 4 * n_group), Float32)
    norms = cute.make_rmem_tensor(cute.make_layout(rounds(c, g.name) * 2), Float32)
    depth = chunks_ahead(c, g.name)
    ahead = cute.make_rmem_tensor(cute.make_layout(8 * depth), Uint32)
    keep(ahead, [load_rows(src + part_chunk(w, d) * COLUMNS_BYTES) for d in range(depth)])
    done = Int32(0)
    while done < n:
        left = group_size(k, g, n, done)
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
            seen = multiply_slice(k, p, g, w, ends.source, places, at, q, ahead, totals, norms)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                for _ in cutlass.range(left, unroll=1):
                    sync.release_after(k.ring.empty + first * 8, [seen], k.zero)
                    first = first + 1
                    if first == k.ring.n:
                        first = Int32(0)
            at = at + slice_bytes * COLUMNS_BYTES
        row_tile = w.tile
        if cutlass.const_expr(len(w.ways) > 1):
            if w.parts > 1:
                row_tile = gather_sums(k, g, w, totals, norms)
        for _ in cutlass.range(rounds(c, g.name), unroll=1):
            if row_tile < p.row_tiles:
                tile = tile0 + done * tile_stride(c, g.name)
                finish_row_tile(k, p, g, ends, row_tile, tile, left, totals, norms)
            row_tile = row_tile + w.stride
            rotate(totals, 4 * n_group)
            rotate(norms, 2)
        done = done + left
    return stage, parity


@cute.jit
def produce_rows(
    k: cutlass.Constexpr, g: cutlass.Constexpr, n: Int32, at: Int64,
    stage: Int32, parity: Int32, issued: Int32, landed: Int32, landed_parity: Int32,
):  # fmt: skip
    """The producer warp's part: the weights of n tiles, whose units begin at `at`, in the order in
    which `rows_gemm` takes them: [group][slice][tile]. Returns the state of `ring.issue`."""
    c = k.c
    slices, width = slice_count(c, g.name), slice_warps(c, g.name) * 512
    pieces = 1 if slices == 1 else warp_chunks(k, g)
    n_bytes, done = Int32(g.unit_bytes // slices), Int32(0)
    while done < n:
        left = group_size(k, g, n, done)
        for q in cutlass.range(slices, unroll=1):
            unit = at + Int64(q * width)
            for _ in cutlass.range(left, unroll=1):
                stage, parity, issued, landed, landed_parity = issue(
                    k.ring, unit, n_bytes, stage, parity, issued, landed, landed_parity,
                    pieces, c.warps * 512,
                )  # fmt: skip
                unit = unit + g.unit_bytes
        at = at + Int64(left) * g.unit_bytes
        done = done + left
    return stage, parity, issued, landed, landed_parity


def part_sum(k, p, row_tile, tile):
    base = p.act + Int64(PromptBuffers.of(k.c).parts)
    parts = [load_quad(base + part_at(k, tile, q, row_tile)) for q in range(k.c.team)]
    v = [Float32(0.0)] * 4
    for part in parts:
        v = [x + p for x, p in zip(v, part, strict=True)]
    return v


@cute.jit
def add_parts(k: cutlass.Constexpr, p: cutlass.Constexpr, ends: cutlass.Constexpr, phase: Int32):
    """The owner of a tile of a split `down` adds its team's parts in rank order."""
    c = k.c
    tile0, n, _, _ = plan_entry(k, phase)
    own = (n - k.rank + c.team - 1) // c.team
    i = k.wid
    while i < own * p.row_tiles:
        tile, row_tile = tile0 + (i // p.row_tiles) * c.team + k.rank, i % p.row_tiles
        add_residual(k, p, ends, row_tile, tile, part_sum(k, p, row_tile, tile))
        i = i + c.warps
