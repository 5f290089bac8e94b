"""What both halves of the row form share: where a matrix finds and leaves activations, squares
for RMSNorm, stages of the ring, and the way of finished sums into plain buffers.

A warp has a tile's sums of a row tile (16 rows x 8 columns) as the mma leaves them: four values a
lane, columns 2 t, 2 t + 1 of rows g and g + 8 (lane = 4 g + t).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.config import TILE
from cute_kernels.gpu.core import arg
from cute_kernels.gpu.epilogue import norm_factor, silu_times
from cute_kernels.gpu.fragments import bf16_pair, bf16_product
from cute_kernels.gpu.gemm import add_square, plan_entry
from cute_kernels.gpu.prompt_plan import COLUMNS_BYTES, ROW_TILE, ROW_TILES, PromptBuffers
from cute_kernels.gpu.sync import ptx_read


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


# -- a chunk of activations: (this lane's vector of row g, of row g + 8) --------------------------
def square_sums(sums, vectors):
    """Adds a chunk's squares to four sums for each of rows g and g + 8, in the decode form's order
    of additions (gemm.row_squares)."""
    for half, vector in enumerate(vectors):
        for at, word in enumerate(vector):
            sums[half][at] = add_square(sums[half][at], word)


def quad_square_sum(sums):
    """The four sums of a row, and those of the row's other lanes."""
    total = (sums[0] + sums[1]) + (sums[2] + sums[3])
    total = total + cute.arch.shuffle_sync_bfly(total, offset=1)
    return total + cute.arch.shuffle_sync_bfly(total, offset=2)


def add_squares(norms, sums):
    for half in range(2):
        norms[half] = norms[half] + quad_square_sum(sums[half])


def scaled_rows(vectors, at):
    """A chunk times the final norm's weights, products rounded to bf16 (gemm.scale_by_norm)."""
    weights = sync.ld_constant_words(at)
    return [[bf16_product(x, w) for x, w in zip(v, weights, strict=True)] for v in vectors]


def norm_weights_at(k, source, at):
    """This lane's weights of the final norm for the chunk at `at` of the activations at source."""
    chunk = Int32((at - source) >> (COLUMNS_BYTES.bit_length() - 1))
    return arg(k, Arg.FINAL_NORM) + Int64(chunk * 64 + (k.lane & 3) * 16)


# -- stages ------------------------------------------------------------------------------------
def stage_place(k, stage, i):
    """Shared address of this lane in the i-th stage from `stage` on."""
    at = stage + i
    at = at - sync.as_int(sync.select(at >= k.ring.n, Uint32(k.ring.n), Uint32(0)))
    return k.ring.base + at * k.ring.stage_bytes + k.lane * 16


@cute.jit
def release_stages(k: cutlass.Constexpr, stage: Int32, count: Int32, seen: Uint32):
    """A warp gives back `count` stages from `stage` on; seen: depends on all its loads of them."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        for _ in cutlass.range(count, unroll=1):
            sync.release_after(k.ring.empty + stage * 8, [seen], k.zero)
            stage = stage + 1
            if stage == k.ring.n:
                stage = Int32(0)


# -- global memory behind a grid barrier -------------------------------------------------------
def load_quad(at):
    return ptx_read("ld.global.v4.f32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];", [Float32] * 4, at)


def store_quad(at, v):
    sync.ptx_do("st.global.v4.f32 [{$r0}], {{$r1},{$r2},{$r3},{$r4}};", at, *v)


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
