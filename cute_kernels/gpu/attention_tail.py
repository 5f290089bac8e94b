"""The tail of a row: its keys c(p) .. p, along its own path, one by one in position order.

Committed keys lie in ring stages, the step's own in shared memory. Layouts: attention.py.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.config import PAGE, TAIL_KEYS
from cute_kernels.gpu.fragments import exp2, unpack_pair
from cute_kernels.gpu.ring import advance
from cute_kernels.gpu.sync import ptx_read

NEG_INF = -float("inf")
TAIL_STEP = 16  # tail keys whose loads are in flight together


@cute.jit
def key_row(k: cutlass.Constexpr, i: Int32, first: Int32, path0: Uint32, path1: Uint32,
            tail: Int32):  # fmt: skip
    """(shared address of the K row, of the V row) of tail key i. The buffers are aligned so that
    bits 7 to 9 of an address are the row number's low bits, which the swizzle needs."""
    pos = first + i
    stage = tail + ((pos >> 6) - k.tail_first)
    if stage >= k.ring.n:
        stage = stage - k.ring.n
    at = k.ring.base + stage * k.ring.stage_bytes + (pos & 63) * 128
    apart = Int32(PAGE * 128)
    if pos >= k.committed:
        d = pos - k.committed
        path = path0
        if d >= 8:
            path = path1
        at = k.attn_new + Int32((path >> Uint32((d & 7) * 4)) & Uint32(15)) * 128
        apart = Int32(16 * 128)
    return at, at + apart


def dot_row(k, head, at):
    """One key's 64 products in one order."""
    total = Float32(0.0)
    for piece in range(8):
        words = sync.lds_words(at + ((piece << 4) ^ ((at >> 3) & 0x70)))
        q = []
        for part in range(2):
            q += sync.lds_quad(k.attn_q + (head * 64 + piece * 8 + part * 4) * 4)
        for e in range(4):
            lo, hi = unpack_pair(words[e])
            total = hi * q[2 * e + 1] + (lo * q[2 * e] + total)
    return total


@cute.jit
def tail_scores(k: cutlass.Constexpr, head: Int32, n: Int32, first: Int32, path0: Uint32,
                path1: Uint32, tail: Int32, scale: cutlass.Constexpr):  # fmt: skip
    """Lane-parallel scores of the row's tail keys; returns their maximum. (probability fp32,
    address of the V row) of every key go to shared memory; beyond n the probability is 0 and the
    row a readable one, so that the sums below may run over whole groups of keys."""
    top = Float32(NEG_INF)
    at = k.attn_p + (head * TAIL_KEYS + k.lane) * 8
    rounds = (n + 31) >> 5
    for r in cutlass.range(rounds, unroll=1):
        i = k.lane + 32 * r
        key, value_row = key_row(k, cutlass.min(i, n - 1), first, path0, path1, tail)
        score = sync.choose(i < n, dot_row(k, head, key) * scale, NEG_INF)
        sync.sts_pair(at + 256 * r, score, sync.as_float(value_row))
        top = sync.maximum([top, score])
    for shift in cutlass.range_constexpr(5):
        top = sync.maximum([top, cute.arch.shuffle_sync_bfly(top, offset=1 << shift)])
    for r in cutlass.range(rounds, unroll=1):
        sync.sts(at + 256 * r, exp2(sync.lds(at + 256 * r) - top))
    cute.arch.sync_warp()
    return top


def add_values(k, at, den, o0, o1):
    """TAIL_STEP keys, one by one; loads first, so that their latencies overlap."""
    pairs = [sync.lds_pair(at + 8 * i) for i in range(TAIL_STEP)]
    words = []
    for _, row in pairs:
        row = sync.as_int(row)
        words.append(sync.lds_word(
            row + (((k.lane >> 2) << 4) ^ ((row >> 3) & 0x70)) + (k.lane & 3) * 4
        ))  # fmt: skip
    for (p, _), word in zip(pairs, words, strict=True):
        lo, hi = unpack_pair(word)
        den, o0, o1 = den + p, o0 + p * lo, o1 + p * hi
    return den, o0, o1


@cute.jit
def tail_values(k: cutlass.Constexpr, head: Int32, n: Int32):
    """Sums over the tail in position order; this lane's dimensions 2 lane, 2 lane + 1."""
    den, o0, o1 = Float32(0.0), Float32(0.0), Float32(0.0)
    at = k.attn_p + head * TAIL_KEYS * 8
    for _ in cutlass.range((n + TAIL_STEP - 1) // TAIL_STEP, unroll=1):
        den, o0, o1 = add_values(k, at, den, o0, o1)
        at = at + TAIL_STEP * 8
    return den, o0, o1


@cute.jit
def stage_query(k: cutlass.Constexpr, head: Int32, row: Int32, q: cute.Tensor):
    """One row of Q, from the A fragments, as fp32 in K's order."""
    if (k.lane >> 2) == (row & 7):
        for v in cutlass.range_constexpr(4):  # k16 step
            for pair in cutlass.range_constexpr(2):
                low, high = q[v * 4 + pair * 2], q[v * 4 + pair * 2 + 1]
                lo, hi = unpack_pair(sync.select(row >= 8, high, low))
                place = v * 16 + pair * 8 + 2 * (k.lane & 3)
                sync.sts_pair(k.attn_q + (head * 64 + place) * 4, lo, hi)
    cute.arch.sync_warp()


@cute.jit
def run_tail(k: cutlass.Constexpr, head: Int32, q: cute.Tensor, stage: Int32, parity: Int32,
             scale: cutlass.Constexpr):  # fmt: skip
    """The tail of row `split`; leaves (maximum, denominator) and 64 sums for the merging warp.
    Returns a word that depends on everything read from the ring."""
    tail = stage
    for _ in cutlass.range(k.tail_count, unroll=1):
        sync.wait_parity(k.ring.full + stage * 8, parity)
        stage, parity = advance(k.ring, stage, parity)
    pos, first, path0, path1 = ptx_read(
        "ld.shared.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];",
        [Int32, Int32, Uint32, Uint32],
        k.attn_rows + k.split * 16,
    )
    stage_query(k, head, k.split, q)
    n = pos - first + 1
    if cutlass.const_expr(not k.c.tail):
        n = Int32(1)
    top = tail_scores(k, head, n, first, path0, path1, tail, scale)
    den, o0, o1 = tail_values(k, head, n)
    sync.sts_pair(k.attn_q + (head * 64 + 2 * k.lane) * 4, o0, o1)  # Q's place: it has been read
    if k.lane == 0:
        sync.sts_pair(k.attn_p + head * TAIL_KEYS * 8, top, den)
    return sync.as_bits(o0) | sync.as_bits(o1) | sync.as_bits(top)
