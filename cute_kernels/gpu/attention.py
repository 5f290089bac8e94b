"""Tree attention between qkv and o for up to 16 rows of one sequence, in canonical order.

A row at position p sums its keys in one order whatever the tree, the batch or the committed length:
keys below c(p) = 64 floor(max(p - 15, 0) / 64) in absolute blocks of 64, block b by split
b mod `splits`, a split's blocks ascending (their two halves apart), then the splits in the order
of `merge_words`; then keys c(p) .. p along the row's own path, in groups of 32 by position. Blocks
beyond a row's c(p) are an exact identity for it.

CTA (kv head, split) multiplies its blocks for all heads of the kv head: warp (head, half) takes 32
keys of every block (64 where there is but one warp a head), mma.sync m16n8k16 with the 16 rows on
the m side. It publishes (sums, maximum, denominator) of every row as words; row r is merged by
the CTA of split r mod `splits` from the last one on, which also does the row's tail: where blocks
are few, it has none. A CTA that has neither blocks nor rows does nothing. Whoever reads a word
publishes one that depends on it: the clearing of buffers relies on that (janitor.py).

q, k and v come as raw columns of qkv, in words; every warp norms and rotates its own head rows of
q, and four warps of a merging CTA those of k and v of the step. KV blocks come through the weight
ring. The CTA of split 0 writes the step's K and V to their pages: row i to position i of the
first row's on. Layout of pages: kv_layout.py; of parts: attention_merge.py.

At short contexts every instruction here runs once a layer, behind phases whose code has pushed it
out of the instruction cache: the code is kept small (loops stay loops, lanes share the merge).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.attention_blocks import (
    NEG_INF,
    attend_block,
    block_limit,
    filled,
    quad_sum,
    sums_seen,
)
from cute_kernels.gpu.attention_merge import (
    give_stats,
    give_sums,
    publish_part,
    publish_row,
    row_parts,
    take_parts,
)
from cute_kernels.gpu.attention_plan import (
    ROWS,
    TAIL_GROUPS,
    halves,
    stages_per_block,
    tail_slots,
)
from cute_kernels.gpu.attention_stream import (  # begin_produce, produce_kv: for the kernel
    Places,
    begin_produce,
    begin_step,
    produce_kv,
)
from cute_kernels.gpu.attention_tail import (
    row_address,
    run_tail,
    stage_query,
    tail_at,
    wait_for_tail,
)
from cute_kernels.gpu.config import CHUNK_BYTES
from cute_kernels.gpu.kv_layout import PAGE
from cute_kernels.gpu.ring import advance
from cute_kernels.gpu.rotary import norm_weights, rotate_head
from cute_kernels.gpu.tiles import Buffers

__all__ = ["begin_produce", "begin_step", "produce_kv", "run_attention"]
ASK_AT_ONCE = 6  # vectors of 16 rows that a lane asks for without knowing that one is there


# -- words in ------------------------------------------------------------------------------------
@cute.jit
def take_rows(k: cutlass.Constexpr, words: cute.Tensor, addresses: cutlass.Constexpr,
              awaited: cutlass.Constexpr, rows: Int32):  # fmt: skip
    """This lane's 16-byte vectors as their words arrive; zero where not awaited. All lanes of the
    warp must call it."""
    for i, ok in enumerate(awaited):
        empty = sync.select(ok, Uint32(sync.EMPTY), Uint32(0))
        for e in range(4):
            words[4 * i + e] = empty
    tries, since, missing = Int32(0), Int64(0), Uint32(1)
    if cutlass.const_expr(len(addresses) > ASK_AT_ONCE):
        # one vector first: polling for everything would cost L2 bandwidth
        missing = Uint32(rows > 8)
        while missing != 0:
            missing = ask_missing(words, addresses[:1])
            tries, since = sync.overdue(tries, since)
        missing = Uint32(1)
    while missing != 0:
        missing = ask_missing(words, addresses)
        tries, since = sync.overdue(tries, since)


def ask_missing(words, addresses):
    """One round of loads of what is missing; 1 if any lane still misses something."""
    for i, at in enumerate(addresses):
        mine = [words[4 * i + e] for e in range(4)]
        for e, v in enumerate(sync.ld_missing_words(at, mine, sync.largest(mine))):
            words[4 * i + e] = v
    return sync.any_lane_empty(sync.largest([words[i] for i in range(4 * len(addresses))]))


@cute.jit
def take_inputs(k: cutlass.Constexpr, p: cutlass.Constexpr, rows: Int32, layer: Int32, head: Int32,
                keys_too: Boolean, qkv: Int64, words: cute.Tensor):  # fmt: skip
    """In one wait: this warp's head rows of q, and with keys_too its share of the step's K and V
    rows of the kv head (half of the rows of K or of V for each of the last four warps), normed and
    rotated, into shared memory. words: q as head rows of rows 0 to 7 and 8 to 15, then that share.
    """
    c, s = k.c, k.c.shape
    chunks, vector = s.head_dim // 32, k.lane * 16
    row = k.lane >> 2
    q_weights = norm_weights(k, layer, 0, p.norms, p.normed)
    k_weights = norm_weights(k, layer, 1, p.norms, p.normed)
    task = c.warps - 1 - k.wid
    values, upper = task & 1, task >> 1
    of_kv = keys_too & (task < 4) & (upper * 8 + row < rows)
    of_q = k.wid < c.group_heads * halves(c)
    q_at = qkv + Int64((p.kv_head * c.group_heads + head) * (chunks * CHUNK_BYTES) + vector)
    first = s.heads + p.kv_head + values * s.kv_heads
    kv_at = qkv + Int64(first * (chunks * CHUNK_BYTES) + upper * 512 + vector)
    addresses = [q_at + (i * CHUNK_BYTES + b * 512) for b in range(2) for i in range(chunks)]
    addresses += [kv_at + i * CHUNK_BYTES for i in range(chunks)]
    awaited = [of_q & (8 * b + row < rows) for b in range(2) for i in range(chunks)]
    take_rows(k, words, addresses, awaited + [of_kv] * chunks, rows)
    rope = p.rope + row * p.smem.rope_stride
    if of_q:
        rotate_head(k, words, 0, rope, q_weights)
        if rows > 8:
            rotate_head(k, words, 4 * chunks, rope + 8 * p.smem.rope_stride, q_weights)
    if keys_too & (task < 4):
        row = row + upper * 8
        row_bytes = 2 * s.head_dim
        to = row_address(p.new + values * (ROWS * row_bytes), row, row_bytes)
        if values == 0:
            rotate_head(k, words, 8 * chunks, p.rope + row * p.smem.rope_stride, k_weights)
            if row < rows:
                for i in cutlass.range_constexpr(4 * chunks):
                    at = (to ^ (i << 4)) + (k.lane & 3) * 4
                    sync.sts(at, sync.as_float(words[8 * chunks + i]))
        else:
            if row < rows:
                for i in cutlass.range_constexpr(0, 4 * chunks, 2):
                    at = (to ^ ((i + ((k.lane & 3) >> 1)) << 4)) + (k.lane & 1) * 8
                    pair = [sync.as_float(words[8 * chunks + i + e]) for e in range(2)]
                    sync.sts_pair(at, *pair)


# -- committed blocks ----------------------------------------------------------------------------
@cute.jit
def run_blocks(k: cutlass.Constexpr, p: cutlass.Constexpr, q: cute.Tensor, m: cute.Tensor,
               den: cute.Tensor, o: cute.Tensor, half: Int32, rows: Int32, main_blocks: Int32,
               stage: Int32, parity: Int32):  # fmt: skip
    """This warp's keys of every block of this CTA; warps without a head only pass stages on."""
    c, row_bytes = k.c, 2 * k.c.shape.head_dim
    limits = [block_limit(k, p, rows, 0), block_limit(k, p, rows, 1)]
    block = p.split
    while block < main_blocks:
        key_stage = stage
        sync.wait_parity(k.ring.full + stage * 8, parity)
        stage, parity = advance(k.ring, stage, parity)
        value_stage = key_stage
        if cutlass.const_expr(stages_per_block(c) == 2):
            value_stage = stage
            sync.wait_parity(k.ring.full + stage * 8, parity)
            stage, parity = advance(k.ring, stage, parity)
        seen = Uint32(0)
        if k.wid < c.group_heads * halves(c):
            keys = k.ring.base + key_stage * k.ring.stage_bytes
            values = k.ring.base + value_stage * k.ring.stage_bytes
            if cutlass.const_expr(stages_per_block(c) == 1):
                values = values + PAGE * row_bytes
            attend_block(k, q, m, den, o, half, keys, values, block, limits, rows)
            seen = sums_seen(k, o)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            sync.release_after(k.ring.empty + key_stage * 8, [seen], k.zero)
            if cutlass.const_expr(stages_per_block(c) == 2):
                sync.release_after(k.ring.empty + value_stage * 8, [seen], k.zero)
        block = block + c.splits
    return stage, parity


