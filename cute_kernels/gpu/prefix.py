"""Where a prefix of a row of logits ends, in (logit descending, id ascending) order; exactly.

The prefix has the tokens with less than a *limit* before them, in tokens (top-k) or in mass of
their weights (top-p, integers of 2^-44, so that sums do not depend on their order). It is given by
CUT and LAST: a token belongs to it if its logit is above CUT, or equal to it and its id at most
LAST. Everything is done by the consumer warps of one CTA over a row that lies in L2:

    survey     a pass over the row: all mass, of which top-p takes its part
    gather     a pass over the row: (logit, id) of at most LISTED tokens between two values
    sort       of these, in shared memory, and the end of the prefix among them
    histogram  a pass over the row: mass and number by 256 parts of a window of values

The largest logits of parts of the row (the CTAs' results) say from which value on there are some
300 tokens. Those are gathered; if the end is not among them a window below is cut until it holds
few enough tokens to list, by the bits of an order-preserving integer, 8 bits a pass. A window of a
single value with more tokens than that goes on with x = -(2^18 + id) in the place of the logit.

KEPT says how many entries of the sorted list are the prefix, or is -1 if the list is only a part of
it. A prefix that was found before (CUT, LAST) bounds the next: tokens outside of it do not count.
"""

import math
from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.gpu import exact, sync
from cute_kernels.gpu.sync import ptx_read
from cute_kernels.gpu.topk import key_of, value_of

LISTED = 512  # entries of a list, 8 bytes each: order key of the value, complemented, above the id
GUESSED = 330  # tokens that are gathered first
BINS = 256
QUADS = 4  # vectors of four logits that a thread has in hand
LOWEST, INF = -3.4028234663852886e38, float("inf")
LOWEST_KEY = 0x00800000  # of LOWEST
FIRST_ID = 1 << 18  # of -x, where ids take the logits' place: all have the same exponent
SURVEY, GATHER, HISTOGRAM, DONE = range(4)


class W(IntEnum):
    """Words of the control block, which lies where the row squares do."""

    LARGEST = 0  # what is known of the row: largest logit, its smallest id, log of the sum, flags
    TOP = 1
    LOG_SUM = 2
    FLAGS = 3
    CUT = 4  # the prefix
    LAST = 5
    KEPT = 6
    FOUND = 7  # tokens that `gather` has seen
    STATE = 8  # what comes next
    LOW = 9  # order keys: the end lies in [LOW, HIGH), if it does not lie below
    HIGH = 10
    TIES = 11  # 1: x in the place of the logit, of the tokens whose logit is VALUE
    VALUE = 12
    ABOVE = 13  # tokens at or above HIGH
    MAXIMA = 14  # how many logits the maxima of parts of the row are
    GUESS = 15  # which of them some GUESSED tokens reach
    BEFORE = 16  # 64 bits: what is at or above HIGH
    LIMIT = 18  # 64 bits
    REACH = 20  # of race.py


CONTROL_BYTES = 4 * (W.REACH + 1)
SORTED_AT, MAXIMA_AT = 8 * LISTED, 16 * LISTED  # from the scratch for partial sums on


