"""The race: of the tokens that are left, the one with the smallest E / p, the lowest id of equals.

E is the token's exponential noise at this position, so that token i wins with probability p_i, and
it is the same token wherever and with whatever else the row is computed. Compared are
(z - largest) / temperature - log E in fp64, for few tokens: E is at least its uniform number, so a
token whose 32-bit number is not below p (smallest E / p so far) 2^32 has lost. That *reach* is
shared by the CTA and starts with the likeliest token's. Approximate arithmetic may only let a token
pass too easily: what it is off by is far below SLACK. So who passes depends on timing, and the
winner does not.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float64, Int32, Int64, Uint32

from cute_kernels.gpu import exact, sync
from cute_kernels.gpu.fragments import exp2
from cute_kernels.gpu.prefix import (
    INF,
    QUADS,
    W,
    at,
    entry_id,
    entry_value,
    halves,
    in_prefix,
    joined,
    load_quads,
    new_values,
    number,
    put,
    quads,
    word,
)
from cute_kernels.gpu.prefix_search import (
    entry,
)
from cute_kernels.gpu.sync import ptx_do, ptx_read

SLACK = 1e-3
PAIR = 2  # blocks of noise that are made together: each is a long chain of dependent instructions
LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
HIGHEST = 3.4028234663852886e38
NUMBERS = 4294967296.0
NO_TOKEN = 0x7FFFFFFF


def one_of(four, i):
    low = sync.select((i & 1) != 0, four[1], four[0])
    high = sync.select((i & 1) != 0, four[3], four[2])
    return sync.select((i & 2) != 0, high, low)


def first_reach(k, position, keys):
    """Of the likeliest token: its E 2^32, or somewhat more."""
    top = word(k, W.TOP)
    coin = one_of(exact.numbers(top >> 2, position, keys), top & 3)
    left = (NUMBERS - Float32(coin)) * (1.0 / NUMBERS)
    # 1 - w comes out as 0 at worst, where E is 22.9
    left = sync.maximum([left, Float32(2.0**-33)])
    e = -LN_2 * cute.math.log2(left, fastmath=True)
    return (e * (1.0 + SLACK) + 1e-6) * NUMBERS


def hopeless_below(largest, temperature, cut, reach):
    """Tokens below this cannot be in reach with any number (p reach < 1/2), or are not left."""
    room = LN_2 * (cute.math.log2(reach, fastmath=True) + 1.0)
    rounding = sync.maximum([largest, -largest]) * 2.0**-22
    down = temperature * (room * (1.0 + SLACK) + SLACK) + rounding
    return sync.maximum([cut, largest - down])


def mark_if(coin, limit, hits, bit):
    """hits with that bit set where coin < limit."""
    return ptx_read(
        "{ .reg .pred q; .reg .f32 c; cvt.rn.f32.u32 c, {$r0}; setp.lt.f32 q, c, {$r1};"
        f" mov.b32 {{$w0}}, {{$r2}}; @q or.b32 {{$w0}}, {{$w0}}, {1 << bit}; }}",
        [Int32], coin, limit, hits,
    )  # fmt: skip


@cute.jit
def load_items(k: cutlass.Constexpr, row: Int64, first: Int32, listed: Int32, values: cute.Tensor,
               blocks: cute.Tensor):  # fmt: skip
    """Of the list, or of the row: QUADS blocks of four tokens; those that take no part are -inf."""
    threads = k.c.warps * 32
    if listed >= 0:
        for i in cutlass.range_constexpr(QUADS):
            item, z, token = first + i * threads + k.tid, Float32(-INF), Int32(0)
            if item < listed:
                z, token = entry_value(entry(k, item)), entry_id(entry(k, item))
            blocks[i] = token >> 2
            for e in cutlass.range_constexpr(4):
                values[4 * i + e] = sync.choose((token & 3) == e, z, -INF)
    else:
        load_quads(k, row, first, QUADS, values)
        for i in cutlass.range_constexpr(QUADS):
            blocks[i] = first + i * threads + k.tid


@cute.jit
def run_race(k: cutlass.Constexpr, row: Int64, position: Int32, temperature: Float32,
             min_p: Float32, seed_low: Uint32, seed_high: Uint32):  # fmt: skip
    """All consumer warps; what is left is the prefix (CUT, LAST) as far as min-p goes. The warps'
    winners into the list's place: `winner`."""
    threads, keys = k.c.warps * 32, exact.round_keys(seed_low, seed_high)
    largest, cut, last = number(k, W.LARGEST), number(k, W.CUT), word(k, W.LAST)
    if min_p > 0.0:
        least, stays = exact.min_p_cut(largest, temperature, min_p)
        end = sync.select_int(stays != 0, Int32(NO_TOKEN), Int32(-1))
        if least == cut:
            last = cutlass.min(last, end)
        if least > cut:
            cut, last = least, end
    scale = sync.least(exact.inverse_temperature(temperature) * LOG2_E, Float32(HIGHEST))
    if k.tid == 0:
        put(k, W.REACH, first_reach(k, position, keys))
    sync.consumer_sync(threads)
    listed = word(k, W.KEPT)
    items = sync.select_int(listed >= 0, listed, Int32(quads(k)))
    now, coming = new_values(QUADS), new_values(QUADS)
    blocks = cute.make_rmem_tensor(cute.make_layout(QUADS), Int32)
    following = cute.make_rmem_tensor(cute.make_layout(QUADS), Int32)
    best, winner, first = Float64(-INF), Int32(NO_TOKEN), Int32(0)
    load_items(k, row, first, listed, now, blocks)
    while first < items:
        load_items(k, row, first + QUADS * threads, listed, coming, following)
        reach, hits = number(k, W.REACH), Int32(0)
        low = hopeless_below(largest, temperature, cut, reach)
        for i in cutlass.range_constexpr(0, QUADS, PAIR):
            if sync.maximum([now[4 * i + e] for e in range(4 * PAIR)]) >= low:
                for j in cutlass.range_constexpr(PAIR):
                    coins = exact.numbers(blocks[i + j], position, keys)
                    for e in cutlass.range_constexpr(4):
                        x = 4 * (i + j) + e
                        limit = exp2((now[x] - largest) * scale) * reach
                        hits = mark_if(coins[e], limit, hits, x)
        while hits != 0:
            bit = sync.lowest_bit(hits)
            hits = hits & (hits - 1)
            block = blocks[QUADS - 1]
            for i in cutlass.range_constexpr(QUADS - 1):
                block = sync.select_int((bit >> 2) == i, blocks[i], block)
            token = 4 * block + (bit & 3)
            z = sync.ld_float(row + Int64(token) * 4)
            coin = one_of(exact.numbers(block, position, keys), bit & 3)
            # another thread may have come nearer in the meantime
            near = Float32(coin) < exp2((z - largest) * scale) * number(k, W.REACH)
            if near & (in_prefix(z, token, cut, last) != 0):
                score = exact.score(z, largest, temperature, coin)
                if is_better(score, token, best, winner) != 0:
                    best, winner = score, token
                    reach = exp2(32.0 - Float32(score) * LOG2_E) * (1.0 + SLACK)
                    ptx_do(
                        "red.shared.min.u32 [{$r0}], {$r1};", at(k, W.REACH), sync.as_bits(reach)
                    )
        for i in cutlass.range_constexpr(4 * QUADS):
            now[i] = coming[i]
        for i in cutlass.range_constexpr(QUADS):
            blocks[i] = following[i]
        first = first + QUADS * threads
    for d in cutlass.range_constexpr(5):
        score = from_lane(best, 1 << d)
        token = cute.arch.shuffle_sync_bfly(winner, offset=1 << d)
        if is_better(score, token, best, winner) != 0:
            best, winner = score, token
    if k.lane == 0:
        sync.sts_long(k.red + 16 * k.wid, bits_of(best))
        sync.sts_int(k.red + 16 * k.wid + 8, winner)


def is_better(score, token, best, winner):
    """Int32: the first is ahead of the second."""
    return Int32(score > best) | (Int32(score == best) & Int32(token < winner))


def bits_of(v):
    return ptx_read("mov.b64 {$w0}, {$r0};", [Int64], v)


def float_of(v):
    return ptx_read("mov.b64 {$w0}, {$r0};", [Float64], v)


def from_lane(v, offset):
    return float_of(joined(*(cute.arch.shuffle_sync_bfly(w, offset=offset) for w in halves(v))))


@cute.jit
def winner(k: cutlass.Constexpr):
    """Of all warps, behind a barrier."""
    best, token = float_of(sync.lds_long(k.red)), sync.lds_int(k.red + 8)
    for w in cutlass.range_constexpr(1, k.c.warps):
        other, other_token = (
            float_of(sync.lds_long(k.red + 16 * w)),
            sync.lds_int(k.red + 16 * w + 8),
        )
        if is_better(other, other_token, best, token) != 0:
            best, token = other, other_token
    return token
