"""From a split's sums to the output words of a row: exchange, publish, wait, merge.

The two warps of a query head hold sums over different keys and all dimensions; each gives its
partner the sums that the partner publishes, half 0 the lower and half 1 the upper half of the
dimensions. A split's part of a row: per query head `head_dim` sums as bf16 (rounded like the output
itself; fp32 made the hand-off longer), then per query head maximum and denominator as fp32. Vector
4 i + t of the sums holds those of lane t: word w is of dimensions 8 (4 i + w) + 2 t and the next,
so that a store of a quad of lanes fills whole sectors.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.attention_blocks import NEG_INF
from cute_kernels.gpu.attention_plan import ROWS, TAIL_GROUPS, halves
from cute_kernels.gpu.attention_stream import desc_int
from cute_kernels.gpu.attention_tail import tail_at
from cute_kernels.gpu.board import Desc
from cute_kernels.gpu.fragments import bf16_pair, exp2, put_word, unpack_pair


# -- the two halves of a block's keys ------------------------------------------------------------
def kept_tiles(k):
    """Tiles of 8 dimensions that one warp publishes."""
    return k.c.shape.head_dim // 8 // halves(k.c)


def give_sums(k, p, head, half, o):
    """Hand the partner its tiles; the own ones become the first of o."""
    n = kept_tiles(k)
    to = k.red + (head * 2 + half) * (n * 512) + k.lane * 16
    lower = half == 0
    for i in range(n):
        low, high = ([o[(j + i) * 4 + e] for e in range(4)] for j in (0, n))
        sync.sts_quad(to + i * 512, [sync.choose(lower, b, a) for a, b in zip(low, high)])
        for e in range(4):
            o[i * 4 + e] = sync.choose(lower, low[e], high[e])


@cute.jit
def give_stats(k: cutlass.Constexpr, p: cutlass.Constexpr, head: Int32, half: Int32,
               m: cute.Tensor, den: cute.Tensor):  # fmt: skip
    if (k.lane & 3) == 0:
        to = p.stats + ((head * 2 + half) * 8 + (k.lane >> 2)) * 16
        sync.sts_quad(to, [m[0], m[1], den[0], den[1]])


def publish_part(k, p, head, half, rows, m, den, o, part):
    """Publish this warp's dimensions of a split's part; loads come before stores, since the
    compiler keeps the order of a load behind a relaxed store."""
    n, stats, others = kept_tiles(k), None, None
    if halves(k.c) == 2:
        stats = sync.lds_quad(p.stats + ((head * 2 + 1 - half) * 8 + (k.lane >> 2)) * 16)
        at = k.red + (head * 2 + 1 - half) * (n * 512) + k.lane * 16
        others = [sync.lds_quad(at + i * 512) for i in range(n)]
    for h in range(2):
        publish_rows(k, h, rows, head, half, m, den, o, stats, others, part)


@cute.jit
def publish_rows(k: cutlass.Constexpr, h: cutlass.Constexpr, rows: Int32, head: Int32, half: Int32,
                 m: cute.Tensor, den: cute.Tensor, o: cute.Tensor, stats: cutlass.Constexpr,
                 others: cutlass.Constexpr, part: Int64):  # fmt: skip
    """Rows 8 h to 8 h + 7, if the step has any of them."""
    if rows > 8 * h:
        row, t = (k.lane >> 2) + 8 * h, k.lane & 3
        words, top, den_all = part_words(k, h, m, den, o, stats, others)
        if row < rows:
            row_bytes = 2 * k.c.shape.head_dim
            to = part + Int64(row * (k.c.splits * k.c.part_bytes))
            sums = to + Int64(head * row_bytes + half * (len(words) * 16) + t * 16)
            for i in cutlass.range_constexpr(0, len(words), 4):
                sync.st_words(sums + i * 16, words[i : i + 4])
            if (t == 0) & (half == 0):
                at = to + Int64(k.c.group_heads * row_bytes + head * 8)
                sync.st_words(at, [sync.as_bits(top), sync.as_bits(den_all)])


def part_words(k, h, m, den, o, stats, others):
    """(words of sums, maximum, denominator) of a row over both halves of the keys."""
    sums = [[o[i * 4 + 2 * h + e] for e in range(2)] for i in range(kept_tiles(k))]
    if others is None:
        return [bf16_pair(*pair) for pair in sums], m[h], den[h]
    top = sync.maximum([m[h], stats[h]])
    safe = sync.choose(top > NEG_INF, top, 0.0)
    mine, other = exp2(m[h] - safe), exp2(stats[h] - safe)
    words = []
    for pair, given in zip(sums, others, strict=True):
        words.append(bf16_pair(*(v * mine + given[2 * h + e] * other for e, v in enumerate(pair))))
    return words, top, den[h] * mine + stats[2 + h] * other


# -- merging -------------------------------------------------------------------------------------
def lanes_per_split(k):
    """Lanes whose 16-byte vectors make one split's sums of a row and head."""
    return k.c.shape.head_dim // 8


