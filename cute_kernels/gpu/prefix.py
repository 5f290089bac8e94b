"""Where a prefix of a row of logits ends, in (logit descending, id ascending) order; exactly.

The prefix has the tokens with less than a *limit* before them, in tokens (top-k) or in mass of
their weights (top-p, integers of 2^-44, so that sums do not depend on their order). It is given by
CUT and LAST: a token belongs to it if its logit is above CUT, or equal to it and its id at most
LAST. Everything is done by the consumer warps of one CTA over a row that lies in L2:

    measure  a pass over the row: what is at or above each of eight thresholds
    gather   a pass over the row: (logit, id) of at most LISTED tokens between two values
    sort     of these, in shared memory, and the end of the prefix among them

Thresholds go down from the largest logit in growing steps, then cut the window in which the end
lies, by value and by bit pattern in turn, until it holds few enough tokens to list. A window of a
single value with more tokens than that goes on with x = -id in the place of the logit.

KEPT says how many entries of the sorted list are the prefix, or is -1 if the list is only a part of
it. A prefix that was found before (CUT, LAST) bounds the next: tokens outside of it do not count.
"""

from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.gpu import exact, sync
from cute_kernels.gpu.fragments import exp2
from cute_kernels.gpu.sync import ptx_read
from cute_kernels.gpu.topk import key_of, value_of

LISTED = 512  # entries of a list, 8 bytes each: order key of the value, complemented, above the id
STEPS = 8  # thresholds of a pass
QUADS = 4  # vectors of four logits that a thread has in hand
LOWEST, INF = -3.4028234663852886e38, float("inf")
MEASURE, GATHER, DONE = range(3)
NEVER = 0x7FFFFFFF


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
    LOW = 9  # order keys: the end lies in [LOW, HIGH)
    HIGH = 10
    REACHED = 11  # 1: what is at or above LOW reaches the limit
    TRIES = 12
    TIES = 13  # 1: x = -id, of the tokens whose logit is VALUE
    VALUE = 14
    ABOVE = 15  # tokens at or above HIGH, and at or above LOW if REACHED
    AT_LOW = 16
    MAXIMA = 17  # how many logits the maxima of parts of the row are; 0: none
    BEFORE = 18  # 64 bits: what is at or above HIGH
    LIMIT = 20  # 64 bits
    BASE = 22  # 64 bits: of TIES: what is above VALUE
    REACH = 24  # of race.py
    STEP = 25  # STEPS thresholds, descending