# -- the step's K and V to their pages -----------------------------------------------------------
@cute.jit
def write_back(k: cutlass.Constexpr, p: cutlass.Constexpr, rows: Int32, layer: Int32,
               first_warp: cutlass.Constexpr):  # fmt: skip
    """Warps from first_warp on: generic stores, then the writer's half of the proxy fence. The
    release is the CTA's delivery of the step's results, behind a barrier of its consumers."""
    c, s, row_bytes = k.c, k.c.shape, 2 * k.c.shape.head_dim
    pieces = s.head_dim // 8
    i = k.tid - first_warp * 32
    while i < rows * (2 * pieces):
        piece, row, values = i % pieces, i // (2 * pieces), i // pieces & 1
        at = row_address(p.new + values * (ROWS * row_bytes), row, row_bytes) ^ (piece << 4)
        words = sync.lds_words(at)
        place = sync.lds_int(p.places + row * 4)
        to = Int64((place & 63) * row_bytes + values * (PAGE * row_bytes))
        to = to + Int64((piece ^ (place & 7)) * 16)
        block = (Int64(place >> 6) * s.layers + layer) * s.kv_heads + p.kv_head
        sync.ptx_do(
            "st.global.v4.b32 [{$r0}], {{$r1},{$r2},{$r3},{$r4}};",
            k.kv_pool + block * c.kv_block_bytes + to,
            *words,
        )
        i = i + (c.warps - first_warp) * 32
    sync.fence_async()


