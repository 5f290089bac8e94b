"""Causal attention of a prompt chunk: up to 256 rows whose first position is a multiple of 64.

Before it, `write_keys` puts the chunk's keys (normalised where the model does that, rotated) and
values into the KV pages; a grid barrier later every block of the context is read from there,
through the weight ring. A row walks the absolute blocks of 64 positions from 0 up to its own with
one running softmax: its arithmetic depends on the tokens before it and on its position alone, not
on the chunk's length, its start or its other rows.

CTAs take tasks (kv head, row tiles; prompt_plan.Task), a warp one query head of 16 rows. Scores of
keys behind a row are masked by select; V of positions that nobody has written yet is zeroed, since
0 x NaN is NaN. Layout of blocks: attention.py; head_dim 64: K and V in one stage of the ring,
head_dim 128: a stage each.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.attention_blocks import (
    NEG_INF,
    block_scores,
    block_values,
    filled,
    quad_sum,
    softmax_half,
    sums_seen,
)
from cute_kernels.gpu.attention_plan import stages_per_block
from cute_kernels.gpu.config import CHUNK, KV_COPY
from cute_kernels.gpu.fragments import bf16_pair, unpack_pair
from cute_kernels.gpu.kv_layout import PAGE
from cute_kernels.gpu.prompt_plan import (
    COLUMNS_BYTES,
    ROW_TILE,
    PromptBuffers,
    task_count,
    task_tiles,
)
from cute_kernels.gpu.ring import advance, issue
from cute_kernels.gpu.rotary import head_factor, norm_weights, scaled, turn
from cute_kernels.gpu.rows_gemm import load_words, store_tile
from cute_kernels.gpu.sync import ptx_read


# -- heads: from raw columns to normalised and rotated ones --------------------------------------
def load_floats(at):
    code = "ld.global.nc.v4.f32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];"
    return ptx_read(code, [Float32] * 4, at)


def head_vectors(k, base, col, block):
    """This lane's words of row 8 block + g of a head whose first column is `col` (a multiple of
    32): [32 columns][4]."""
    first = base + Int64((col >> 5) * COLUMNS_BYTES + block * 512 + k.lane * 16)
    return [load_words(first + i * COLUMNS_BYTES) for i in range(k.c.shape.head_dim // CHUNK)]


def rotated(k, p, vectors, position, weights):
    """The head normalised (weights: rotary.norm_weights) and rotated, as bf16 words in the same
    places, with the arithmetic of rotary.py."""
    d, t = k.c.shape.head_dim, k.lane & 3
    pairs = [tuple(unpack_pair(word)) for vector in vectors for word in vector]
    if weights is not None:
        f = head_factor(pairs, d, k.c.shape.rms_eps)
        pairs = [
            (scaled(lo, f, a), scaled(hi, f, b))
            for (lo, hi), (a, b) in zip(pairs, weights, strict=True)
        ]
    angles = p.rope + Int64(position) * (d * 4) + Int64(t * 16)
    words = []
    for eight in range(d // 16):
        cos_sin = load_floats(angles + eight * 64)
        for e in range(2):
            turned = turn(*pairs[2 * eight + e], cos_sin[2 * e], cos_sin[2 * e + 1])
            words.append(bf16_pair(*turned))
    return [words[4 * i : 4 * i + 4] for i in range(len(vectors))]


# -- the chunk's keys and values -----------------------------------------------------------------
def page_block(k, page, layer, kv_head):
    """Address of a block; 64-bit from the page on: a pool may be larger than 4 GiB."""
    at = (Int64(page) * k.layers + Int64(layer)) * k.c.shape.kv_heads + Int64(kv_head)
    return k.kv_pool + at * k.c.kv_block_bytes


def page_of(k, block):
    return ptx_read("ld.global.nc.b32 {$w0}, [{$r0}];", [Int32], k.pages + Int64(block) * 4)


def store_key(k, to, place, words):
    """A head's words into its K row (`key_order`): the four lanes of a row fill 16-byte pieces."""
    t = k.lane & 3
    for i, vector in enumerate(words):
        for w in range(4):
            piece = 2 * (2 * i + w // 2) + w % 2
            at = to + Int64(((piece ^ (place & 7)) << 4) + t * 4)
            sync.ptx_do("st.global.b32 [{$r0}], {$r1};", at, vector[w])


def store_value(k, to, place, words):
    t = k.lane & 3
    for i, vector in enumerate(words):
        for step in range(2):
            piece = 2 * (2 * i + step) + (t >> 1)
            at = to + Int64(((piece ^ (place & 7)) << 4) + (t & 1) * 8)
            code = "st.global.v2.b32 [{$r0}], {{$r1},{$r2}};"
            sync.ptx_do(code, at, vector[2 * step], vector[2 * step + 1])


@cute.jit
def write_keys(k: cutlass.Constexpr, p: cutlass.Constexpr, layer: Int32):
    """K and V of the chunk's rows into their pages; a warp takes 8 rows of one head's K or V, over
    all warps of the grid. The caller's barrier orders the copies that read them: writers fence
    towards the copy engine here, readers after the barrier."""
    c, s = k.c, k.c.shape
    base = p.act + Int64(PromptBuffers.of(c).q)
    width, blocks = s.head_dim * 2, (p.rows + 7) // 8
    i = k.wid * c.ctas + k.bid
    while i < blocks * (2 * s.kv_heads):
        block, head = i // (2 * s.kv_heads), i % (2 * s.kv_heads)  # all K heads, then V heads
        row = block * 8 + (k.lane >> 2)
        at = p.position + cutlass.min(row, p.rows - 1)
        vectors = head_vectors(k, base, (s.heads + head) * s.head_dim, block)
        kv_head = head % s.kv_heads
        to = page_block(k, page_of(k, at >> 6), layer, kv_head) + Int64((at & 63) * width)
        if head < s.kv_heads:
            words = rotated(k, p, vectors, at, norm_weights(k, layer, 1))
            if row < p.rows:
                store_key(k, to, at, words)
        else:
            if row < p.rows:
                store_value(k, to + PAGE * width, at, vectors)
        i = i + c.warps * c.ctas
    sync.fence_async()


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
    for h in range(2):
        softmax_half(k, tiles, h, True, p, m, den, o)
    block_values(k, o, p, values_at, value_masks(k, live))


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


def load_queries(k, p, q, head, layer, row_tile):
    """Q of 16 rows of a query head: [row g, row g + 8][words]."""
    base, weights = p.act + Int64(PromptBuffers.of(k.c).q), norm_weights(k, layer, 0)
    row = row_tile * ROW_TILE + (k.lane >> 2)
    for h in range(2):
        vectors = head_vectors(k, base, head * k.c.shape.head_dim, row_tile * 2 + h)
        at = p.position + cutlass.min(row + 8 * h, p.rows - 1)
        words = [w for v in rotated(k, p, vectors, at, weights) for w in v]
        for i, word in enumerate(words):
            q[h * len(words) + i] = word


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
            at = page_block(k, page_of(k, block), layer, index % c.shape.kv_heads)
            for _ in cutlass.range_constexpr(stages_per_block(c)):
                stage, parity, issued, landed, landed_parity = issue(
                    k.ring, at, Int32(KV_COPY),
                    stage, parity, issued, landed, landed_parity,
                )  # fmt: skip
                at = at + KV_COPY
        index = index + c.ctas
    return stage, parity, issued, landed, landed_parity


def keys_barrier(arrives):
    """A named barrier of consumer warp 0, which only arrives, and the producer warp."""
    kind = "bar.arrive" if arrives else "bar.sync"
    sync.ptx_do(f"{kind} {int(sync.Barrier.KEYS)}, 64;")


@cute.jit
def keys_written(k: cutlass.Constexpr, p: cutlass.Constexpr):
    """Consumer warps, behind the barrier that follows `write_keys`."""
    if k.wid == 0:
        if k.bid < task_count(k.c, p.row_tiles):
            keys_barrier(True)
