"""Attention of the drafter's block: up to 16 rows at positions n, n + 1, ... after n cached keys.

A layer may see a window of W positions (0: all) and may be causal: a row at p sees keys in
(p - W, p], and where the layer is not causal the block's rows in (p, p + W) too, or all of them.

Nobody compares these sums with another order of theirs, so all keys come in blocks of the form of
attention_blocks.py, cut by masks: the cached keys that some row may see, in absolute blocks of 64,
and last the block's own rows, whose K and V are in shared memory only. Block i of them is split
i mod `splits`'s; parts, hand-off and merge are attention.py's.

Scores that a row may not see are masked by select; V that nobody has written yet is zeroed, since
0 x NaN is NaN. n is Desc.POSITION, and the keys of Desc.CONTEXT positions below it are written by
this step itself: the producer waits for them at the first block that holds one (context.wait_keys).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.attention import share_part, take_inputs
from cute_kernels.gpu.attention_blocks import (
    NEG_INF,
    block_scores,
    block_values,
    filled,
    softmax_block,
    sums_seen,
)
from cute_kernels.gpu.attention_merge import publish_row, row_parts, take_parts
from cute_kernels.gpu.attention_plan import ROWS, halves, stages_per_block
from cute_kernels.gpu.attention_stream import Places, desc_int, load_factors
from cute_kernels.gpu.board import Desc
from cute_kernels.gpu.context import wait_keys
from cute_kernels.gpu.core import arg
from cute_kernels.gpu.kv_layout import PAGE
from cute_kernels.gpu.pages import block_at, issue_block, page_of
from cute_kernels.gpu.prompt_attention import value_masks
from cute_kernels.gpu.ring import advance
from cute_kernels.gpu.sync import ptx_read
from cute_kernels.gpu.tiles import Buffers

__all__ = ["begin_produce", "begin_step", "produce_kv", "run_attention"]


class DraftPlaces(Places):
    norms, rope_table, tail = Arg.DRAFT_QK_NORM, Arg.DRAFT_ROPE, False

    def __init__(self, k):
        super().__init__(k)
        self.positions, self.normed = None, True


# -- which keys ----------------------------------------------------------------------------------
def layer_mask(k, layer):
    """(window, causal) of a layer."""
    at = arg(k, Arg.DRAFT_MASK) + Int64(layer) * 8
    return ptx_read("ld.global.nc.v2.b32 {{$w0},{$w1}}, [{$r0}];", [Int32] * 2, at)


@cute.jit
def cached_blocks(n: Int32, window: Int32):
    """(first block, blocks) of the cached keys that some row of the block may see."""
    first = Int32(0)
    if window > 0:
        first = cutlass.max(n - window + 1, 0) >> 6
    return first, ((n + 63) >> 6) - first


@cute.jit
def row_reach(k: cutlass.Constexpr, h: cutlass.Constexpr, n: Int32, rows: Int32, window: Int32,
              causal: Int32):  # fmt: skip
    """(first position, the one after the last) that this lane's row in half h may see."""
    row = (k.lane >> 2) + 8 * h
    low, end = Int32(0), rows
    if window > 0:
        low, end = cutlass.max(n + row - window + 1, 0), cutlass.min(rows, row + window)
    if causal != 0:
        end = row + 1
    return low, n + end


def seen_from(base, low, end):
    """Does a row that sees [low, end) see any of the 32 keys from position `base` on?"""
    return cutlass.max(base, low) < cutlass.min(base + 32, end)