CONTROL_BYTES = 4 * (W.STEP + STEPS)
SORTED_AT, MAXIMA_AT = 8 * LISTED, 16 * LISTED  # from the scratch for partial sums on
MAX_PARTS = 256


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
    """Of tokens with that logit x = -id, of the others -inf; first: the thread's first vector."""
    for i in cutlass.range_constexpr(values.layout.shape):
        token = 4 * (first + i // 4 * threads) + i % 4
        values[i] = sync.choose(values[i] == value, -Float32(token), -INF)


def add_if(z, step, total, amount, count):
    """(total + amount, count + 1) where z >= step."""
    return ptx_read(
        "{ .reg .pred q; setp.ge.f32 q, {$r0}, {$r1}; mov.b64 {$w0}, {$r2}; mov.b32 {$w1}, {$r4};"
        " @q add.s64 {$w0}, {$w0}, {$r3}; @q add.s32 {$w1}, {$w1}, 1; }",
        [Int64, Int32], z, step, total, amount, count,
    )  # fmt: skip


@cute.jit
def measure(k: cutlass.Constexpr, row: Int64, by_mass: Int32, temperature: Float32):
    """Into the list's place: per warp mass or number at or above each threshold, in all, and the
    numbers."""
    threads = k.c.warps * 32
    cut, last, largest = number(k, W.CUT), word(k, W.LAST), number(k, W.LARGEST)
    ties, value = word(k, W.TIES), number(k, W.VALUE)
    inverse = exact.inverse_temperature(temperature)
    steps = [number(k, W.STEP + j) for j in range(STEPS)]
    floor = cut  # below it nothing counts
    if by_mass != 0:  # exp(-31) < 2^-44
        floor = sync.maximum([cut, exact.minus(largest, exact.times(Float32(31.0), temperature))])
    tied_mass = Int64(1)
    if by_mass != 0:
        tied_mass = exact.mass(exact.weight(value, largest, inverse))
    sums = cute.make_rmem_tensor(cute.make_layout(STEPS + 1), Int64)
    counts = cute.make_rmem_tensor(cute.make_layout(STEPS), Int32)
    for j in cutlass.range_constexpr(STEPS):
        sums[j], counts[j] = Int64(0), Int32(0)
    sums[STEPS] = Int64(0)
    now, coming = new_values(QUADS), new_values(QUADS)
    first = Int32(0)
    load_quads(k, row, first, QUADS, now)
    while first < quads(k):
        load_quads(k, row, first + QUADS * threads, QUADS, coming)
        low = floor
        if ties != 0:
            turn_to_ids(now, first + k.tid, threads, value)
            low = Float32(LOWEST)
        for i in cutlass.range_constexpr(QUADS):
            most = sync.maximum([now[4 * i + e] for e in range(4)])
            if most >= low:
                token = 4 * (first + i * threads + k.tid)
                for e in cutlass.range_constexpr(4):
                    z, amount = now[4 * i + e], tied_mass
                    if (by_mass != 0) & (ties == 0):
                        amount = exact.mass(exact.weight(z, largest, inverse))
                    logit = sync.choose(ties != 0, value, z)
                    counted = in_prefix(logit, token + e, cut, last) & Int32(z >= low)
                    x = sync.choose(counted != 0, z, -INF)
                    sums[STEPS] = add_if(x, Float32(LOWEST), sums[STEPS], amount, Int32(0))[0]
                    if most >= steps[STEPS - 1]:
                        for j in cutlass.range_constexpr(STEPS):
                            sums[j], counts[j] = add_if(x, steps[j], sums[j], amount, counts[j])
        for i in cutlass.range_constexpr(4 * QUADS):
            now[i] = coming[i]
        first = first + QUADS * threads
    share(k, sums, counts)


@cute.jit
def share(k: cutlass.Constexpr, sums: cute.Tensor, counts: cute.Tensor):
    """The warp's part. A thread's sum has at most 57 bits: 2^13 tokens of 2^44."""
    to = k.red + k.wid * (8 * (2 * STEPS + 1))
    for j in cutlass.range_constexpr(STEPS + 1):
        parts = [sync.warp_reduce("add", Uint32(sums[j] >> (20 * i)) & 0xFFFFF) for i in range(3)]
        total = Int64(parts[0]) + (Int64(parts[1]) << 20) + (Int64(parts[2]) << 40)
        if k.lane == 0:
            sync.sts_long(to + 8 * j, total)
    for j in cutlass.range_constexpr(STEPS):
        total = Int64(sync.warp_reduce("add", Uint32(counts[j])))
        if k.lane == 0:
            sync.sts_long(to + 8 * (STEPS + 1 + j), total)


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
    """Warp 0: entries of the list with less than LIMIT before them, where BEFORE is before all."""
    before, limit = sync.lds_long(at(k, W.BEFORE)), sync.lds_long(at(k, W.LIMIT))
    kept = Int32(cutlass.min(limit - before, Int64(n)))
    if by_mass != 0:
        kept, first = Int32(0), Int32(0)
        while first < n:
            mine, upto = mass_before(k, first + k.lane, n, temperature)
            stays = Int32(first + k.lane < n) & Int32(before + upto - mine < limit)
            kept = kept + Int32(sync.warp_reduce("add", Uint32(stays)))
            before = before + last_lane(upto)
            first = first + 32
    return kept


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
    the prefix is short enough, it is gathered next."""
    kept = count_kept(k, n, by_mass, temperature)
    final, ties = entry(k, kept - 1), word(k, W.TIES)
    is_whole = Int32(sync.lds_long(at(k, W.BEFORE)) == 0) & (1 - ties)
    is_short = Int32(sync.lds_long(at(k, W.LIMIT)) <= LISTED) & (1 - by_mass)
    cut = sync.choose(ties != 0, number(k, W.VALUE), entry_value(final))
    cute.arch.sync_warp()
    if k.lane == 0:
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
def floor_of_maxima(k: cutlass.Constexpr, limit: Int32):
    """The limit-th largest of the maxima of parts of the row, into LOW: as many tokens reach it.
    All warps; the maxima are padded with -inf to a multiple of 4."""
    n = word(k, W.MAXIMA)
    if k.tid < n:
        mine, rank, i = sync.lds(k.red + MAXIMA_AT + 4 * k.tid), Int32(0), Int32(0)
        while i < n:
            four = sync.lds_quad(k.red + MAXIMA_AT + 4 * i)
            for e in cutlass.range_constexpr(4):
                same = Int32(four[e] == mine) & Int32(i + e < k.tid)
                rank = rank + (Int32(four[e] > mine) | same)
            i = i + 4
        if rank == limit - 1:
            put(k, W.LOW, key_of(sync.maximum([mine, Float32(LOWEST)])))


@cute.jit
def open_search(k: cutlass.Constexpr, limit: Int64, listed: Int32):
    """One thread. listed: 1 where `floor_of_maxima` gives LOW and a list will do."""
    largest = number(k, W.LARGEST)
    put(k, W.STATE, sync.select_int(listed != 0, Int32(GATHER), Int32(MEASURE)))
    put(k, W.LOW, key_of(Float32(LOWEST)))
    put(k, W.HIGH, key_of(largest) + 1)
    for name in (W.REACHED, W.TRIES, W.TIES, W.ABOVE, W.AT_LOW, W.FOUND):
        put(k, name, Int32(0))
    sync.sts_long(at(k, W.BEFORE), Int64(0))
    sync.sts_long(at(k, W.LIMIT), limit)
    put(k, W.KEPT, Int32(-1))


@cute.jit
def set_steps(k: cutlass.Constexpr, unit: Float32):
    """Warp 0: thresholds of the next pass."""
    tries, largest = word(k, W.TRIES), number(k, W.LARGEST)
    low, high = Uint32(word(k, W.LOW)), Uint32(word(k, W.HIGH))
    j = k.lane
    if j < STEPS:
        # the largest; 1, 1.5, ... 11 below it; 13, 52, ... below it, everything
        down = exp2(Float32(j - 1) * 0.585)
        down = sync.choose(j > 0, down, 0.0)
        if tries > 0:
            down = sync.choose(j < STEPS - 1, exp2(Float32(j) * 2.0 + 3.7), INF)
        step = exact.minus(largest, exact.times(unit, down))
        if (word(k, W.REACHED) != 0) | (word(k, W.TIES) != 0):
            if ((tries & 1) != 0) & (word(k, W.TIES) == 0):
                part = (Int64(high - low) * Int64(STEPS - j)) // (STEPS + 1)
                step = value_of(low + Uint32(part))
            else:
                bottom, share_of = value_of(low), Float32(STEPS - j) * (1.0 / (STEPS + 1))
                step = bottom + (value_of(high) - bottom) * share_of
        sync.sts(at(k, W.STEP) + 4 * j, sync.maximum([step, Float32(LOWEST)]))


@cute.jit
def settle(k: cutlass.Constexpr, by_mass: Int32, top_p: Float32):
    """Warp 0, behind `measure`: the new window, and what to do with it."""
    entries = 2 * STEPS + 1
    total = Int64(0)
    if k.lane < entries:
        for w in cutlass.range_constexpr(k.c.warps):
            total = total + sync.lds_long(k.red + 8 * (w * entries + k.lane))
        sync.sts_long(k.red + SORTED_AT + 8 * k.lane, total)
    cute.arch.sync_warp()
    if k.lane == 0:
        sums = k.red + SORTED_AT
        limit, base = sync.lds_long(at(k, W.LIMIT)), Int64(0)
        ties = word(k, W.TIES)
        if limit == 0:
            limit = exact.mass_limit(top_p, sync.lds_long(sums + 8 * STEPS))
        if ties != 0:
            base = sync.lds_long(at(k, W.BASE))
        low, high = Uint32(word(k, W.LOW)), Uint32(word(k, W.HIGH))
        before, above = sync.lds_long(at(k, W.BEFORE)), word(k, W.ABOVE)
        reached, at_low, final = word(k, W.REACHED), word(k, W.AT_LOW), Float32(0.0)
        found = Int32(0)
        for j in cutlass.range_constexpr(STEPS):
            step, mass = number(k, W.STEP + j), base + sync.lds_long(sums + 8 * j)
            n = Int32(sync.lds_long(sums + 8 * (STEPS + 1 + j)))
            if mass < limit:
                high, before, above = key_of(step), mass, n
            else:
                if found == 0:
                    low, at_low, reached = key_of(step), n, Int32(1)
                found = Int32(1)
            final = step
        state = Int32(MEASURE)
        if reached == 0:
            if final <= LOWEST:  # all there is does not reach the limit
                state = Int32(DONE)
        elif (at_low <= LISTED) & (ties == 0):
            state, before = Int32(GATHER), Int64(0)
            high = key_of(number(k, W.LARGEST)) + 1
        elif at_low - above <= LISTED:
            state = Int32(GATHER)
        elif high - low == 1:
            put(k, W.VALUE, value_of(low))
            put(k, W.TIES, Int32(1))
            sync.sts_long(at(k, W.BASE), before)
            low, high = key_of(-Float32(k.c.shape.vocab)), key_of(Float32(0.0)) + 1
            above, at_low = Int32(0), Int32(NEVER)
        put(k, W.LOW, low)
        put(k, W.HIGH, high)
        put(k, W.REACHED, reached)
        put(k, W.AT_LOW, at_low)
        put(k, W.ABOVE, above)
        put(k, W.STATE, state)
        put(k, W.TRIES, word(k, W.TRIES) + 1)
        put(k, W.FOUND, Int32(0))
        sync.sts_long(at(k, W.BEFORE), before)
        sync.sts_long(at(k, W.LIMIT), limit)
    cute.arch.sync_warp()


@cute.jit
def search(k: cutlass.Constexpr, row: Int64, by_mass: Int32, temperature: Float32, top_p: Float32):
    """All consumer warps, behind open_search and a barrier: the end of the prefix."""
    threads = k.c.warps * 32
    unit = sync.choose(by_mass != 0, temperature, 1.0)
    if k.wid == 0:
        set_steps(k, unit)
    sync.consumer_sync(threads)
    state = word(k, W.STATE)
    while state != DONE:
        if state == MEASURE:
            measure(k, row, by_mass, temperature)
            sync.consumer_sync(threads)
            if k.wid == 0:
                settle(k, by_mass, top_p)
                set_steps(k, unit)
        else:
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
                    open_search(k, sync.lds_long(at(k, W.LIMIT)), Int32(0))
        sync.consumer_sync(threads)
        state = word(k, W.STATE)
