"""Tree attention between qkv and o for up to 16 rows of one sequence, in canonical order.

A row at position p sums its keys in one order whatever the tree, the batch or the committed length:
keys below c(p) = 64 floor(max(p - 15, 0) / 64) in absolute blocks of 64, block b by split
b mod `splits`, a split's blocks ascending, splits merged ascending; then keys c(p) .. p along the
row's own path, one by one in position order, in fp32. Blocks beyond a row's c(p) are an exact
identity for it.

CTA (kv head, split) multiplies its blocks for all heads of the kv head: warp (head, half of the
keys), mma.sync m16n8k16 with the 16 rows on the m side. It publishes (sums, maximum, denominator)
as words, then does the tail of row `split` for its kv head while other splits' words arrive, and
merges them. KV blocks come through the weight ring; keys of the step's own rows come as words from
the qkv phase.

A page holds 64 positions; a block is one (page, layer, kv head): 64 rows of K, then of V, 128 bytes
each. In a row the 16-byte piece i lies at i ^ (row & 7), so ldmatrix has no bank conflicts. K rows
keep head dimensions in the order of `key_order`: the halves of a rotary pair side by side, and
within 16 values the order in which lanes hold the A fragments of Q.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.config import PAGE, TAIL_KEYS, AttentionSmem, Buffers
from cute_kernels.gpu.gemm import bf16_pair, mma, put_word, take_words, unpack_pair
from cute_kernels.gpu.ring import advance
from cute_kernels.gpu.sync import ptx_read

NEG_INF = -float("inf")


# -- results of qkv ----------------------------------------------------------------------------
def kv_word(row, word):
    """Byte offset of 32-bit word `word` in a swizzled 128-byte row."""
    return row * 128 + (((word >> 2) ^ (row & 7)) << 4) + (word & 3) * 4


def key_word(word):
    """Where a rotary pair (word of Q's column order) lies in a K row: see `key_order`."""
    return (word & ~7) + (word & 1) * 4 + ((word >> 1) & 3)


@cute.jit
def put_qkv(k: cutlass.Constexpr, dst: Int64, row: Int32, col: Int32, v0: Float32, v1: Float32):
    """Columns col, col + 1: a rotary pair of q or k, or two dimensions of v."""
    s, b = k.c.shape, Buffers.of(k.c)
    q_cols, kv_cols = s.heads * s.head_dim, s.kv_heads * s.head_dim
    kv = dst + (b.kv - b.q)
    word = (col >> 1) & 31
    if col < q_cols + kv_cols:
        cos, sin = sync.lds_pair(k.attn_rope + (row * 32 + word) * 8)
        w0 = v0 * cos - v1 * sin
        w1 = v1 * cos + v0 * sin
        if col < q_cols:
            put_word(k, row >= 0, dst, row, col, bf16_pair(w0, w1))
        else:
            at = ((col - q_cols) >> 6) * (16 * 256) + kv_word(row, key_word(word))
            sync.st_word(kv + Int64(at), bf16_pair(w0, w1))
    else:
        at = ((col - q_cols - kv_cols) >> 6) * (16 * 256) + 16 * 128 + kv_word(row, word)
        sync.st_word(kv + Int64(at), bf16_pair(v0, v1))


# -- committed blocks --------------------------------------------------------------------------
def ldmatrix(addr, transposed):
    t = ".trans" if transposed else ""
    return ptx_read(
        "ldmatrix.sync.aligned.m8n8.x4%s.shared.b16 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];" % t,
        [Uint32] * 4,
        addr,
    )


def exp2(x):
    return cute.math.exp2(x, fastmath=True)


def quad_max(v):
    v = cutlass.max(v, cute.arch.shuffle_sync_bfly(v, offset=1))
    return cutlass.max(v, cute.arch.shuffle_sync_bfly(v, offset=2))


def quad_sum(v):
    v = v + cute.arch.shuffle_sync_bfly(v, offset=1)
    return v + cute.arch.shuffle_sync_bfly(v, offset=2)


def block_scores(k, q, base, half):
    """S = Q K^T of 16 rows and this warp's 32 keys: 4 tiles of 8 keys; and the registers read."""
    i = k.lane
    loaded, tiles = [], []
    for j in range(4):
        key = half * 32 + 8 * j + (i & 7)
        s = [Float32(0.0)] * 4
        for pair in range(2):
            piece = 4 * pair + (i >> 3)
            b = ldmatrix(base + key * 128 + ((piece ^ (key & 7)) << 4), False)
            loaded += b
            for e in range(2):
                at = (pair * 2 + e) * 4
                s = mma(s, [q[at + w] for w in range(4)], b[2 * e : 2 * e + 2])
        tiles.append(s)
    return tiles, loaded


def block_values(k, o, probabilities, base, half):
    """O += P V; o: flat [8 tiles of 8 dimensions x 4]. Returns the registers read."""
    i, loaded = k.lane, []
    for u in range(2):
        p = probabilities[2 * u], probabilities[2 * u + 1]
        a = [bf16_pair(p[e >> 1][2 * (e & 1)], p[e >> 1][2 * (e & 1) + 1]) for e in range(4)]
        key = half * 32 + 16 * u + (i & 7) + 8 * ((i >> 3) & 1)
        for n in range(0, 8, 2):
            piece = n + (i >> 4)
            b = ldmatrix(base + key * 128 + ((piece ^ (key & 7)) << 4), True)
            loaded += b
            for e in range(2):
                at = (n + e) * 4
                d = mma([o[at + w] for w in range(4)], a, b[2 * e : 2 * e + 2])
                for w in range(4):
                    o[at + w] = d[w]
    return loaded


def softmax_block(k, tiles, valid, m, den, o, scale):
    """One online-softmax step for both row halves; returns the probabilities by tile."""
    p = [[None] * 4 for _ in range(4)]
    for h in range(2):
        s = [sync.choose(valid[h], tiles[j][2 * h + e] * scale, NEG_INF)
             for j in range(4) for e in range(2)]  # fmt: skip
        top = s[0]
        for v in s[1:]:
            top = cutlass.max(top, v)
        new = cutlass.max(m[h], quad_max(top))
        safe = sync.choose(new > NEG_INF, new, 0.0)
        alpha = exp2(m[h] - safe)
        total = Float32(0.0)
        for j in range(4):
            for e in range(2):
                v = exp2(s[j * 2 + e] - safe)
                p[j][2 * h + e] = v
                total = total + v
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
    """Merge both halves of the keys and publish this split's part of 16 rows of a head."""
    c = k.c
    for h in range(2):
        row = (k.lane >> 2) + 8 * h
        m1, den1 = sync.lds_pair(k.squares + (head * 16 + row) * 8)
        top = cutlass.max(m[h], m1)
        safe = sync.choose(top > NEG_INF, top, 0.0)
        e0, e1 = exp2(m[h] - safe), exp2(m1 - safe)
        to = part + Int64(row * (c.splits * c.part_bytes))
        for n in range(8):
            dim = n * 8 + 2 * (k.lane & 3)
            a0, a1 = sync.lds_pair(k.red + ((head * 16 + row) * 64 + dim) * 4)
            words = [o[n * 4 + 2 * h] * e0 + a0 * e1, o[n * 4 + 2 * h + 1] * e0 + a1 * e1]
            sync.st_words(to + Int64((head * 64 + dim) * 4), [sync.as_bits(w) for w in words])
        publish_stats(k, head, top, den[h] * e0 + den1 * e1, to)


@cute.jit
def publish_stats(k: cutlass.Constexpr, head: Int32, top: Float32, den: Float32, to: Int64):
    if (k.lane & 3) == 0:
        at = to + Int64(k.c.group_heads * 256 + head * 8)
        sync.st_words(at, [sync.as_bits(top), sync.as_bits(den)])


# -- the tail: one row, key by key -------------------------------------------------------------
@cute.jit
def key_row(k: cutlass.Constexpr, i: Int32, first: Int32, committed: Int32,
            path0: Uint32, path1: Uint32, tail: Int32, tail_bytes: cutlass.Constexpr):  # fmt: skip
    """(shared address of the K row, row number, distance to V) of tail key i."""
    pos = first + i
    row, at, apart = pos & 63, Int32(0), Int32(PAGE * 128)
    if pos < committed:
        stage = tail + ((pos >> 6) - k.tail_first)
        if stage >= k.ring.n:
            stage = stage - k.ring.n
        at = k.ring.base + stage * tail_bytes
    else:
        d = pos - committed
        path = path0
        if d >= 8:
            path = path1
        row = Int32((path >> Uint32((d & 7) * 4)) & Uint32(15))
        at = k.attn_new
        apart = Int32(16 * 128)
    return at + row * 128, row, apart


@cute.jit
def tail_scores(k: cutlass.Constexpr, head: Int32, n: Int32, first: Int32, committed: Int32,
                path0: Uint32, path1: Uint32, tail: Int32, scale: cutlass.Constexpr):  # fmt: skip
    """Lane-parallel scores of the row's tail keys; returns their maximum; probabilities (fp32) go
    to shared memory. Each score has one order of 64 products."""
    top = Float32(NEG_INF)
    scores = cute.make_rmem_tensor(cute.make_layout(TAIL_KEYS // 32), Float32)
    for r in cutlass.range_constexpr(TAIL_KEYS // 32):
        i = k.lane + 32 * r
        score = Float32(NEG_INF)
        if i < n:
            at, row, _ = key_row(
                k, i, first, committed, path0, path1, tail, k.ring.stage_bytes
            )
            total = Float32(0.0)
            for piece in cutlass.range_constexpr(8):
                words = sync.lds_words(at + ((piece ^ (row & 7)) << 4))
                for e in cutlass.range_constexpr(4):
                    lo, hi = unpack_pair(words[e])
                    q0, q1 = sync.lds_pair(k.attn_q + (head * 64 + piece * 8 + e * 2) * 4)
                    total = total + lo * q0
                    total = total + hi * q1
            score = total * scale
        scores[r] = score
        top = cutlass.max(top, score)
    for shift in cutlass.range_constexpr(5):
        top = cutlass.max(top, cute.arch.shuffle_sync_bfly(top, offset=1 << shift))
    for r in cutlass.range_constexpr(TAIL_KEYS // 32):
        sync.sts(k.attn_p + (head * TAIL_KEYS + k.lane + 32 * r) * 4, exp2(scores[r] - top))
    cute.arch.sync_warp()
    return top


@cute.jit
def tail_values(k: cutlass.Constexpr, head: Int32, n: Int32, first: Int32, committed: Int32,
                path0: Uint32, path1: Uint32, tail: Int32):  # fmt: skip
    """Sums over the tail in position order; this lane's dimensions 2 lane, 2 lane + 1."""
    den, o0, o1 = Float32(0.0), Float32(0.0), Float32(0.0)
    for i in cutlass.range(n, unroll=4):
        at, row, apart = key_row(k, i, first, committed, path0, path1, tail, k.ring.stage_bytes)
        word = sync.ptx_read(
            "ld.shared.b32 {$w0}, [{$r0}];",
            [Uint32],
            at + apart + (((k.lane >> 2) ^ (row & 7)) << 4) + (k.lane & 3) * 4,
        )
        p = sync.lds(k.attn_p + (head * TAIL_KEYS + i) * 4)
        lo, hi = unpack_pair(word)
        den, o0, o1 = den + p, o0 + p * lo, o1 + p * hi
    return den, o0, o1


@cute.jit
def stage_query(k: cutlass.Constexpr, head: Int32, row: Int32, q: Int64):
    """One row of Q as fp32 in K's order (its words have been seen by this warp)."""
    col = k.lane * 2
    slot = ((row & 7) * 4 + ((col >> 2) & 3)) * 4 + ((col >> 4) & 1) * 128
    slot = slot + ((col >> 1) & 1) * 2 + (row >> 3)
    word = sync.ld_word(q + Int64((col >> 5) * 1024 + slot * 4))
    lo, hi = unpack_pair(word)
    sync.sts_pair(k.attn_q + (head * 64 + key_word(k.lane) * 2) * 4, lo, hi)
    cute.arch.sync_warp()


@cute.jit
def take_new_rows(k: cutlass.Constexpr, kv: Int64):
    """This step's own K and V rows of the kv head, into shared memory as they arrive."""
    i = k.tid
    while i < 16 * 256 // 16:
        words = cute.make_rmem_tensor(cute.make_layout(4), Uint32)
        take_words(k, words, kv + Int64(i * 16), (0,))
        for_copy = [words[0], words[1], words[2], words[3]]
        sync.ptx_do(
            "st.shared.v4.b32 [{$r0}], {{$r1},{$r2},{$r3},{$r4}};", k.attn_new + i * 16, *for_copy
        )
        i = i + k.c.warps * 32


def ask_merge(k, u, base, lane_at, head):
    """One round of loads of all splits' sums and statistics; returns the largest word."""
    c, worst = k.c, None
    for s in range(c.splits):
        at = base + Int64(s * c.part_bytes)
        u[4 * s], u[4 * s + 1] = sync.ld_pair_words(at + Int64(lane_at))
        u[4 * s + 2], u[4 * s + 3] = sync.ld_pair_words(at + Int64(c.group_heads * 256 + head * 8))
    for i in range(4 * c.splits):
        worst = u[i] if worst is None else sync.larger(worst, u[i])
    return worst


def merge_order(k, u, top_tail, den_tail, o_tail):
    """Splits ascending, then the tail."""
    top = top_tail
    for s in range(k.c.splits):
        top = cutlass.max(top, sync.as_float(u[4 * s + 2]))
    den, o0, o1 = Float32(0.0), Float32(0.0), Float32(0.0)
    for s in range(k.c.splits):
        e = exp2(sync.as_float(u[4 * s + 2]) - top)
        den = den + sync.as_float(u[4 * s + 3]) * e
        o0 = o0 + sync.as_float(u[4 * s]) * e
        o1 = o1 + sync.as_float(u[4 * s + 1]) * e
    e = exp2(top_tail - top)
    den = den + den_tail * e
    return (o0 + o_tail[0] * e) / den, (o1 + o_tail[1] * e) / den


# -- the phase ---------------------------------------------------------------------------------
@cute.jit
def run_attention(k: cutlass.Constexpr, cur: Int64, stage: Int32, parity: Int32):
    """Consumer warps' part: q and new K/V words in, attention output words out."""
    c, s, b = k.c, k.c.shape, Buffers.of(k.c)
    scale = s.head_dim**-0.5 * 1.4426950408889634
    if k.kv_head < s.kv_heads:
        head, half = k.wid % c.group_heads, k.wid // c.group_heads
        q_at = cur + b.q + Int64((k.kv_head * c.group_heads + head) * 2048)
        q = cute.make_rmem_tensor(cute.make_layout(16), Uint32)
        take_words(k, q, q_at + Int64(k.lane * 16), (0, 512, 1024, 1536))
        m = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        den = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        o = cute.make_rmem_tensor(cute.make_layout(32), Float32)
        zero_state(m, den, o)
        limit0 = sync.ptx_read(
            "ld.shared.b32 {$w0}, [{$r0}];", [Int32], k.attn_rows + (k.lane >> 2) * 16 + 4
        )
        limit1 = sync.ptx_read(
            "ld.shared.b32 {$w0}, [{$r0}];", [Int32], k.attn_rows + (k.lane >> 2) * 16 + 132
        )
        block = k.split
        while block < k.main_blocks:
            sync.wait_parity(k.ring.full + stage * 8, parity)
            kv_base = k.ring.base + stage * k.ring.stage_bytes
            tiles, seen = block_scores(k, q, kv_base, half)
            valid = [block * PAGE < limit0, block * PAGE < limit1]
            p = softmax_block(k, tiles, valid, m, den, o, scale)
            seen = seen + block_values(k, o, p, kv_base + PAGE * 128, half)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                sync.release_after(k.ring.empty + stage * 8, seen, k.zero)
            stage, parity = advance(k.ring, stage, parity)
            block = block + c.splits
        den[0], den[1] = quad_sum(den[0]), quad_sum(den[1])
        sync.consumer_sync(c.warps * 32)
        if half == 1:
            store_half(k, head, m, den, o)
        take_new_rows(k, cur + b.kv + Int64(k.kv_head * (16 * 256)))
        sync.consumer_sync(c.warps * 32)
        if half == 0:
            mine = (k.kv_head * 16 * c.splits + k.split) * c.part_bytes
            publish_part(k, head, m, den, o, cur + b.part + Int64(mine))
        if k.split < 16:
            tail, seen_tail = stage, Uint32(0)
            for i in cutlass.range(k.tail_count, unroll=1):
                sync.wait_parity(k.ring.full + stage * 8, parity)
                stage, parity = advance(k.ring, stage, parity)
            if half == 0:
                row = k.split
                pos, first, path0, path1 = sync.ptx_read(
                    "ld.shared.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];",
                    [Int32, Int32, Uint32, Uint32],
                    k.attn_rows + row * 16,
                )
                stage_query(k, head, row, q_at)
                n = pos - first + 1
                if cutlass.const_expr(not c.tail):
                    n = Int32(1)
                top = tail_scores(
                    k, head, n, first, k.committed, path0, path1, tail, scale
                )
                den_t, o0, o1 = tail_values(
                    k, head, n, first, k.committed, path0, path1, tail
                )
                seen_tail = sync.as_bits(o0) | sync.as_bits(o1) | sync.as_bits(top)
                u = cute.make_rmem_tensor(cute.make_layout(4 * c.splits), Uint32)
                mine = (k.kv_head * 16 + row) * (c.splits * c.part_bytes)
                merge_at = cur + b.part + Int64(mine)
                lane_at = (head * 64 + 2 * k.lane) * 4
                tries, since = Int32(0), Int64(0)
                while sync.any_lane_empty(ask_merge(k, u, merge_at, lane_at, head)) != 0:
                    tries, since = sync.overdue(tries, since)
                v0, v1 = merge_order(k, u, top, den_t, (o0, o1))
                col = (k.kv_head * c.group_heads + head) * 64 + 2 * k.lane
                put_word(k, row >= 0, cur + b.a, row, col, bf16_pair(v0, v1))
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                back = tail
                for i in cutlass.range(k.tail_count, unroll=1):
                    sync.release_after(k.ring.empty + back * 8, [seen_tail], k.zero)
                    back = back + 1
                    if back == k.ring.n:
                        back = Int32(0)
        # the buffers shared with the GEMM phases are free again
        sync.consumer_sync(c.warps * 32)
    return stage, parity


# -- set-up ------------------------------------------------------------------------------------
def attention_places(k, base, bid):
    a = AttentionSmem()
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
        sync.ptx_do(
            "st.shared.v4.b32 [{$r0}], {{$r1},{$r2},{$r3},{$r4}};", dst + i, *words
        )
        i = i + k.c.warps * 32 * 16


def load_step_tables(k, rope, rows):
    """Rotary factors [16, 32, (cos, sin)] fp32 and row table [16, (position, c, path, path)]."""
    copy_table(k, rope, k.attn_rope, 16 * 32 * 8)
    copy_table(k, rows, k.attn_rows, 16 * 16)
