"""Causal attention of a prompt chunk: up to 256 rows whose first position is a multiple of 64.

Before it, `keys.write_keys` puts the chunk's keys and values into the KV pages; a grid barrier
later every block of the context is read from there, through the weight ring. A row walks the
absolute blocks of 64 positions from 0 up to its own with one running softmax: its arithmetic
depends on the tokens before it and on its position alone, not on the chunk's length, its start or
its other rows. Keys and values that later rows read for ever come of these sums: probabilities
keep 16 bits in them (`add_values`), not bf16's 8.

CTAs take tasks (kv head, row tiles; prompt_plan.Task), a warp one query head of 16 rows. Scores of
keys behind a row are masked by select; V of positions that nobody has written yet is zeroed, since
0 x NaN is NaN. Layout of blocks: kv_layout.py; head_dim 64: K and V in one stage of the ring,
head_dim 128: a stage each.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.attention_blocks import (
    NEG_INF,
    block_scores,
    block_values,
    filled,
    quad_sum,
    softmax_halves,
    sums_seen,
)
from cute_kernels.gpu.attention_plan import stages_per_block
from cute_kernels.gpu.config import KV_COPY
from cute_kernels.gpu.core import arg
from cute_kernels.gpu.fragments import bf16_pair
from cute_kernels.gpu.keys import head_vectors, rotated
from cute_kernels.gpu.kv_layout import PAGE
from cute_kernels.gpu.pages import block_at, issue_block, page_of
from cute_kernels.gpu.prompt_plan import (
    COLUMNS_BYTES,
    ROW_TILE,
    PromptBuffers,
    task_count,
    task_tiles,
)
from cute_kernels.gpu.ring import advance
from cute_kernels.gpu.rotary import norm_weights
from cute_kernels.gpu.rows_ends import store_tile


# -- half a block --------------------------------------------------------------------------------
def mask_scores(k, tiles, place):
    """Scores of keys behind a row become -inf. place: the last key of these 32 that counts for row
    g; 8 more count for row g + 8."""
    out = []
    for j, tile in enumerate(tiles):
        first = 8 * j + 2 * (k.lane & 3)
        out.append([sync.choose(first + e % 2 <= place + e // 2 * 8, v, NEG_INF)
                    for e, v in enumerate(tile)])  # fmt: skip
    return out


def value_masks(k, live):
    """For block_values: V of the first `live` of 32 keys counts. What lies behind may be anything,
    and 0 x NaN is NaN."""
    first = live - 2 * (k.lane & 3)
    return [[pair_mask(first - u * 16 - x * 8) for x in range(2)] for u in range(2)]


def pair_mask(left):
    """Bits of a register of two keys of which the first `left` count."""
    low = sync.select(left > 0, Uint32(0xFFFF), Uint32(0))
    return sync.select(left > 1, Uint32(0xFFFFFFFF), low)


def attend_half(k, q, m, den, o, keys_at, values_at, place, live):
    """32 keys: one step of the running softmax."""
    tiles = mask_scores(k, block_scores(k, q, keys_at), place)
    p = filled(16, 0.0)
    softmax_halves(k, tiles, {0: True, 1: True}, p, m, den, o)
    block_values(k, o, p, values_at, value_masks(k, live), fine=True)


# -- tasks ---------------------------------------------------------------------------------------
def task_blocks(k, p, index):
    """(first row tile, KV blocks) of a task."""
    first = index // k.c.shape.kv_heads * task_tiles(k.c)
    end = p.position + cutlass.min((first + task_tiles(k.c)) * ROW_TILE, p.rows)
    return first, (end + (PAGE - 1)) // PAGE


@cute.jit
def walk_blocks(
    k: cutlass.Constexpr, q: cute.Tensor, m: cute.Tensor, den: cute.Tensor, o: cute.Tensor,
    own: Int32, live: Int32, place: Int32, blocks: Int32, stage: Int32, parity: Int32,
):  # fmt: skip
    """All of a task's blocks: those before `own` whole, `own` masked, later ones (another warp's)
    passed on. own < 0: this warp only passes stages on."""
    c, half_bytes = k.c, PAGE * k.c.shape.head_dim  # of K, and of V
    for block in cutlass.range(blocks, unroll=1):
        first, second = stage, stage
        sync.wait_parity(k.ring.full + stage * 8, parity)
        stage, parity = advance(k.ring, stage, parity)
        keys_at = k.ring.base + first * k.ring.stage_bytes
        values_at = keys_at + KV_COPY // 2
        if cutlass.const_expr(stages_per_block(c) > 1):
            second = stage
            sync.wait_parity(k.ring.full + stage * 8, parity)
            stage, parity = advance(k.ring, stage, parity)
            values_at = k.ring.base + second * k.ring.stage_bytes
        seen = Uint32(0)
        if block <= own:
            here, alive = Int32(PAGE), Int32(PAGE)  # all keys count
            if block == own:
                here, alive = place, live
            for _ in cutlass.range(2, unroll=1):
                attend_half(k, q, m, den, o, keys_at, values_at, here, alive)
                keys_at, values_at = keys_at + half_bytes, values_at + half_bytes
                here, alive = here - PAGE // 2, alive - PAGE // 2
            seen = sums_seen(k, o)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            sync.release_after(k.ring.empty + first * 8, [seen], k.zero)
            if cutlass.const_expr(stages_per_block(c) > 1):
                sync.release_after(k.ring.empty + second * 8, [seen], k.zero)
    return stage, parity


def load_head(k, p, q, column, layer, row_tile, positions):
    """Q of 16 rows of the query head whose first column is given: [row g, row g + 8][words].
    positions: of these two rows."""
    base, weights = p.act + Int64(PromptBuffers.of(k.c).q), norm_weights(k, layer, 0)
    rope = arg(k, Arg.ROPE)
    for h in range(2):
        vectors = head_vectors(k, base, column, row_tile * 2 + h, COLUMNS_BYTES)
        words = [w for v in rotated(k, rope, vectors, positions[h], weights) for w in v]
        for i, word in enumerate(words):
            q[h * len(words) + i] = word


def load_queries(k, p, q, head, layer, row_tile):
    row = row_tile * ROW_TILE + (k.lane >> 2)
    positions = [p.position + cutlass.min(row + 8 * h, p.rows - 1) for h in range(2)]
    load_head(k, p, q, head * k.c.shape.head_dim, layer, row_tile, positions)


def store_output(k, p, head, row_tile, den, o):
    base = p.act + Int64(PromptBuffers.of(k.c).a)
    inverse = [1.0 / quad_sum(den[h]) for h in range(2)]
    for n in range(k.c.shape.head_dim // 8):
        v = [o[4 * n + e] * inverse[e >> 1] for e in range(4)]
        tile = head * (k.c.shape.head_dim // 8) + n
        store_tile(k, p, base, row_tile, tile, [bf16_pair(*v[:2]), bf16_pair(*v[2:])])


@cute.jit
def attend(k: cutlass.Constexpr, p: cutlass.Constexpr, layer: Int32, stage: Int32, parity: Int32):
    """Consumer warps' part: attention output of the chunk in a. Returns the place in the ring."""
    c, d = k.c, k.c.shape.head_dim
    keys_written(k, k.bid < task_count(c, p.row_tiles))
    q = cute.make_rmem_tensor(cute.make_layout(d // 4), Uint32)
    m = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    den = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    o = cute.make_rmem_tensor(cute.make_layout(d // 2), Float32)
    index = k.bid
    while index < task_count(c, p.row_tiles):
        first, blocks = task_blocks(k, p, index)
        head = index % c.shape.kv_heads * c.group_heads + k.wid % c.group_heads
        row_tile = first + k.wid // c.group_heads
        active = (k.wid < c.group_heads * task_tiles(c)) & (row_tile < p.row_tiles)
        own, live, place = Int32(-1), Int32(0), Int32(0)
        zero_state(k, q, m, den, o)
        if active:
            start = p.position + row_tile * ROW_TILE
            own, place = start // PAGE, start % PAGE + (k.lane >> 2)
            live = start % PAGE + cutlass.min(p.rows - row_tile * ROW_TILE, ROW_TILE)
            load_queries(k, p, q, head, layer, row_tile)
        stage, parity = walk_blocks(k, q, m, den, o, own, live, place, blocks, stage, parity)
        if active:
            store_output(k, p, head, row_tile, den, o)
        index = index + c.ctas
    return stage, parity


def zero_state(k, q, m, den, o):
    for i in range(k.c.shape.head_dim // 4):
        q[i] = Uint32(0)
    for h in range(2):
        m[h], den[h] = Float32(NEG_INF), Float32(0.0)
    for i in range(k.c.shape.head_dim // 2):
        o[i] = Float32(0.0)


# -- the producer --------------------------------------------------------------------------------
@cute.jit
def produce_keys(
    k: cutlass.Constexpr, p: cutlass.Constexpr, layer: Int32,
    stage: Int32, parity: Int32, issued: Int32, landed: Int32, landed_parity: Int32,
):  # fmt: skip
    """The producer warp's part: KV blocks of this CTA's tasks in a layer. Blocks before the chunk
    are complete and run ahead; those of the chunk wait until consumer warp 0 says that the grid
    barrier behind `write_keys` has been passed (`keys_written`)."""
    c = k.c
    index, told = k.bid, Int32(0)
    while index < task_count(c, p.row_tiles):
        _, blocks = task_blocks(k, p, index)
        for block in cutlass.range(blocks, unroll=1):
            if block >= p.position // PAGE:
                if told == 0:
                    keys_barrier(False)
                    sync.fence_async()
                    told = Int32(1)
            head = index % c.shape.kv_heads
            at = block_at(k, k.kv_pool, k.layers, page_of(k, block), layer, head)
            stage, parity, issued, landed, landed_parity = issue_block(
                k, at, stage, parity, issued, landed, landed_parity
            )
        index = index + c.ctas
    return stage, parity, issued, landed, landed_parity


def keys_barrier(arrives):
    """A named barrier of consumer warp 0, which only arrives, and the producer warp."""
    kind = "bar.arrive" if arrives else "bar.sync"
    sync.ptx_do(f"{kind} {int(sync.Barrier.KEYS)}, 64;")


@cute.jit
def keys_written(k: cutlass.Constexpr, waits: Boolean):
    """Consumer warps, behind the barrier that follows the chunk's keys. waits: whether this CTA's
    producer will ask."""
    if k.wid == 0:
        if waits:
            keys_barrier(True)
