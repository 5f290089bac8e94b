"""Tree attention between qkv and o for up to 16 rows of one sequence, in canonical order.

A row at position p sums its keys in one order whatever the tree, the batch or the committed length:
keys below c(p) = 64 floor(max(p - 15, 0) / 64) in absolute blocks of 64, block b by split
b mod `splits`, a split's blocks ascending (their two halves apart), then the splits in the order
of `merge_splits`; then keys c(p) .. p along the row's own path, one by one in position order, in
fp32. Blocks beyond a row's c(p) are an exact
identity for it.

CTA (kv head, split) multiplies its blocks for all heads of the kv head: warp (head, half) takes 32
keys of every block, mma.sync m16n8k16 with the 16 rows on the m side. Half 0 adds both halves,
publishes (sums, maximum, denominator) as words and waits for the other splits' words of row
`split`; meanwhile half 1 does that row's tail. KV blocks come through the weight ring; keys of the
step's own rows come as words from the qkv phase.

A page holds 64 positions; a block is one (page, layer, kv head): 64 rows of K, then of V, 128 bytes
each. In a row the 16-byte piece i lies at i ^ (row & 7), so ldmatrix has no bank conflicts. K rows
keep head dimensions in the order of `key_order`: the halves of a rotary pair side by side, and
within 16 values the order in which lanes hold the A fragments of Q.

At short contexts every instruction here runs once a layer, behind phases whose code has pushed it
out of the instruction cache: the code is kept small (loops stay loops, lanes share the merge).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.attention_tail import run_tail
from cute_kernels.gpu.config import PAGE, TAIL_KEYS, AttentionSmem
from cute_kernels.gpu.fragments import bf16_pair, exp2, mma, put_word, unpack_pair
from cute_kernels.gpu.gemm import take_words
from cute_kernels.gpu.ring import advance
from cute_kernels.gpu.sync import ptx_read
from cute_kernels.gpu.tiles import Buffers

NEG_INF = -float("inf")


# -- committed blocks --------------------------------------------------------------------------
def ldmatrix(addr, transposed):
    kind = "ldmatrix.sync.aligned.m8n8.x4" + (".trans" if transposed else "")
    return ptx_read(
        kind + ".shared.b16 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];",
        [Uint32] * 4,
        addr,
    )


def quad_max(v):
    v = sync.maximum([v, cute.arch.shuffle_sync_bfly(v, offset=1)])
    return sync.maximum([v, cute.arch.shuffle_sync_bfly(v, offset=2)])


def quad_sum(v):
    v = v + cute.arch.shuffle_sync_bfly(v, offset=1)
    return v + cute.arch.shuffle_sync_bfly(v, offset=2)


def block_scores(k, q, base):
    """S = Q K^T of 16 rows and 32 keys: 4 tiles of 8 keys; and the registers read."""
    i = k.lane
    lanes = [base + (i & 7) * 128 + (((4 * pair + (i >> 3)) ^ (i & 7)) << 4) for pair in range(2)]
    loaded, tiles = [], []
    for j in range(4):
        s = [Float32(0.0)] * 4
        for pair in range(2):
            b = ldmatrix(lanes[pair] + j * 1024, False)
            loaded += b
            for e in range(2):
                at = (pair * 2 + e) * 4
                s = mma(s, [q[at + w] for w in range(4)], b[2 * e : 2 * e + 2])
        tiles.append(s)
    return tiles, loaded


def block_values(k, o, probabilities, base):
    """O += P V; o: flat [8 tiles of 8 dimensions x 4]. Returns the registers read."""
    i, loaded = k.lane, []
    lanes = [base + (i & 15) * 128 + (((n + (i >> 4)) ^ (i & 7)) << 4) for n in range(0, 8, 2)]
    for u in range(2):
        p = probabilities[2 * u], probabilities[2 * u + 1]
        a = [bf16_pair(p[e >> 1][2 * (e & 1)], p[e >> 1][2 * (e & 1) + 1]) for e in range(4)]
        for n in range(0, 8, 2):
            b = ldmatrix(lanes[n // 2] + u * 2048, True)
            loaded += b
            for e in range(2):
                at = (n + e) * 4
                d = mma([o[at + w] for w in range(4)], a, b[2 * e : 2 * e + 2])
                for w in range(4):
                    o[at + w] = d[w]
    return loaded


def softmax_block(k, tiles, valid, m, den, o, scale):
    """One online-softmax step for both row halves; returns the probabilities by tile. m is in
    units of scaled scores. A row the block is not for gets probabilities 2^-inf = 0, factor 1."""
    p = [[None] * 4 for _ in range(4)]
    for h in range(2):
        s = [tiles[j][2 * h + e] for j in range(4) for e in range(2)]
        top = quad_max(sync.maximum(s))
        new = sync.maximum([m[h], sync.choose(valid[h], top * scale, NEG_INF)])
        alpha = exp2(sync.choose(new > NEG_INF, m[h] - new, 0.0))
        off = sync.choose(valid[h], new, -NEG_INF)
        sums = [exp2(v * scale - off) for v in s]
        for j in range(4):
            p[j][2 * h : 2 * h + 2] = sums[2 * j : 2 * j + 2]
        while len(sums) > 1:
            sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
        total = sums[0]
        m[h] = new
        den[h] = den[h] * alpha + total
        for n in range(8):
            for e in range(2):
                o[n * 4 + 2 * h + e] = o[n * 4 + 2 * h + e] * alpha
    return p


def zero_state(m, den, o):
    for h in range(2):
        m[h], den[h] = Float32(NEG_INF), Float32(0.0)
    for i in range(32):
        o[i] = Float32(0.0)


def store_half(k, head, m, den, o):
    """The second half's sums, for its partner warp."""
    for h in range(2):
        row = (k.lane >> 2) + 8 * h
        sync.sts_pair(k.squares + (head * 16 + row) * 8, m[h], den[h])
        for n in range(8):
            at = k.red + ((head * 16 + row) * 64 + n * 8 + 2 * (k.lane & 3)) * 4
            sync.sts_pair(at, o[n * 4 + 2 * h], o[n * 4 + 2 * h + 1])


