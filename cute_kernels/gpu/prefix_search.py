"""Where a prefix of a row of logits ends, in (logit descending, id ascending) order; exactly.

The prefix has the tokens with less than a *limit* before them, in tokens (top-k) or in mass of
their weights (top-p, integers of 2^-44, so that sums do not depend on their order).

    gather     a pass over the row: (logit, id) of at most LISTED tokens between two values
    survey     the same, and all mass, of which top-p takes its part; first as an estimate whose
               error is bounded, which nearly always leaves no doubt where the prefix ends
    sort       of these, in shared memory, and the end of the prefix among them
    histogram  a pass over the row: mass and number by 256 parts of a window of values
    sample     the same over a sixteenth of the row: about where the end lies

The largest logits of parts of the row (the CTAs' results) say from which value on there are some
300 tokens. Those are gathered; if the end is not among them, a sample says in which window below it
is likely to lie, with few tokens in it: every token of a histogram's window costs adding to shared
memory, those above cost an addition in registers. If the end lies elsewhere, that window is taken.
A window is cut until it holds few enough tokens to list, by the bits of an order-preserving
integer, 8 bits a pass. A window of a single value with more tokens than that goes on with
x = -(2^18 + id) in the place of the logit.

KEPT says how many entries of the sorted list are the prefix, or is -1 if the list is only a part of
it. A prefix that was found before (CUT, LAST) bounds the next: tokens outside of it do not count.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.gpu import exact, sync
from cute_kernels.gpu.prefix import (
    BINS,
    DONE,
    ESTIMATE,
    GATHER,
    HISTOGRAM,
    LISTED,
    LOWEST,
    MAXIMA_AT,
    SAMPLE,
    SORTED_AT,
    SPARSE_BITS,
    SURVEY,
    W,
    at,
    bin_at,
    entry_id,
    entry_value,
    gather,
    histogram,
    number,
    put,
    survey,
    word,
)
from cute_kernels.gpu.prefix_window import (
    LOWEST_KEY,
    last_lane,
    likely_window,
    next_window,
    shuffled_up,
)
from cute_kernels.gpu.sync import ptx_read
from cute_kernels.gpu.topk import key_of, value_of

GUESSED = 330  # tokens that are gathered first


# -- the list ------------------------------------------------------------------------------------
@cute.jit
def sort(k: cutlass.Constexpr, n: Int32):
    """Every entry to the place that its rank is; all differ."""
    mine = k.tid
    if k.tid == 0:
        sync.sts_long(k.red + 8 * n, Int64(-1))  # pairs are compared; LISTED is even
    sync.consumer_sync(k.c.warps * 32)
    while mine < n:
        own, rank, i = sync.lds_long(k.red + 8 * mine), Int32(0), Int32(0)
        while i < n:
            for other in sync.lds_longs(k.red + 8 * i):
                rank = rank + is_before(other, own)
            i = i + 2
        sync.sts_long(k.red + SORTED_AT + 8 * rank, own)
        mine = mine + k.c.warps * 32


def is_before(a, b):
    """Unsigned."""
    return ptx_read(
        "{ .reg .pred q; setp.lt.u64 q, {$r0}, {$r1}; selp.s32 {$w0}, 1, 0, q; }", [Int32], a, b
    )


def entry(k, i):
    """Of the sorted list."""
    return sync.lds_long(k.red + SORTED_AT + 8 * i)


@cute.jit
def mass_before(k: cutlass.Constexpr, i: Int32, n: Int32, temperature: Float32):
    """(mass of entry i of n, 0 where there is none; with those of lower lanes). Warp 0."""
    mine = Int64(0)
    if i < n:
        largest, z = number(k, W.LARGEST), entry_value(entry(k, i))
        if word(k, W.TIES) != 0:
            z = number(k, W.VALUE)
        mine = exact.mass(z, largest, exact.inverse_temperature(temperature))
    total = mine
    for d in cutlass.range_constexpr(5):
        below = shuffled_up(total, 1 << d)
        if k.lane >= 1 << d:
            total = total + below
    return mine, total


@cute.jit
def count_kept(k: cutlass.Constexpr, n: Int32, by_mass: Int32, temperature: Float32):
    """Warp 0: entries of the list with less than LIMIT before them, where BEFORE is before all;
    those with less than MOST; and what is before the tokens that follow the list."""
    before, limit = sync.lds_long(at(k, W.BEFORE)), sync.lds_long(at(k, W.LIMIT))
    kept, beyond = Int32(cutlass.min(limit - before, Int64(n))), before + Int64(n)
    kept_most = kept
    if by_mass != 0:
        kept, kept_most, first, beyond = Int32(0), Int32(0), Int32(0), before
        most = sync.lds_long(at(k, W.MOST))
        while first < n:
            mine, upto = mass_before(k, first + k.lane, n, temperature)
            here, is_there = beyond + upto - mine, Int32(first + k.lane < n)
            stays, may_stay = is_there & Int32(here < limit), is_there & Int32(here < most)
            kept = kept + Int32(sync.warp_reduce("add", Uint32(stays)))
            kept_most = kept_most + Int32(sync.warp_reduce("add", Uint32(may_stay)))
            beyond = beyond + last_lane(upto)
            first = first + 32
    return kept, kept_most, beyond


@cute.jit
def list_mass(k: cutlass.Constexpr, n: Int32, temperature: Float32):
    """Warp 0: of all entries."""
    total, first = Int64(0), Int32(0)
    while first < n:
        _, upto = mass_before(k, first + k.lane, n, temperature)
        total, first = total + last_lane(upto), first + 32
    return total


@cute.jit
def end_in_list(k: cutlass.Constexpr, n: Int32, by_mass: Int32, temperature: Float32):
    """Warp 0: CUT, LAST and KEPT from the sorted list. If that was only a part of the prefix, but
    the prefix is short enough, it is gathered next; if the limit was not reached, what lies below
    is looked at."""
    kept, kept_most, beyond = count_kept(k, n, by_mass, temperature)
    final, ties, low = entry(k, kept - 1), word(k, W.TIES), Uint32(word(k, W.LOW))
    is_whole = Int32(sync.lds_long(at(k, W.BEFORE)) == 0) & (1 - ties)
    limit = sync.lds_long(at(k, W.LIMIT))
    is_short = Int32(limit <= LISTED) & (1 - by_mass)
    cut = sync.choose(ties != 0, number(k, W.VALUE), entry_value(final))
    cute.arch.sync_warp()
    # an estimate will do if every limit that it allows for ends the prefix at the same token
    most = sync.lds_long(at(k, W.MOST))
    vague = by_mass & Int32(most > limit) & (Int32(kept != kept_most) | Int32(beyond < most))
    if k.lane == 0:
        if vague != 0:
            put(k, W.FOUND, Int32(0))
            put(k, W.STATE, Int32(SURVEY))
        elif (beyond < limit) & (low > LOWEST_KEY):
            sync.sts_long(at(k, W.BEFORE), beyond)
            put(k, W.ABOVE, word(k, W.ABOVE) + n)
            put(k, W.HIGH, low)
            put(k, W.CEIL, low)
            put(k, W.LOW, widened(k, low, 2.0))
            put(k, W.STATE, Int32(SAMPLE))
        else:
            put(k, W.CUT, cut)
            put(k, W.LAST, entry_id(final))
            put(k, W.KEPT, sync.select_int(is_whole != 0, kept, Int32(-1)))
            put(k, W.STATE, Int32(DONE))
            if (is_short != 0) & (is_whole == 0):
                put(k, W.STATE, Int32(GATHER))
                put(k, W.TIES, Int32(0))
                put(k, W.FOUND, Int32(0))
                put(k, W.LOW, key_of(cut))
                put(k, W.HIGH, key_of(number(k, W.LARGEST)) + 1)
                sync.sts_long(at(k, W.BEFORE), Int64(0))


# -- the search ----------------------------------------------------------------------------------
@cute.jit
def set_limit(k: cutlass.Constexpr, top_p: Float32, exactly: Int32):
    """One thread, behind `survey` and a barrier."""
    total, off = Int64(0), Int64(0)
    for w in cutlass.range_constexpr(k.c.warps):
        total = total + sync.lds_long(k.red + SORTED_AT + 8 * w)
    if exactly == 0:  # fp32 sums of up to 2^10 approximate weights a thread, masses rounded down
        off = (total >> 12) + (1 << 18)
    sync.sts_long(at(k, W.LIMIT), exact.mass_limit(top_p, cutlass.max(total - off, Int64(0))))
    sync.sts_long(at(k, W.MOST), exact.mass_limit(top_p, total + off))
    sync.sts_long(at(k, W.REST), total - sync.lds_long(at(k, W.LIMIT)))


def guess(parts):
    """Which of the maxima of so many parts, in descending order, about GUESSED tokens reach."""
    return max(1, int(parts * (1 - math.exp(-GUESSED / parts))))


def widened(k, low, by):
    """A key below: of the value that is (1 + by) times as far from the largest logit."""
    value, largest = value_of(low), number(k, W.LARGEST)
    down = value - by * (largest - value)
    return sync.larger(key_of(sync.maximum([down, Float32(LOWEST)])), Uint32(LOWEST_KEY))


@cute.jit
def floor_of_maxima(k: cutlass.Constexpr, rank: Int32):
    """The rank-th largest of the maxima of parts of the row, into LOW: as many tokens reach it.
    All warps; the maxima are padded with -inf to a multiple of 4."""
    n = word(k, W.MAXIMA)
    if k.tid < n:
        mine, before, upto = sync.lds(k.red + MAXIMA_AT + 4 * k.tid), Int32(0), Int32(0)
        for i in cutlass.range(n >> 2, unroll=4):
            for other in sync.lds_quad(k.red + MAXIMA_AT + 16 * i):
                before = count_if("gt", other, mine, before)
                upto = count_if("ge", other, mine, upto)
        if (before < rank) & (rank <= upto):
            put(k, W.LOW, key_of(sync.maximum([mine, Float32(LOWEST)])))


def count_if(how, a, b, n):
    """n + 1 where the comparison of two fp32 holds."""
    return ptx_read(
        f"{{ .reg .pred q; setp.{how}.f32 q, {{$r0}}, {{$r1}}; mov.b32 {{$w0}}, {{$r2}};"
        " @q add.s32 {$w0}, {$w0}, 1; }",
        [Int32], a, b, n,
    )  # fmt: skip


@cute.jit
def open_search(k: cutlass.Constexpr, limit: Int64, state: Int32):
    """One thread; `floor_of_maxima` gives LOW."""
    put(k, W.STATE, state)
    put(k, W.HIGH, key_of(number(k, W.LARGEST)) + 1)
    put(k, W.CEIL, key_of(number(k, W.LARGEST)) + 1)
    put(k, W.TIES, Int32(0))
    put(k, W.ABOVE, Int32(0))
    put(k, W.FOUND, Int32(0))
    sync.sts_long(at(k, W.BEFORE), Int64(0))
    sync.sts_long(at(k, W.LIMIT), limit)
    sync.sts_long(at(k, W.MOST), limit)
    sync.sts_long(at(k, W.REST), Int64(-1))
    put(k, W.KEPT, Int32(-1))


@cute.jit
def search(k: cutlass.Constexpr, row: Int64, by_mass: Int32, temperature: Float32, top_p: Float32):
    """All consumer warps, behind open_search, floor_of_maxima and a barrier: the end of the
    prefix."""
    threads = k.c.warps * 32
    state = word(k, W.STATE)
    while state != DONE:
        if (state == HISTOGRAM) | (state == SAMPLE):
            for i in cutlass.range_constexpr(-(-3 * (BINS + 1) // threads)):
                if k.tid + i * threads < 3 * (BINS + 1):
                    sync.sts_int(bin_at(k, 0, k.tid + i * threads), Int32(0))
            sync.consumer_sync(threads)
            sparse = sync.select_int(state == SAMPLE, Int32(SPARSE_BITS), Int32(0))
            histogram(k, row, by_mass, temperature, sparse)
            sync.consumer_sync(threads)
            if k.wid == 0:
                if state == SAMPLE:
                    likely_window(k)
                else:
                    next_window(k)
        else:
            exactly = Int32(state == SURVEY)
            if state == GATHER:
                gather(k, row)
            else:
                survey(k, row, temperature, exactly)
            sync.consumer_sync(threads)
            n = word(k, W.FOUND)
            if state != GATHER:
                if k.tid == 0:
                    set_limit(k, top_p, exactly)
            sync.consumer_sync(threads)
            if n <= LISTED:
                sort(k, n)
                sync.consumer_sync(threads)
                if k.wid == 0:
                    end_in_list(k, n, by_mass, temperature)
            elif k.tid == 0:
                put(k, W.FOUND, Int32(0))
                if state == ESTIMATE:
                    put(k, W.STATE, Int32(SURVEY))
                else:  # the maxima were a poor guess
                    put(k, W.STATE, Int32(HISTOGRAM))
        sync.consumer_sync(threads)
        state = word(k, W.STATE)