# -- figures -------------------------------------------------------------------------------------
STAMPS = 10


@cute.jit
def stamp(k: cutlass.Constexpr, slot: cutlass.Constexpr):
    """With `timing`, in attention's own kernel: the clock of the SM when the first warp of all
    and the last warp of all came here, int64 [ctas, 2, STAMPS] of the last layer in Arg.TIMES."""
    if cutlass.const_expr(k.c.timing and hasattr(k, "stamps")):
        other = (k.c.warps - 1) * 32
        if (k.tid == 0) | (k.tid == other):
            at = k.stamps + Int64(((k.bid * 2 + k.tid // other) * STAMPS + slot) * 8)
            sync.ptx_do("st.global.b64 [{$r0}], {$r1};", at, Int64(cute.arch.clock64()))


# -- the phase -----------------------------------------------------------------------------------
@cute.jit
def release_tail(k: cutlass.Constexpr, n: Int32, stage: Int32, seen: Uint32):
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        for _ in cutlass.range(n, unroll=1):
            sync.release_after(k.ring.empty + stage * 8, [seen], k.zero)
            stage = stage + 1
            if stage == k.ring.n:
                stage = Int32(0)


@cute.jit
def share_part(k: cutlass.Constexpr, p: cutlass.Constexpr, head: Int32, half: Int32, rows: Int32,
               has_blocks: Boolean, m: cute.Tensor, den: cute.Tensor, o: cute.Tensor,
               part: Int64):  # fmt: skip
    """All consumer warps: what this split's blocks came to, halves of the keys put together, into
    its part of every row (part: row_parts of row 0). has_blocks: this warp has summed some.

    Behind the first barrier the step's K and V rows are in p.new, and every warp has released all
    stages before the tail, so a warp that does not read the tail may release it at once."""
    c = k.c
    for h in cutlass.range_constexpr(2):
        den[h] = quad_sum(den[h])
    if cutlass.const_expr(c.red_buffers > 1 and halves(c) == 2):
        sync.consumer_sync(c.warps * 32)  # somebody may still add qkv's last sums
    if has_blocks:
        if cutlass.const_expr(halves(c) == 2):
            give_stats(k, p, head, half, m, den)
            give_sums(k, p, head, half, o)
    sync.consumer_sync(c.warps * 32)
    stamp(k, 3)
    if has_blocks:
        own = row_parts(k, p, part, Int32(0)) + Int64(p.split * c.part_bytes)
        publish_part(k, p, head, half, rows, m, den, o, own)
    sync.consumer_sync(c.warps * 32)  # whoever comes next may write where sums were exchanged


@cute.jit
def merge_row(k: cutlass.Constexpr, p: cutlass.Constexpr, row: Int32, slot: Int32, part: Int64,
              out: Int64, stage: Int32, tail_first: Int32, main_blocks: Int32):  # fmt: skip
    """All consumer warps: tail and merge of a row. The last warps do the tail, a group of keys
    each, while the first, one a query head, wait for the splits' words.

    part: row_parts of row 0. slot: where the row's Q is (stage_query). Where
    there is but one slot of tails, a barrier must come before the next row. Returns a word that
    depends on what this warp read from the ring."""
    c, seen = k.c, Uint32(0)
    group, tails = c.warps - 1 - k.wid, slot & (tail_slots(c) - 1)
    if group < TAIL_GROUPS:
        to = tail_at(k, p, tails, group, Int32(0))
        seen = run_tail(k, p, row, slot, group, to, stage, tail_first)
    n = c.splits * c.shape.head_dim // 64 + 2
    u = cute.make_rmem_tensor(cute.make_layout(n), Uint32)
    for i in range(n):  # else it would live, where no warp writes it, through the whole kernel
        u[i] = Uint32(0)
    if k.wid < c.group_heads:
        take_parts(k, u, k.wid, row_parts(k, p, part, row), main_blocks, p.polled)
    stamp(k, 5)
    sync.consumer_sync(c.warps * 32)
    stamp(k, 6)
    if k.wid < c.group_heads:
        publish_row(k, p, u, k.wid, row, tails, out)
    stamp(k, 7)
    return seen


@cute.jit
def merge_rows(k: cutlass.Constexpr, p: cutlass.Constexpr, rows: Int32, layer: Int32, part: Int64,
               out: Int64, stage: Int32, parity: Int32):  # fmt: skip
    """Tail and merge of rows turn, turn + splits, ..."""
    c = k.c
    tail_first, tail_count, main_blocks, _ = sync.lds_ints(p.step)
    if k.wid >= c.warps - TAIL_GROUPS:
        wait_for_tail(k, tail_count, stage, parity)
    row, slot, seen = p.turn, Int32(0), Uint32(0)
    while row < rows:
        seen = seen | merge_row(k, p, row, slot, part, out, stage, tail_first, main_blocks)
        row, slot = row + c.splits, slot + 1
    release_tail(k, tail_count * stages_per_block(c), stage, seen)
    # by warps that do not merge, if there are any
    idle = c.group_heads if c.warps > c.group_heads else 0
    if p.turn == 0:
        if k.wid >= idle:
            write_back(k, p, rows, layer, idle)


@cute.jit
def attend(k: cutlass.Constexpr, p: cutlass.Constexpr, rows: Int32, layer: Int32, qkv: Int64,
           part: Int64, out: Int64, stage: Int32, parity: Int32, tail_count: Int32,
           main_blocks: Int32):  # fmt: skip
    c, d = k.c, k.c.shape.head_dim
    head, half = k.wid % c.group_heads, k.wid // c.group_heads
    words = cute.make_rmem_tensor(cute.make_layout(12 * d // 32), Uint32)
    stamp(k, 0)
    take_inputs(k, p, rows, layer, head, p.turn < rows, qkv, words)
    stamp(k, 1)
    m, den, o = filled(2, NEG_INF), filled(2, 0.0), filled(d // 2, 0.0)
    stage, parity = run_blocks(k, p, words, m, den, o, half, rows, main_blocks, stage, parity)
    stamp(k, 2)
    has_blocks = (p.split < main_blocks) & (k.wid < c.group_heads * halves(c))
    if half == 0:
        row, slot = p.turn, Int32(0)
        while row < rows:
            stage_query(k, p, words, head, row, slot)
            row, slot = row + c.splits, slot + 1
    share_part(k, p, head, half, rows, has_blocks, m, den, o, part)
    stamp(k, 4)
    if p.turn < rows:
        merge_rows(k, p, rows, layer, part, out, stage, parity)
        for _ in cutlass.range(tail_count * stages_per_block(c), unroll=1):
            stage, parity = advance(k.ring, stage, parity)
    return stage, parity


@cute.jit
def run_attention(k: cutlass.Constexpr, rows: Int32, layer: Int32, cur: Int64, stage: Int32,
                  parity: Int32):  # fmt: skip
    """Consumer warps, between qkv and o: words of q in, words of the attention's output out.

    rows: of the step, 1 to 16. cur: the layer's copy of tiles.Buffers. Returns the ring's state."""
    c, b, p = k.c, Buffers.of(k.c), Places(k)
    if p.kv_head < c.shape.kv_heads:
        _, tail_count, main_blocks, _ = sync.lds_ints(p.step)
        busy = (p.split < main_blocks) | (p.turn < rows)
        if busy:
            stage, parity = attend(
                k, p, rows, layer, cur + b.q, cur + b.part, cur + b.a, stage, parity, tail_count,
                main_blocks,
            )  # fmt: skip
    return stage, parity