@cute.jit
def take_parts(k: cutlass.Constexpr, u: cute.Tensor, head: Int32, row_at: Int64,
               main_blocks: Int32, polled: cutlass.Constexpr = True):  # fmt: skip
    """Wait for all parts of a row; without `polled` they are there. A lane has 4 words of every
    (32 / lanes_per_split)th split and the statistics of one. Splits without a block publish
    nothing: they are an exact identity."""
    c, lanes = k.c, lanes_per_split(k)
    n, row_bytes = c.splits * lanes // 32, 2 * c.shape.head_dim
    sums_at = row_at + Int64((k.lane // lanes) * c.part_bytes + head * row_bytes)
    sums_at = sums_at + Int64((k.lane % lanes) * 16)
    split = cutlass.min(k.lane, c.splits - 1)
    stats_at = row_at + Int64(split * c.part_bytes + c.group_heads * row_bytes + head * 8)
    for i in cutlass.range_constexpr(n):
        awaited = i * (32 // lanes) + k.lane // lanes < main_blocks
        empty = sync.select(awaited, Uint32(sync.EMPTY), Uint32(0))
        for e in cutlass.range_constexpr(4):
            u[4 * i + e] = empty
    awaited = split < main_blocks
    u[4 * n] = sync.select(awaited, Uint32(sync.EMPTY), sync.as_bits(Float32(NEG_INF)))
    u[4 * n + 1] = sync.select(awaited, Uint32(sync.EMPTY), Uint32(0))
    if cutlass.const_expr(polled):
        missing, tries, since = Uint32(desc_int(k, Desc.ROWS) > 8), Int32(0), Int64(0)
        while missing != 0:  # many merge at once: polling for everything would cost L2 bandwidth
            missing = ask_stats(k, u, stats_at)
            tries, since = sync.overdue(tries, since)
        missing = Uint32(1)
        while missing != 0:
            missing = ask_parts(k, u, sums_at, stats_at)
            tries, since = sync.overdue(tries, since)
    else:
        ask_parts(k, u, sums_at, stats_at)


def ask_parts(k, u, sums_at, stats_at):
    """One round of loads of what is missing; 1 if any lane still misses something."""
    n, each = k.c.splits * lanes_per_split(k) // 32, 32 // lanes_per_split(k) * k.c.part_bytes
    for i in range(n):
        mine = [u[4 * i + e] for e in range(4)]
        for e, v in enumerate(sync.ld_missing_words(sums_at + i * each, mine, sync.largest(mine))):
            u[4 * i + e] = v
    ask_stats(k, u, stats_at)
    return sync.any_lane_empty(sync.largest([u[i] for i in range(4 * n + 2)]))


def ask_stats(k, u, stats_at):
    """The same of statistics alone, the last words that a split gives."""
    at = k.c.splits * lanes_per_split(k) // 8
    mine = [u[at], u[at + 1]]
    u[at], u[at + 1] = sync.ld_missing_words(stats_at, mine, sync.largest(mine))
    return sync.any_lane_empty(sync.larger(u[at], u[at + 1]))


def merge_dim(k, w):
    """First dimension of word w of this lane's four."""
    vector = k.lane % lanes_per_split(k)
    return (vector // 4 * 4 + w) * 8 + vector % 4 * 2


def merge_words(k, p, u, slot, head):
    """Splits of equal remainder ascending, then the tail's groups likewise, then those sums in
    pairs; four words of this lane's 8 outputs."""
    c, lanes = k.c, lanes_per_split(k)
    n = c.splits * lanes // 32
    mine = sync.as_float(u[4 * n])
    top, den = mine, sync.as_float(u[4 * n + 1])
    if p.tail:
        has_group = k.lane < TAIL_GROUPS
        at = tail_at(k, p, slot, cutlass.min(k.lane, TAIL_GROUPS - 1), head)
        top_tail, den_tail = sync.lds_pair(at + c.shape.head_dim * 4)
        top = sync.maximum([top, sync.choose(has_group, top_tail, NEG_INF)])
    top = sync.warp_max(top)
    e = exp2(mine - top)
    den = sync.choose(k.lane < c.splits, den * e, 0.0)
    if p.tail:
        e_tail = sync.choose(has_group, exp2(top_tail - top), 0.0)
        den = den + den_tail * e_tail
    # ptxas moves nothing across a shuffle: what may wait side by side is written side by side
    shares = [(32 // lanes) * i + k.lane // lanes for i in range(n)]
    factors, o = [cute.arch.shuffle_sync(e, split) for split in shares], [Float32(0.0)] * 8
    for shift in range(5):
        den = den + cute.arch.shuffle_sync_bfly(den, offset=1 << shift)
        for i in range(shift * n // 5, (shift + 1) * n // 5):
            add_split(o, [u[4 * i + w] for w in range(4)], factors[i])
    if p.tail:
        add_tail(k, p, o, e_tail, slot, head)
    # x + y is the same either way round: every lane has one and the same total
    for shift in range(lanes.bit_length() - 1, 5):
        others = [cute.arch.shuffle_sync_bfly(v, offset=1 << shift) for v in o]
        o = [v + other for v, other in zip(o, others, strict=True)]
    inverse = 1.0 / den
    return [bf16_pair(o[2 * w] * inverse, o[2 * w + 1] * inverse) for w in range(4)]


def add_split(o, words, factor):
    for w, word in enumerate(words):
        for d, v in enumerate(unpack_pair(word)):
            o[2 * w + d] = o[2 * w + d] + v * factor


def add_tail(k, p, o, e_tail, slot, head):
    """The tail's groups, spread over the lanes like splits. e_tail: the factor of group `lane`."""
    lanes = lanes_per_split(k)
    for first in range(0, TAIL_GROUPS, 32 // lanes):
        group = first + k.lane // lanes
        factor = cute.arch.shuffle_sync(e_tail, group)
        at = tail_at(k, p, slot, cutlass.min(group, TAIL_GROUPS - 1), head)
        for w in range(4):
            own = sync.lds_pair(at + merge_dim(k, w) * 4)
            for d in range(2):
                o[2 * w + d] = o[2 * w + d] + own[d] * factor


@cute.jit
def publish_row(k: cutlass.Constexpr, p: cutlass.Constexpr, u: cute.Tensor, head: Int32,
                row: Int32, slot: Int32, out: Int64):  # fmt: skip
    c = k.c
    words = merge_words(k, p, u, slot, head)
    col = (p.kv_head * c.group_heads + head) * c.shape.head_dim
    for w in cutlass.range_constexpr(4):
        put_word(
            k.lane < lanes_per_split(k), out, row, col + merge_dim(k, w), words[w], p.chunk_bytes
        )


def row_parts(k, p, part, row):
    """Address of a row's parts of this CTA's kv head."""
    return part + Int64((p.kv_head * ROWS + row) * (k.c.splits * k.c.part_bytes))