def publish_part(k, head, m, den, o, part):
    """Merge both halves of the keys and publish this split's part of 16 rows of a head: 64 sums as
    bf16 (rounded like the output itself; fp32 sums made the hand-off 1.5 us a layer longer),
    maximum and denominator as fp32. A lane's eight words lie side by side: word 8 t + n holds
    dimensions 8 n + 2 t and the next. Loads come before stores: the compiler keeps
    the order of a load behind a relaxed store."""
    c = k.c
    for h in range(2):
        row, t = (k.lane >> 2) + 8 * h, k.lane & 3
        m1, den1 = sync.lds_pair(k.squares + (head * 16 + row) * 8)
        at = k.red + ((head * 16 + row) * 64 + 2 * t) * 4
        others = [sync.lds_pair(at + n * 32) for n in range(8)]
        top = sync.maximum([m[h], m1])
        safe = sync.choose(top > NEG_INF, top, 0.0)
        e0, e1 = exp2(m[h] - safe), exp2(m1 - safe)
        to = part + Int64(row * (c.splits * c.part_bytes))
        words = []
        for n, other in enumerate(others):
            mine = o[n * 4 + 2 * h], o[n * 4 + 2 * h + 1]
            words.append(bf16_pair(*(a * e0 + b * e1 for a, b in zip(mine, other, strict=True))))
        sums = to + Int64(head * 128 + t * 32)
        sync.st_words(sums, words[:4])
        sync.st_words(sums + 16, words[4:])
        publish_stats(k, head, top, den[h] * e0 + den1 * e1, to)


@cute.jit
def publish_stats(k: cutlass.Constexpr, head: Int32, top: Float32, den: Float32, to: Int64):
    if (k.lane & 3) == 0:
        at = to + Int64(k.c.group_heads * 128 + head * 8)
        sync.st_words(at, [sync.as_bits(top), sync.as_bits(den)])


