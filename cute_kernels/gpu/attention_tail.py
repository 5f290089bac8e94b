"""The tail of a row: its keys c(p) .. p, along its own path, one by one in position order.

Committed keys lie in ring stages, the step's own in shared memory; a key's row looks the same in
both. The address of a row carries the row's swizzle in its low bits: piece i lies at `at ^ 16 i`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.gpu import sync
from cute_kernels.gpu.attention_plan import ROWS, TAIL_KEYS, stages_per_block
from cute_kernels.gpu.attention_stream import desc_int, path_row, row_position
from cute_kernels.gpu.board import Desc
from cute_kernels.gpu.fragments import exp2, unpack_pair
from cute_kernels.gpu.kv_layout import PAGE
from cute_kernels.gpu.ring import advance

NEG_INF = -float("inf")
TAIL_STEP = 16  # tail keys whose loads are in flight together


def row_address(base, row, row_bytes):
    return base + row * row_bytes + ((row & 7) << 4)


def tail_slot(p, slot, head, heads):
    """Shared address of a tail's place: Q in K's order, then sums; maximum and denominator."""
    return p.tails + (slot * heads + head) * p.smem.tail_stride


@cute.jit
def key_row(k: cutlass.Constexpr, p: cutlass.Constexpr, row: Int32, pos: Int32, committed: Int32,
            tail: Int32, tail_first: Int32):  # fmt: skip
    """(shared address of the K row, of the V row) of the key at a position of a row's path. tail:
    the stage of the first tail block."""
    per_block, row_bytes = stages_per_block(k.c), 2 * k.c.shape.head_dim
    if cutlass.const_expr(p.new is None):
        if pos >= committed:
            pos = committed + path_row(p, row, pos - committed)
    stage = tail + ((pos >> 6) - tail_first) * per_block
    if stage >= k.ring.n:
        stage = stage - k.ring.n
    values = stage
    if cutlass.const_expr(per_block == 2):
        values = stage + 1
        if values == k.ring.n:
            values = Int32(0)
    place = pos & 63
    key_base = k.ring.base + stage * k.ring.stage_bytes
    value_base = k.ring.base + values * k.ring.stage_bytes
    if cutlass.const_expr(per_block == 1):
        value_base = value_base + PAGE * row_bytes
    if cutlass.const_expr(p.new is not None):
        if pos >= committed:
            place = path_row(p, row, pos - committed)
            key_base, value_base = p.new, p.new + ROWS * row_bytes
    return row_address(key_base, place, row_bytes), row_address(value_base, place, row_bytes)


def dot_pieces(sums, at, q_at):
    """Adds 64 products of a K row and Q, to four sums by place in a piece's words."""
    for piece in range(8):
        words = sync.lds_words(at ^ (piece << 4))
        q = []
        for part in range(2):
            q += sync.lds_quad(q_at + (piece * 8 + part * 4) * 4)
        for e in range(4):
            lo, hi = unpack_pair(words[e])
            sums[e] = hi * q[2 * e + 1] + (lo * q[2 * e] + sums[e])
    return sums