def check(c):
    """The scratch that `decide` takes from the step's phases is there."""
    plan = c.smem_plan()
    wanted = MAXIMA_AT + 4 * max(c.warps * 32, -(-c.ctas // 4) * 4)
    if plan["partial sums"] < wanted or plan["row squares"] < CONTROL_BYTES:
        raise ValueError(
            f"{c.shape.name}: warps is {c.warps}; decisions need {wanted} B of scratch for partial"
            f" sums and {CONTROL_BYTES} B for row squares, there are {plan['partial sums']} and"
            f" {plan['row squares']}"
        )


# -- words ---------------------------------------------------------------------------------------
def at(k, word):
    return k.squares + 4 * int(word)


def word(k, name):
    return sync.lds_int(at(k, name))


def number(k, name):
    return sync.lds(at(k, name))


def put(k, name, value):
    sync.sts_int(at(k, name), sync.as_bits(value))


def packed(x, token):
    """An entry of a list: ascending as unsigned numbers is the order of the tokens."""
    return ptx_read("mov.b64 {$w0}, {{$r0}, {$r1}};", [Int64], token, ~key_of(x))


def entry_value(entry):
    return value_of(~halves(entry)[1])


def entry_id(entry):
    return Int32(halves(entry)[0])


def halves(v):
    """Low and high word of 64 bits."""
    return ptx_read("mov.b64 {{$w0}, {$w1}}, {$r0};", [Uint32] * 2, v)


def joined(lo, hi):
    return ptx_read("mov.b64 {$w0}, {{$r0}, {$r1}};", [Int64], lo, hi)


def in_prefix(z, token, cut, last):
    tied = Int32(z == cut) & Int32(token <= last)
    return Int32(z > cut) | tied


# -- passes over the row -------------------------------------------------------------------------
def quads(k):
    return -(-k.c.shape.vocab // 4)


def load_quads(k, row, first, n, values):
    """Vectors first + i threads + tid, i < n, of the row; what is not there is -inf."""
    vocab, threads = k.c.shape.vocab, k.c.warps * 32
    for i in range(n):
        quad = first + i * threads + k.tid
        four = sync.ld_floats_if(Int32(quad < quads(k)), row + Int64(quad) * 16, -INF)
        for e in range(4):
            if vocab % 4:
                four[e] = sync.choose(4 * quad + e < vocab, four[e], -INF)
            values[4 * i + e] = four[e]


def new_values(n):
    return cute.make_rmem_tensor(cute.make_layout(4 * n), Float32)


@cute.jit
def turn_to_ids(values: cute.Tensor, first: Int32, threads: cutlass.Constexpr, value: Float32):
    """Of tokens with that logit x, of the others -inf; first: the thread's first vector."""
    for i in cutlass.range_constexpr(values.layout.shape):
        token = 4 * (first + i // 4 * threads) + i % 4
        values[i] = sync.choose(values[i] == value, -Float32(token + FIRST_ID), -INF)


@cute.jit
def shift(values: cute.Tensor):
    """The next vector to the front: a loop over vectors that is not unrolled is short code, which
    matters where code runs once a step."""
    for i in cutlass.range_constexpr(values.layout.shape - 4):
        values[i] = values[i + 4]


@cute.jit
def survey(k: cutlass.Constexpr, row: Int64, temperature: Float32):
    """Mass of the prefix so far, per warp into the list's place."""
    threads = k.c.warps * 32
    cut, last, largest = number(k, W.CUT), word(k, W.LAST), number(k, W.LARGEST)
    inverse, total, first = exact.inverse_temperature(temperature), Int64(0), Int32(0)
    # exp(-31) < 2^-44: nothing below has mass
    low = exact.minus(largest, exact.times(Float32(31.0), temperature))
    low = sync.maximum([low, cut])
    now, coming = new_values(QUADS), new_values(QUADS)
    load_quads(k, row, first, QUADS, now)
    while first < quads(k):
        load_quads(k, row, first + QUADS * threads, QUADS, coming)
        for i in cutlass.range(QUADS, unroll=1):
            if sync.maximum([now[e] for e in range(4)]) >= low:
                token = 4 * (first + i * threads + k.tid)
                for e in cutlass.range_constexpr(4):
                    counts = in_prefix(now[e], token + e, cut, last)
                    x = sync.choose(counts != 0, now[e], -INF)
                    total = total + exact.mass(exact.weight(x, largest, inverse))
            shift(now)
        for i in cutlass.range_constexpr(4 * QUADS):
            now[i] = coming[i]
        first = first + QUADS * threads
    # a thread's sum has at most 57 bits: 2^13 tokens of 2^44
    parts = [sync.warp_reduce("add", Uint32(total >> (20 * i)) & 0xFFFFF) for i in range(3)]
    total = Int64(parts[0]) + (Int64(parts[1]) << 20) + (Int64(parts[2]) << 40)
    if k.lane == 0:
        sync.sts_long(k.red + 8 * k.wid, total)


@cute.jit
def end_survey(k: cutlass.Constexpr, top_p: Float32):
    """One thread, behind a barrier."""
    total = Int64(0)
    for w in cutlass.range_constexpr(k.c.warps):
        total = total + sync.lds_long(k.red + 8 * w)
    sync.sts_long(at(k, W.LIMIT), exact.mass_limit(top_p, total))
    put(k, W.STATE, Int32(GATHER))


def bin_at(k, part, i):
    """Low words of the masses, high words, numbers: three arrays of BINS words."""
    return k.red + 4 * (part * BINS + i)


@cute.jit
def flush(k: cutlass.Constexpr, to: Int32, total: Int64, n: Int32):
    """Add to a bin; 64 bits as two words, with the carry of the first."""
    if n > 0:
        lo, hi = halves(total)
        seen = Uint32(sync.add_shared(bin_at(k, 0, to), lo))
        hi = hi + carry_of(seen, lo)
        if hi != 0:
            sync.add_shared(bin_at(k, 1, to), hi)
        sync.add_shared(bin_at(k, 2, to), n)


def carry_of(a, b):
    """Of a + b."""
    return ptx_read(
        "{ .reg .b32 s; .reg .pred q; add.u32 s, {$r0}, {$r1}; setp.lt.u32 q, s, {$r0};"
        " selp.u32 {$w0}, 1, 0, q; }",
        [Uint32], a, b,
    )  # fmt: skip


def bits_per_bin(span):
    """Bits of a key that a bin leaves open, where BINS bins cover `span` keys."""
    used = ptx_read("clz.b32 {$w0}, {$r0};", [Int32], span - 1)
    return cutlass.max(32 - used - 8, Int32(0))


@cute.jit
def histogram(k: cutlass.Constexpr, row: Int64, by_mass: Int32, temperature: Float32):
    """What [LOW, HIGH) holds, by bins of keys, which are 0 before."""
    threads = k.c.warps * 32
    cut, last, largest = number(k, W.CUT), word(k, W.LAST), number(k, W.LARGEST)
    ties, value = word(k, W.TIES), number(k, W.VALUE)
    low_key = Uint32(word(k, W.LOW))
    span = Uint32(word(k, W.HIGH)) - low_key
    bits, low = bits_per_bin(span), value_of(low_key)
    inverse, amount = exact.inverse_temperature(temperature), Int64(1)
    if by_mass != 0:
        amount = exact.mass(exact.weight(value, largest, inverse))
    varies = by_mass & (1 - ties)
    # equal neighbours are added up before they go to their bin
    same, total, n, first = Int32(0), Int64(0), Int32(0), Int32(0)
    now, coming = new_values(QUADS), new_values(QUADS)
    load_quads(k, row, first, QUADS, now)
    while first < quads(k):
        load_quads(k, row, first + QUADS * threads, QUADS, coming)
        if ties != 0:
            turn_to_ids(now, first + k.tid, threads, value)
        for i in cutlass.range(QUADS, unroll=1):
            if sync.maximum([now[e] for e in range(4)]) >= low:
                token = 4 * (first + i * threads + k.tid)
                for e in cutlass.range_constexpr(4):
                    from_low = key_of(now[e]) - low_key
                    logit = sync.choose(ties != 0, value, now[e])
                    if (from_low < span) & (in_prefix(logit, token + e, cut, last) != 0):
                        mine = Int32(from_low >> Uint32(bits))
                        if mine != same:
                            flush(k, same, total, n)
                            same, total, n = mine, Int64(0), Int32(0)
                        if varies != 0:
                            amount = exact.mass(exact.weight(now[e], largest, inverse))
                        total, n = total + amount, n + 1
            shift(now)
        for i in cutlass.range_constexpr(4 * QUADS):
            now[i] = coming[i]
        first = first + QUADS * threads
    flush(k, same, total, n)


@cute.jit
def gather(k: cutlass.Constexpr, row: Int64):
    """Tokens of the prefix so far with LOW <= x < HIGH into the list, in any order."""
    threads = k.c.warps * 32
    cut, last = number(k, W.CUT), word(k, W.LAST)
    ties, value = word(k, W.TIES), number(k, W.VALUE)
    low, high = value_of(Uint32(word(k, W.LOW))), value_of(Uint32(word(k, W.HIGH)))
    values, first, seen = new_values(2 * QUADS), Int32(0), Int32(0)
    while first < quads(k):
        load_quads(k, row, first, 2 * QUADS, values)
        if ties != 0:
            turn_to_ids(values, first + k.tid, threads, value)
        for i in cutlass.range_constexpr(2 * QUADS):
            if (sync.maximum([values[4 * i + e] for e in range(4)]) >= low) & (seen <= LISTED):
                for e in cutlass.range_constexpr(4):
                    x, token = values[4 * i + e], 4 * (first + i * threads + k.tid) + e
                    logit = sync.choose(ties != 0, value, x)
                    if (x >= low) & (x < high) & (in_prefix(logit, token, cut, last) != 0):
                        seen = sync.add_shared(at(k, W.FOUND), Int32(1))
                        if seen < LISTED:
                            sync.sts_long(k.red + 8 * seen, packed(x, token))
        first = first + 2 * QUADS * threads


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


def shuffled_up(v, distance):
    return joined(*(cute.arch.shuffle_sync_up(w, distance, mask_and_clamp=0) for w in halves(v)))


@cute.jit
def mass_before(k: cutlass.Constexpr, i: Int32, n: Int32, temperature: Float32):
    """(mass of entry i of n, 0 where there is none; with those of lower lanes). Warp 0."""
    mine = Int64(0)
    if i < n:
        largest, z = number(k, W.LARGEST), entry_value(entry(k, i))
        if word(k, W.TIES) != 0:
            z = number(k, W.VALUE)
        mine = exact.mass(exact.weight(z, largest, exact.inverse_temperature(temperature)))
    total = mine
    for d in cutlass.range_constexpr(5):
        below = shuffled_up(total, 1 << d)
        if k.lane >= 1 << d:
            total = total + below
    return mine, total


@cute.jit
def count_kept(k: cutlass.Constexpr, n: Int32, by_mass: Int32, temperature: Float32):
    """Warp 0: entries of the list with less than LIMIT before them, where BEFORE is before all; and
    what is before the tokens that follow the list."""
    before, limit = sync.lds_long(at(k, W.BEFORE)), sync.lds_long(at(k, W.LIMIT))
    kept, beyond = Int32(cutlass.min(limit - before, Int64(n))), before + Int64(n)
    if by_mass != 0:
        kept, first, beyond = Int32(0), Int32(0), before
        while first < n:
            mine, upto = mass_before(k, first + k.lane, n, temperature)
            stays = Int32(first + k.lane < n) & Int32(beyond + upto - mine < limit)
            kept = kept + Int32(sync.warp_reduce("add", Uint32(stays)))
            beyond = beyond + last_lane(upto)
            first = first + 32
    return kept, beyond


def last_lane(v):
    return joined(*(cute.arch.shuffle_sync(w, 31) for w in halves(v)))


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
    kept, beyond = count_kept(k, n, by_mass, temperature)
    final, ties, low = entry(k, kept - 1), word(k, W.TIES), Uint32(word(k, W.LOW))
    is_whole = Int32(sync.lds_long(at(k, W.BEFORE)) == 0) & (1 - ties)
    limit = sync.lds_long(at(k, W.LIMIT))
    is_short = Int32(limit <= LISTED) & (1 - by_mass)
    cut = sync.choose(ties != 0, number(k, W.VALUE), entry_value(final))
    cute.arch.sync_warp()
    if k.lane == 0:
        if (beyond < limit) & (low > LOWEST_KEY):
            sync.sts_long(at(k, W.BEFORE), beyond)
            put(k, W.ABOVE, word(k, W.ABOVE) + n)
            put(k, W.HIGH, low)
            put(k, W.LOW, widened(k, low))
            put(k, W.STATE, Int32(HISTOGRAM))
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
def guess(parts):
    """Which of the maxima of so many parts, in descending order, about GUESSED tokens reach."""
    return max(1, int(parts * (1 - math.exp(-GUESSED / parts))))


def widened(k, low):
    """A key below: the value three times as far from the largest logit."""
    value, largest = value_of(low), number(k, W.LARGEST)
    down = value - 2.0 * (largest - value)
    return sync.larger(key_of(sync.maximum([down, Float32(LOWEST)])), Uint32(LOWEST_KEY))


@cute.jit
def floor_of_maxima(k: cutlass.Constexpr, rank: Int32):
    """The rank-th largest of the maxima of parts of the row, into LOW: as many tokens reach it.
    All warps; the maxima are padded with -inf to a multiple of 4."""
    n = word(k, W.MAXIMA)
    if k.tid < n:
        mine, before, i = sync.lds(k.red + MAXIMA_AT + 4 * k.tid), Int32(0), Int32(0)
        while i < n:
            four = sync.lds_quad(k.red + MAXIMA_AT + 4 * i)
            for e in cutlass.range_constexpr(4):
                same = Int32(four[e] == mine) & Int32(i + e < k.tid)
                before = before + (Int32(four[e] > mine) | same)
            i = i + 4
        if before == rank - 1:
            put(k, W.LOW, key_of(sync.maximum([mine, Float32(LOWEST)])))


@cute.jit
def open_search(k: cutlass.Constexpr, limit: Int64, state: Int32):
    """One thread; `floor_of_maxima` gives LOW."""
    put(k, W.STATE, state)
    put(k, W.HIGH, key_of(number(k, W.LARGEST)) + 1)
    put(k, W.TIES, Int32(0))
    put(k, W.ABOVE, Int32(0))
    put(k, W.FOUND, Int32(0))
    sync.sts_long(at(k, W.BEFORE), Int64(0))
    sync.sts_long(at(k, W.LIMIT), limit)
    put(k, W.KEPT, Int32(-1))


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
    low, high = Uint32(word(k, W.LOW)), Uint32(word(k, W.HIGH))
    whole = before + last_lane(upto)
    n_whole = above + cute.arch.shuffle_sync(n_upto, 31)
    cute.arch.sync_warp()
    if whole < limit:
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


def bin_mass(k, b):
    return joined(sync.lds_word(bin_at(k, 0, b)), sync.lds_word(bin_at(k, 1, b)))


@cute.jit
def set_window(k: cutlass.Constexpr, low: Uint32, high: Uint32, before: Int64, above: Int32,
               state: Int32):  # fmt: skip
    put(k, W.LOW, low)
    put(k, W.HIGH, high)
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
def search(k: cutlass.Constexpr, row: Int64, by_mass: Int32, temperature: Float32, top_p: Float32):
    """All consumer warps, behind open_search, floor_of_maxima and a barrier: the end of the
    prefix."""
    threads = k.c.warps * 32
    state = word(k, W.STATE)
    while state != DONE:
        if state == SURVEY:
            survey(k, row, temperature)
            sync.consumer_sync(threads)
            if k.tid == 0:
                end_survey(k, top_p)
        elif state == GATHER:
            gather(k, row)
            sync.consumer_sync(threads)
            n = word(k, W.FOUND)
            if n <= LISTED:
                sort(k, n)
                sync.consumer_sync(threads)
                if k.wid == 0:
                    end_in_list(k, n, by_mass, temperature)
            else:  # the maxima were a poor guess
                sync.consumer_sync(threads)
                if k.tid == 0:
                    put(k, W.FOUND, Int32(0))
                    put(k, W.STATE, Int32(HISTOGRAM))
        else:
            for i in cutlass.range_constexpr(-(-3 * BINS // threads)):
                if k.tid + i * threads < 3 * BINS:
                    sync.sts_int(bin_at(k, 0, k.tid + i * threads), Int32(0))
            sync.consumer_sync(threads)
            histogram(k, row, by_mass, temperature)
            sync.consumer_sync(threads)
            if k.wid == 0:
                next_window(k)
        sync.consumer_sync(threads)
        state = word(k, W.STATE)
