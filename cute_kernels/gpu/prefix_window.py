"""Which window of values a search looks at next (prefix_search.py), by warp 0.

Behind a histogram of the row the end of the prefix lies in one bin, above the window, or below.
Behind one of a sample it is only likely to lie in some bins, and the window becomes these.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.prefix import (
    BINS,
    DONE,
    FIRST_ID,
    GATHER,
    HISTOGRAM,
    LISTED,
    SPARSE_BITS,
    UPPER,
    W,
    at,
    bin_at,
    bits_per_bin,
    halves,
    joined,
    number,
    put,
    word,
)
from cute_kernels.gpu.sync import ptx_read
from cute_kernels.gpu.topk import key_of, value_of

LOWEST_KEY = 0x00800000  # of LOWEST


def shuffled_up(v, distance):
    return joined(*(cute.arch.shuffle_sync_up(w, distance, mask_and_clamp=0) for w in halves(v)))


def last_lane(v):
    return joined(*(cute.arch.shuffle_sync(w, 31) for w in halves(v)))


def bin_mass(k, b):
    return joined(sync.lds_word(bin_at(k, 0, b)), sync.lds_word(bin_at(k, 1, b)))


@cute.jit
def set_window(k: cutlass.Constexpr, low: Uint32, high: Uint32, before: Int64, above: Int32,
               state: Int32):  # fmt: skip
    put(k, W.LOW, low)
    put(k, W.HIGH, high)
    put(k, W.CEIL, high)
    put(k, W.ABOVE, above)
    put(k, W.STATE, state)
    put(k, W.FOUND, Int32(0))
    sync.sts_long(at(k, W.BEFORE), before)


@cute.jit
def take_bin(k: cutlass.Constexpr, low: Uint32, high: Uint32, before: Int64, above: Int32,
             n: Int32):  # fmt: skip
    """One thread. n: tokens in [low, high)."""
    ties = word(k, W.TIES)
    if (above + n <= LISTED) & (ties == 0):
        top = key_of(number(k, W.LARGEST)) + 1
        set_window(k, low, top, Int64(0), Int32(0), Int32(GATHER))
    elif n <= LISTED:
        set_window(k, low, high, before, above, Int32(GATHER))
    elif high - low == 1:
        put(k, W.VALUE, value_of(low))
        put(k, W.TIES, Int32(1))
        first, end = key_of(Float32(-2.0 * FIRST_ID)), key_of(Float32(-1.0 * FIRST_ID)) + 1
        set_window(k, first, end, before, above, Int32(HISTOGRAM))
    else:
        set_window(k, low, high, before, above, Int32(HISTOGRAM))


@cute.jit
def next_window(k: cutlass.Constexpr):
    """Warp 0, behind `histogram`: the bin in which the end lies, and what to do with it. A lane has
    BINS / 32 bins, the first lane those of the largest values."""
    each = BINS // 32
    limit, before = sync.lds_long(at(k, W.LIMIT)), sync.lds_long(at(k, W.BEFORE))
    mine, n = Int64(0), Int32(0)
    for i in cutlass.range_constexpr(each):
        b = BINS - 1 - (k.lane * each + i)
        mine = mine + bin_mass(k, b)
        n = n + sync.lds_int(bin_at(k, 2, b))
    upto, n_upto = mine, n
    for d in cutlass.range_constexpr(5):
        below = shuffled_up(upto, 1 << d)
        n_below = cute.arch.shuffle_sync_up(n_upto, 1 << d, mask_and_clamp=0)
        if k.lane >= 1 << d:
            upto, n_upto = upto + below, n_upto + n_below
    above = word(k, W.ABOVE)
    low, high, ceil = (Uint32(word(k, name)) for name in (W.LOW, W.HIGH, W.CEIL))
    before_all, above_all = before, above
    before, above = before + bin_mass(k, UPPER), above + sync.lds_int(bin_at(k, 2, UPPER))
    whole = before + last_lane(upto)
    n_whole = above + cute.arch.shuffle_sync(n_upto, 31)
    cute.arch.sync_warp()
    if before >= limit:  # the sample has misled
        if k.lane == 0:
            set_window(k, high, ceil, before_all, above_all, Int32(HISTOGRAM))
    elif whole < limit:
        if k.lane == 0:
            if low > LOWEST_KEY:
                set_window(k, Uint32(LOWEST_KEY), low, whole, n_whole, Int32(HISTOGRAM))
            else:  # all that there is does not reach the limit
                put(k, W.STATE, Int32(DONE))
    else:
        before, above = before + upto - mine, above + n_upto - n
        if (before < limit) & (before + mine >= limit):
            bits = bits_per_bin(high - low)
            found, b, i = Int32(0), Int32(0), Int32(0)
            while found == 0:
                b = BINS - 1 - (k.lane * each + i)
                if before + bin_mass(k, b) >= limit:
                    found = Int32(1)
                else:
                    before = before + bin_mass(k, b)
                    above = above + sync.lds_int(bin_at(k, 2, b))
                i = i + 1
            bottom = low + (Uint32(b) << Uint32(bits))
            top = sync.smaller(bottom - low + (Uint32(1) << Uint32(bits)), high - low) + low
            take_bin(k, bottom, top, before, above, sync.lds_int(bin_at(k, 2, b)))
    cute.arch.sync_warp()


def square(mass, n):
    """Of n terms: what their squares come to, if they are alike."""
    code = "{ .reg .f32 n; max.f32 n, {$r0}, 0f3F800000; rcp.approx.f32 {$w0}, n; }"
    return mass * mass * ptx_read(code, [Float32], Float32(n))


def deviations(squares):
    """Four of a sum of terms that are in the sample or not."""
    return 4.0 * cute.math.sqrt(sync.maximum([squares, Float32(0.0)]), fastmath=True)


@cute.jit
def likely_window(k: cutlass.Constexpr):
    """Warp 0, behind `histogram` of a sample: HIGH and LOW nearer to the end. It lies between them
    unless sums over the row are far from what the sample says, both of what is above and, where
    that is known, of what remains beyond."""
    each, share = BINS // 32, 2.0**-SPARSE_BITS
    before, rest = sync.lds_long(at(k, W.BEFORE)), sync.lds_long(at(k, W.REST))
    wanted = Float32(sync.lds_long(at(k, W.LIMIT)) - before) * share
    beyond, is_known = Float32(rest) * share, Int32(rest >= 0)
    masses, squares, mine, own_spread = [], [], Float32(0.0), Float32(0.0)
    for i in cutlass.range_constexpr(each):
        b = BINS - 1 - (k.lane * each + i)
        masses.append(Float32(bin_mass(k, b)))
        squares.append(square(masses[i], sync.lds_int(bin_at(k, 2, b))))
        mine, own_spread = mine + masses[i], own_spread + squares[i]
    upto, spread = mine, own_spread
    for d in cutlass.range_constexpr(5):
        more = cute.arch.shuffle_sync_up(upto, 1 << d, mask_and_clamp=0)
        wider = cute.arch.shuffle_sync_up(spread, 1 << d, mask_and_clamp=0)
        if k.lane >= 1 << d:
            upto, spread = upto + more, spread + wider
    whole, widest = cute.arch.shuffle_sync(upto, 31), cute.arch.shuffle_sync(spread, 31)
    upto, spread = upto - mine, spread - own_spread
    first, end = Uint32(BINS), Uint32(BINS)  # bins from the top: where it may lie, where it does
    for i in cutlass.range_constexpr(each):
        upto, spread, j = upto + masses[i], spread + squares[i], Uint32(k.lane * each + i)
        off, below = deviations(spread + squares[i]), whole - upto
        off_below = deviations(widest - spread + squares[i]) + whole * 1e-6
        may = Int32(upto + off >= wanted) & ((1 - is_known) | Int32(below - off_below <= beyond))
        must = Int32(upto - off >= wanted) | (is_known & Int32(below + off_below <= beyond))
        first = sync.smaller(first, sync.select(may, j, Uint32(BINS)))
        end = sync.smaller(end, sync.select(must, j, Uint32(BINS)))
    first, end = sync.warp_reduce("min", first), sync.warp_reduce("min", end)
    if k.lane == 0:
        low, high = Uint32(word(k, W.LOW)), Uint32(word(k, W.HIGH))
        width = (value_of(high) - value_of(low)) * (1.0 / BINS)
        top = key_of(value_of(high) - Float32(Int32(first)) * width)
        bottom = key_of(value_of(high) - Float32(Int32(end) + 1) * width)
        top = sync.select(first == 0, high, sync.smaller(top, high))
        bottom = sync.select(end == BINS, low, sync.larger(bottom, low))
        if bottom < top:
            put(k, W.LOW, bottom)
            put(k, W.HIGH, top)
        put(k, W.STATE, Int32(HISTOGRAM))
    cute.arch.sync_warp()