# -- words in and merging ---------------------------------------------------------------------
@cute.jit
def take_new_rows(k: cutlass.Constexpr, kv: Int64, q: cute.Tensor, q_at: Int64):
    """This warp's Q fragments, and this step's K and V rows of the kv head into shared memory, in
    one wait: both come from the qkv phase."""
    threads, vectors = k.c.warps * 32, 16 * 256 // 16
    rounds = -(-vectors // threads)
    new = cute.make_rmem_tensor(cute.make_layout(4 * (4 + rounds)), Uint32)
    addresses = [q_at + off for off in (0, 512, 1024, 1536)]
    for r in cutlass.range_constexpr(rounds):
        addresses.append(kv + Int64(cutlass.min(k.tid + r * threads, vectors - 1) * 16))
    take_words(k, new, addresses)
    for i in cutlass.range_constexpr(16):
        q[i] = new[i]
    for r in cutlass.range_constexpr(rounds):
        if k.tid + r * threads < vectors:
            words = [new[16 + 4 * r], new[17 + 4 * r], new[18 + 4 * r], new[19 + 4 * r]]
            sync.sts_words(k.attn_new + (k.tid + r * threads) * 16, words)


def ask_merge(k, u, sums_at, stats_at):
    """One round of loads; returns the largest word. A lane has 8 dimensions of every fourth split,
    and the statistics of one."""
    n = k.c.splits // 4
    for i in range(n):
        for e, v in enumerate(sync.ld_words(sums_at + Int64(4 * i * k.c.part_bytes))):
            u[4 * i + e] = v
    u[4 * n], u[4 * n + 1] = sync.ld_pair_words(stats_at)
    return sync.largest([u[i] for i in range(4 * n + 2)])


def merge_splits(k, u, head, top_tail, den_tail):
    """Splits of equal remainder mod 4 ascending, then the four sums in pairs, then the tail; four
    words of this lane's 8 outputs."""
    c = k.c
    n, top = c.splits // 4, sync.as_float(u[c.splits])
    den = sync.as_float(u[c.splits + 1])
    for shift in range(5):
        top = sync.maximum([top, cute.arch.shuffle_sync_bfly(top, offset=1 << shift)])
    top = sync.maximum([top, top_tail])
    e = exp2(sync.as_float(u[c.splits]) - top)
    den = sync.choose(k.lane < c.splits, den * e, 0.0)
    for shift in range(5):
        den = den + cute.arch.shuffle_sync_bfly(den, offset=1 << shift)
    e_tail = exp2(top_tail - top)
    inverse = 1.0 / (den + den_tail * e_tail)
    o = [Float32(0.0)] * 8
    for i in range(n):
        factor = cute.arch.shuffle_sync(e, 4 * i + (k.lane >> 3))
        for w in range(4):
            pair = unpack_pair(u[4 * i + w])
            for d in range(2):
                o[2 * w + d] = o[2 * w + d] + pair[d] * factor
    words = []
    for w in range(4):
        tail = sync.lds_pair(k.attn_q + (head * 64 + merge_dim(k, w)) * 4)
        for d in range(2):
            # x + y is the same either way round: every lane has one and the same total
            v = o[2 * w + d]
            v = v + cute.arch.shuffle_sync_bfly(v, offset=8)
            v = v + cute.arch.shuffle_sync_bfly(v, offset=16)
            o[2 * w + d] = (v + tail[d] * e_tail) * inverse
        words.append(bf16_pair(o[2 * w], o[2 * w + 1]))
    return words


def merge_dim(k, w):
    """First dimension of word w of this lane's four: see `publish_part`."""
    place = (k.lane & 7) * 4 + w
    return (place & 7) * 8 + (place >> 3) * 2


# -- the phase ---------------------------------------------------------------------------------
STAMPS = 8


@cute.jit
def stamp(k: cutlass.Constexpr, slot: cutlass.Constexpr):
    """With `timing`: the time at which the first thread of half 0 and of half 1 came here."""
    if cutlass.const_expr(k.c.timing):
        other = k.c.group_heads * 32
        if (k.tid == 0) | (k.tid == other):
            at = k.stamps + Int64((k.tid // other * STAMPS + slot) * 8)
            sync.ptx_do("st.global.b64 [{$r0}], {$r1};", at, Int64(cute.arch.globaltimer()))


@cute.jit
def run_blocks(k: cutlass.Constexpr, q: cute.Tensor, m: cute.Tensor, den: cute.Tensor,
               o: cute.Tensor, half: Int32, stage: Int32, parity: Int32,
               scale: cutlass.Constexpr):  # fmt: skip
    """32 keys of every block of this CTA."""
    limit0 = sync.lds_int(k.attn_rows + (k.lane >> 2) * 16 + 4)
    limit1 = sync.lds_int(k.attn_rows + (k.lane >> 2) * 16 + 8 * 16 + 4)
    block, lower = k.split, half * (32 * 128)
    while block < k.main_blocks:
        sync.wait_parity(k.ring.full + stage * 8, parity)
        base = k.ring.base + stage * k.ring.stage_bytes + lower
        tiles, seen = block_scores(k, q, base)
        valid = [block * PAGE < limit0, block * PAGE < limit1]
        p = softmax_block(k, tiles, valid, m, den, o, scale)
        seen = seen + block_values(k, o, p, base + PAGE * 128)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            sync.release_after(k.ring.empty + stage * 8, seen, k.zero)
        stage, parity = advance(k.ring, stage, parity)
        block = block + k.c.splits
    den[0], den[1] = quad_sum(den[0]), quad_sum(den[1])
    return stage, parity


@cute.jit
def merge_row(k: cutlass.Constexpr, head: Int32, cur: Int64):
    """Wait for all splits' words of row `split`, then for the tail; publish the output row."""
    c, b = k.c, Buffers.of(k.c)
    u = cute.make_rmem_tensor(cute.make_layout(c.splits + 2), Uint32)
    base = cur + b.part + Int64((k.kv_head * 16 + k.split) * (c.splits * c.part_bytes))
    sums_at = base + Int64((k.lane >> 3) * c.part_bytes + head * 128 + (k.lane & 7) * 16)
    split = cutlass.min(k.lane, c.splits - 1)
    stats_at = base + Int64(split * c.part_bytes + c.group_heads * 128 + head * 8)
    missing = sync.any_lane_empty(ask_merge(k, u, sums_at, stats_at))
    tries, since = Int32(0), Int64(0)
    if cutlass.const_expr(c.handoff == "words"):
        while missing != 0:
            missing = sync.any_lane_empty(ask_merge(k, u, sums_at, stats_at))
            tries, since = sync.overdue(tries, since)
    stamp(k, 5)
    sync.consumer_sync(c.warps * 32)  # the tail is done
    stamp(k, 6)
    top, den = sync.lds_pair(k.attn_p + head * TAIL_KEYS * 8)
    words = merge_splits(k, u, head, top, den)
    col = (k.kv_head * c.group_heads + head) * 64
    for w in cutlass.range_constexpr(4):
        put_word(k, k.lane < 8, cur + b.a, k.split, col + merge_dim(k, w), words[w])
    stamp(k, 7)


@cute.jit
def release_tail(k: cutlass.Constexpr, stage: Int32, seen: Uint32):
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        for _ in cutlass.range(k.tail_count, unroll=1):
            sync.release_after(k.ring.empty + stage * 8, [seen], k.zero)
            stage = stage + 1
            if stage == k.ring.n:
                stage = Int32(0)


@cute.jit
def run_attention(k: cutlass.Constexpr, cur: Int64, stage: Int32, parity: Int32):
    """Consumer warps' part: q and new K/V words in, attention output words out."""
    c, s, b = k.c, k.c.shape, Buffers.of(k.c)
    scale = s.head_dim**-0.5 * 1.4426950408889634
    if k.kv_head < s.kv_heads:
        head, half = k.wid % c.group_heads, k.wid // c.group_heads
        q = cute.make_rmem_tensor(cute.make_layout(16), Uint32)
        q_at = cur + b.q + Int64((k.kv_head * c.group_heads + head) * 2048 + k.lane * 16)
        stamp(k, 0)
        take_new_rows(k, cur + b.kv + Int64(k.kv_head * (16 * 256)), q, q_at)
        m = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        den = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        o = cute.make_rmem_tensor(cute.make_layout(32), Float32)
        zero_state(m, den, o)
        stamp(k, 1)
        stage, parity = run_blocks(k, q, m, den, o, half, stage, parity, scale)
        if cutlass.const_expr(c.red_buffers > 1):  # somebody may still add qkv's last sums
            sync.consumer_sync(c.warps * 32)
        stamp(k, 2)
        if half == 1:
            store_half(k, head, m, den, o)
        # after this barrier every warp has released all stages before the tail, so a warp that
        # does not read the tail may release it at once
        sync.consumer_sync(c.warps * 32)
        stamp(k, 3)
        if half == 1:
            if k.split < 16:
                seen = run_tail(k, head, q, stage, parity, scale)
                release_tail(k, stage, seen)
                stamp(k, 4)
                sync.consumer_sync(c.warps * 32)
        else:
            mine = (k.kv_head * 16 * c.splits + k.split) * c.part_bytes
            publish_part(k, head, m, den, o, cur + b.part + Int64(mine))
            stamp(k, 4)
            if k.split < 16:
                release_tail(k, stage, Uint32(0))
                merge_row(k, head, cur)
        if k.split < 16:
            for _ in cutlass.range(k.tail_count, unroll=1):
                stage, parity = advance(k.ring, stage, parity)
        else:
            sync.consumer_sync(c.warps * 32)
    return stage, parity


# -- set-up ------------------------------------------------------------------------------------
def attention_places(k, base, bid):
    a = AttentionSmem.of(k.c.group_heads)
    k.attn_rope, k.attn_new = base + a.rope, base + a.new
    k.attn_q, k.attn_p, k.attn_rows = base + a.q, base + a.p, base + a.rows
    k.kv_head, k.split = bid // k.c.splits, bid % k.c.splits


@cute.jit
def copy_table(k: cutlass.Constexpr, src: Int64, dst: Int32, n_bytes: cutlass.Constexpr):
    i = k.tid * 16
    while i < n_bytes:
        words = ptx_read(
            "ld.global.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];", [Uint32] * 4, src + Int64(i)
        )
        sync.sts_words(dst + i, words)
        i = i + k.c.warps * 32 * 16


def load_step_tables(k, rope, rows):
    """Rotary factors [16, 32, (cos, sin)] fp32 and row table [16, (position, c, path, path)]."""
    copy_table(k, rope, k.attn_rope, 16 * 32 * 8)
    copy_table(k, rows, k.attn_rows, 16 * 16)