def dot_row(k, at, q_at):
    """One key's products in one order."""
    sums = [Float32(0.0)] * 4
    for part in range(k.c.shape.head_dim // 64):
        sums = dot_pieces(sums, at + part * 128, q_at + part * 256)
    return (sums[0] + sums[1]) + (sums[2] + sums[3])


@cute.jit
def tail_scores(k: cutlass.Constexpr, p: cutlass.Constexpr, head: Int32, row: Int32, q_at: Int32,
                n: Int32, first: Int32, committed: Int32, tail: Int32,
                tail_first: Int32):  # fmt: skip
    """Lane-parallel scores of the row's tail keys; returns their maximum. (probability fp32,
    address of the V row) of every key go to shared memory; beyond n the probability is 0 and the
    row a readable one, so that the sums below may run over whole groups of keys."""
    top = Float32(NEG_INF)
    scale = k.c.shape.head_dim**-0.5 * 1.4426950408889634
    at = p.keys + (head * TAIL_KEYS + k.lane) * 8
    rounds = (n + 31) >> 5
    for r in cutlass.range(rounds, unroll=1):
        i = k.lane + 32 * r
        key, value_row = key_row(
            k, p, row, first + cutlass.min(i, n - 1), committed, tail, tail_first
        )
        score = sync.choose(i < n, dot_row(k, key, q_at) * scale, NEG_INF)
        sync.sts_pair(at + 256 * r, score, sync.as_float(value_row))
        top = sync.maximum([top, score])
    for shift in cutlass.range_constexpr(5):
        top = sync.maximum([top, cute.arch.shuffle_sync_bfly(top, offset=1 << shift)])
    for r in cutlass.range(rounds, unroll=1):
        sync.sts(at + 256 * r, exp2(sync.lds(at + 256 * r) - top))
    cute.arch.sync_warp()
    return top


def add_values(k, at, den, o):
    """TAIL_STEP keys, one by one; loads first, so that their latencies overlap. o: of this lane's
    dimensions 2 lane, 2 lane + 1, and of those 64 further on."""
    pairs = [sync.lds_pair(at + 8 * i) for i in range(TAIL_STEP)]
    words = []
    for _, row in pairs:
        row = (sync.as_int(row) ^ ((k.lane >> 2) << 4)) + (k.lane & 3) * 4
        words.append([sync.lds_word(row + 128 * i) for i in range(len(o) // 2)])
    for (p, _), mine in zip(pairs, words, strict=True):
        den = den + p
        for i, word in enumerate(mine):
            lo, hi = unpack_pair(word)
            o[2 * i], o[2 * i + 1] = o[2 * i] + p * lo, o[2 * i + 1] + p * hi
    return den


@cute.jit
def tail_values(k: cutlass.Constexpr, p: cutlass.Constexpr, head: Int32, n: Int32,
                o: cute.Tensor):  # fmt: skip
    """Sums over the tail in position order; returns the denominator."""
    den, dims = Float32(0.0), k.c.shape.head_dim // 32
    at = p.keys + head * TAIL_KEYS * 8
    for i in cutlass.range_constexpr(dims):
        o[i] = Float32(0.0)
    for _ in cutlass.range((n + TAIL_STEP - 1) // TAIL_STEP, unroll=1):
        mine = [o[i] for i in range(dims)]
        den = add_values(k, at, den, mine)
        for i in cutlass.range_constexpr(dims):
            o[i] = mine[i]
        at = at + TAIL_STEP * 8
    return den


@cute.jit
def stage_query(k: cutlass.Constexpr, to: Int32, row: Int32, q: cute.Tensor):
    """One row of Q, from the warp's head rows, as fp32 in K's order."""
    half = k.c.shape.head_dim // 8  # words of a block of rows
    if (k.lane >> 2) == (row & 7):
        for i in cutlass.range_constexpr(half):
            lo, hi = unpack_pair(sync.select(row >= 8, q[half + i], q[i]))
            sync.sts_pair(to + (i * 8 + 2 * (k.lane & 3)) * 4, lo, hi)
    cute.arch.sync_warp()


@cute.jit
def wait_for_tail(k: cutlass.Constexpr, tail_count: Int32, stage: Int32, parity: Int32):
    for _ in cutlass.range(tail_count * stages_per_block(k.c), unroll=1):
        sync.wait_parity(k.ring.full + stage * 8, parity)
        stage, parity = advance(k.ring, stage, parity)


@cute.jit
def run_tail(k: cutlass.Constexpr, p: cutlass.Constexpr, head: Int32, row: Int32, slot: Int32,
             q: cute.Tensor, stage: Int32, tail_first: Int32):  # fmt: skip
    """The tail of a row, whose stages have arrived; leaves head_dim sums, maximum and denominator
    in the slot. Returns a word that depends on everything read from the ring."""
    pos = row_position(k, p, row)
    first = (cutlass.max(pos - 15, 0) >> 6) << 6
    to = tail_slot(p, slot, head, k.c.group_heads)
    stage_query(k, to, row, q)
    n = pos - first + 1
    top = tail_scores(k, p, head, row, to, n, first, desc_int(k, Desc.COMMITTED), stage, tail_first)
    dims = k.c.shape.head_dim // 32
    o = cute.make_rmem_tensor(cute.make_layout(dims), Float32)
    den = tail_values(k, p, head, n, o)
    seen = sync.as_bits(top)
    for i in cutlass.range_constexpr(dims // 2):  # Q's place: it has been read
        sync.sts_pair(to + (64 * i + 2 * k.lane) * 4, o[2 * i], o[2 * i + 1])
        seen = seen | sync.as_bits(o[2 * i]) | sync.as_bits(o[2 * i + 1])
    if k.lane == 0:
        sync.sts_pair(to + k.c.shape.head_dim * 4, top, den)
    return seen