def mask_scores(k, tiles, base, reach):
    """Scores of keys that a row does not see become -inf. base: position of the first of 32."""
    out = []
    for j, tile in enumerate(tiles):
        position = base + (8 * j + 2 * (k.lane & 3))
        masked = []
        for e, v in enumerate(tile):
            low, end = reach[e // 2]
            seen = (position + e % 2 >= low) & (position + e % 2 < end)
            masked.append(sync.choose(seen, v, NEG_INF))
        out.append(masked)
    return out


# -- consumers -----------------------------------------------------------------------------------
@cute.jit
def begin_step(k: cutlass.Constexpr, rows: Int32):
    """Consumer warps, once a DRAFT step that has rows: their rotary factors. A barrier of the
    consumers must follow."""
    p = DraftPlaces(k)
    if p.kv_head < k.c.shape.kv_heads:
        load_factors(k, p, rows)


@cute.jit
def attend_masked(k: cutlass.Constexpr, q: cute.Tensor, m: cute.Tensor, den: cute.Tensor,
                  o: cute.Tensor, half: Int32, keys: Int32, values: Int32, base: Int32,
                  written: Int32, reach: cutlass.Constexpr, rows: Int32):  # fmt: skip
    """attention_blocks.attend_block with masks. base: position of the block's first key. written:
    the position behind the last that has a V. reach: of row_reach, for rows g and g + 8."""
    row_bytes = 2 * k.c.shape.head_dim
    lower, base = half * (32 * row_bytes), base + half * 32
    for _ in cutlass.range(2 // halves(k.c), unroll=1):
        tiles = mask_scores(k, block_scores(k, q, keys + lower), base, reach)
        valid = [seen_from(base, *reach[h]) for h in range(2)]
        prob = filled(16, 0.0)
        softmax_block(k, tiles, valid, rows, prob, m, den, o)
        block_values(k, o, prob, values + lower, value_masks(k, written - base))
        lower, base = lower + 32 * row_bytes, base + 32


@cute.jit
def run_blocks(k: cutlass.Constexpr, p: cutlass.Constexpr, q: cute.Tensor, m: cute.Tensor,
               den: cute.Tensor, o: cute.Tensor, half: Int32, rows: Int32, n: Int32, window: Int32,
               causal: Int32, first: Int32, blocks: Int32, stage: Int32,
               parity: Int32):  # fmt: skip
    """This warp's keys of every block of this CTA: cached ones, then perhaps the step's own."""
    c, row_bytes = k.c, 2 * k.c.shape.head_dim
    low0, end0 = row_reach(k, 0, n, rows, window, causal)
    low1, end1 = row_reach(k, 1, n, rows, window, causal)
    block = p.split
    while block <= blocks:
        key_stage, value_stage = stage, stage
        keys, values = p.new, p.new + ROWS * row_bytes
        base, written = n, n + rows
        if block < blocks:
            base, written = (first + block) * PAGE, n
            sync.wait_parity(k.ring.full + stage * 8, parity)
            stage, parity = advance(k.ring, stage, parity)
            if cutlass.const_expr(stages_per_block(c) == 2):
                value_stage = stage
                sync.wait_parity(k.ring.full + stage * 8, parity)
                stage, parity = advance(k.ring, stage, parity)
            keys = k.ring.base + key_stage * k.ring.stage_bytes
            values = k.ring.base + value_stage * k.ring.stage_bytes
            if cutlass.const_expr(stages_per_block(c) == 1):
                values = values + PAGE * row_bytes
        else:
            sync.consumer_sync(c.warps * 32)  # the rows are in p.new
        seen = Uint32(0)
        if k.wid < c.group_heads * halves(c):
            # a cached key lies before every row, so that nothing but the window cuts it
            reach = [(low0, cutlass.min(end0, written)), (low1, cutlass.min(end1, written))]
            attend_masked(k, q, m, den, o, half, keys, values, base, written, reach, rows)
            seen = sums_seen(k, o)
        cute.arch.sync_warp()
        if block < blocks:
            with cute.arch.elect_one():
                sync.release_after(k.ring.empty + key_stage * 8, [seen], k.zero)
                if cutlass.const_expr(stages_per_block(c) == 2):
                    sync.release_after(k.ring.empty + value_stage * 8, [seen], k.zero)
        block = block + c.splits
    return stage, parity


@cute.jit
def sum_blocks(k: cutlass.Constexpr, p: cutlass.Constexpr, rows: Int32, layer: Int32, cur: Int64,
               n: Int32, window: Int32, causal: Int32, first: Int32, blocks: Int32, stage: Int32,
               parity: Int32):  # fmt: skip
    """A CTA with blocks: its part of every row."""
    c, b, d = k.c, Buffers.of(k.c), k.c.shape.head_dim
    head, half = k.wid % c.group_heads, k.wid // c.group_heads
    words = cute.make_rmem_tensor(cute.make_layout(12 * d // 32), Uint32)
    own = p.split == (blocks & (c.splits - 1))
    take_inputs(k, p, rows, layer, head, own, cur + b.q, words)
    m, den, o = filled(2, NEG_INF), filled(2, 0.0), filled(d // 2, 0.0)
    stage, parity = run_blocks(
        k, p, words, m, den, o, half, rows, n, window, causal, first, blocks, stage, parity
    )
    has_head = Boolean(k.wid < c.group_heads * halves(c))
    share_part(k, p, head, half, rows, has_head, m, den, o, cur + b.part)
    return stage, parity


@cute.jit
def merge_rows(k: cutlass.Constexpr, p: cutlass.Constexpr, rows: Int32, blocks: Int32,
               cur: Int64):  # fmt: skip
    """Rows turn, turn + splits, ... by a warp a query head."""
    c, b = k.c, Buffers.of(k.c)
    if k.wid < c.group_heads:
        u = cute.make_rmem_tensor(cute.make_layout(c.splits * c.shape.head_dim // 64 + 2), Uint32)
        row = p.turn
        while row < rows:
            take_parts(k, u, k.wid, row_parts(k, p, cur + b.part, row), blocks + 1)
            publish_row(k, p, u, k.wid, row, Int32(0), cur + b.a)
            row = row + c.splits


@cute.jit
def run_attention(k: cutlass.Constexpr, rows: Int32, layer: Int32, cur: Int64, stage: Int32,
                  parity: Int32):  # fmt: skip
    """Consumer warps, between qkv and o of a layer of the drafter: attention.run_attention's words.

    rows: of the block, 1 to 16. Returns the ring's state."""
    p = DraftPlaces(k)
    if p.kv_head < k.c.shape.kv_heads:
        window, causal = layer_mask(k, layer)
        n = desc_int(k, Desc.POSITION)
        first, blocks = cached_blocks(n, window)
        if p.split <= blocks:
            stage, parity = sum_blocks(
                k, p, rows, layer, cur, n, window, causal, first, blocks, stage, parity
            )
        merge_rows(k, p, rows, blocks, cur)
    return stage, parity


# -- the producer --------------------------------------------------------------------------------
def begin_produce(k):
    """The producer warp, once a DRAFT step that has rows. Returns what `produce_kv` needs."""
    n = desc_int(k, Desc.POSITION)
    return n, n - desc_int(k, Desc.CONTEXT), arg(k, Arg.DRAFT_KV)


@cute.jit
def produce_kv(
    k: cutlass.Constexpr,
    step: cutlass.Constexpr,
    layer: Int32,
    stage: Int32,
    parity: Int32,
    issued: Int32,
    landed: Int32,
    landed_parity: Int32,
):
    """The producer warp of every CTA, behind qkv's weights of the layer: this CTA's cached blocks
    of it. Pages are looked up by 32, a lane each."""
    c, s, p = k.c, k.c.shape, DraftPlaces(k)
    n, complete, pool = step
    window, _ = layer_mask(k, layer)
    first, blocks = cached_blocks(n, window)
    count = cutlass.max(blocks - p.split + c.splits - 1, 0) // c.splits
    if p.kv_head >= s.kv_heads:
        count = Int32(0)
    last = cutlass.max(first + blocks - 1, 0)
    told, pages = Int32(layer > 0), Int32(0)
    for i in cutlass.range(count, unroll=1):
        if (i & 31) == 0:
            ahead = first + p.split + (i + k.lane) * c.splits
            pages = page_of(k, cutlass.min(ahead, last))
        if told == 0:
            if (first + p.split + i * c.splits + 1) * PAGE > complete:
                wait_keys(k)
                told = Int32(1)
        page = cute.arch.shuffle_sync(pages, i & 31)
        stage, parity, issued, landed, landed_parity = issue_block(
            k, block_at(k, pool, k.draft_layers, page, layer, p.kv_head),
            stage, parity, issued, landed, landed_parity,
        )  # fmt: skip
    if told == 0:
        wait_keys(k)
    return stage, parity, issued, landed, landed_parity
