"""The largest values of a row, exactly: by one CTA's consumer warps, in (value, column) order.

A value and its column make one whole number, larger where the value is, then where the column is
smaller; no two are equal, so the first `want` of a row are those from some number on. One pass over
the row takes every thread's largest value. A value that `want` of these reach is reached by `want`
values of the row at least, not by many more unless the row is made to spite it, and only in vectors
of the threads whose largest value does. Those vectors are looked at again for all that reach it.
Where that is more than shared memory has room for, the number is bisected until what it leaves
fits. What was collected is ordered by counting, for each, how many are larger.

Loads come from L2, many of a thread together: one SM takes 64 bytes a cycle from it, which needs
some 40 KB on their way.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.config import MAX_VOCAB
from cute_kernels.gpu.rank_plan import (
    FOUND,
    HOT,
    ROOM,
    SEGMENT,
    SMEM_BYTES,
    SORTED,
    WORDS,
    hit_bytes,
)
from cute_kernels.gpu.sync import ptx_read

AT_ONCE, AGAIN_AT_ONCE = 16, 8  # vectors of a thread
COLUMN_BITS = 18  # of a number
assert MAX_VOCAB <= 1 << COLUMN_BITS
LOWEST_KEY = 0x00800000  # of the lowest finite value
N_HOT, N_FOUND = WORDS, WORDS + 4
FEW = 32  # candidates up to which a bound for each warp is near enough
NEG_INF = -float("inf")


# -- numbers -----------------------------------------------------------------------------------
def key_of(value):
    """An unsigned integer that orders as fp32 values do; both zeros have the same."""
    return ptx_read(
        "{ .reg .f32 v; .reg .b32 u, m; add.rn.f32 v, {$r0}, 0f00000000; mov.b32 u, v;"
        " shr.s32 m, u, 31; or.b32 m, m, 0x80000000; xor.b32 {$w0}, u, m; }",
        [Uint32],
        value,
    )


def value_of(key):
    return ptx_read(
        "{ .reg .b32 m; shr.s32 m, {$r0}, 31; not.b32 m, m; or.b32 m, m, 0x80000000;"
        " xor.b32 m, m, {$r0}; mov.b32 {$w0}, m; }",
        [Float32],
        key,
    )


def number_of(key, column):
    return ptx_read(
        "{ .reg .b64 c; .reg .b32 i; sub.u32 i, 0x3ffff, {$r1}; cvt.u64.u32 c, i;"
        " mad.wide.u32 {$w0}, {$r0}, 0x40000, c; }",
        [Int64],
        key,
        Uint32(column),
    )


def key_in(number):
    return Uint32(number >> COLUMN_BITS)


def column_in(number):
    return Int32(0x3FFFF) - (Int32(number) & 0x3FFFF)


# -- passes over the row -------------------------------------------------------------------------
@cute.jit
def own_largest(k: cutlass.Constexpr, row: Int64, columns: Int32):
    """Of this thread's vectors: every `threads`-th of the row's."""
    threads, n = k.c.warps * 32, columns >> 2
    first, best = k.tid, Float32(NEG_INF)
    while first < n:
        where = [first + j * threads for j in range(AT_ONCE)]
        loaded = [sync.ld_fresh_words(row + Int64(cutlass.min(i, n - 1)) * 16) for i in where]
        for i, words in zip(where, loaded, strict=True):
            top = sync.maximum([sync.as_float(w) for w in words])
            best = sync.maximum([best, sync.choose(i < n, top, NEG_INF)])
        first = first + AT_ONCE * threads
    if ((columns & 3) != 0) & (k.tid == n % threads):  # the last vector is not whole
        for e, word in enumerate(sync.ld_fresh_words(row + Int64(n) * 16)):
            real = (columns & 3) > e
            best = sync.maximum([best, sync.choose(real, sync.as_float(word), NEG_INF)])
    return best


def place_of(k, lanes, count):
    """Of this lane's entry, behind `count` others and those of lower ones of `lanes`."""
    return count + sync.count_bits(lanes & sync.bits_below(k.lane))


@cute.jit
def take_places(k: cutlass.Constexpr, counter: cutlass.Constexpr, count: Int32):
    """A warp: the first of `count` places of a list in shared memory."""
    base = Int32(0)
    if k.lane == 0:
        base = sync.add_shared(k.attention + counter, count)
    return cute.arch.shuffle_sync(base, 0)


@cute.jit
def find_hits(k: cutlass.Constexpr, row: Int64, columns: Int32, least: Int64, hot: Int32):
    """Which vectors of the hot threads can hold numbers from `least` on, into the warp's HITS; how
    many, at most two more than do (the one at its column and the row's last). A warp takes
    AGAIN_AT_ONCE threads together, a lane every 32nd of their vectors."""
    warps, n, floor = k.c.warps, (columns + 3) >> 2, value_of(key_in(least))
    first, count, hits = k.wid, Int32(0), k.red + k.wid * (4 * SEGMENT)
    while first < hot:
        which = [first + j * warps for j in range(AGAIN_AT_ONCE)]
        at = [sync.lds_int(k.attention + HOT + cutlass.min(j, hot - 1) * 4) for j in which]
        far = Int32(0)
        while far < n:
            here = [i + far + k.lane * (warps * 32) for i in at]
            there = [(j < hot) & (i < n) for i, j in zip(here, which, strict=True)]
            loaded = [
                sync.ld_fresh_words_if(Int32(ok), row + Int64(i) * 16)
                for i, ok in zip(here, there, strict=True)
            ]
            for i, ok, words in zip(here, there, loaded, strict=True):
                top = sync.maximum([sync.as_float(w) for w in words])
                if sync.lanes_where(ok & (top >= floor)) != 0:  # in few vectors of a long row
                    hit = ok & (top >= floor) & (number_of(key_of(top), 4 * i) >= least)
                    lanes = sync.lanes_where(hit)
                    place = place_of(k, lanes, count)
                    count = count + sync.count_bits(lanes)
                    if hit & (place < SEGMENT):
                        sync.sts_int(hits + place * 4, i)
            far = far + 32 * 32 * warps
        first = first + AGAIN_AT_ONCE * warps
    return count


@cute.jit
def read_hits(k: cutlass.Constexpr, row: Int64, columns: Int32, least: Int64, hits: Int32):
    """The numbers from `least` on in the warp's vectors, behind those of other warps in FOUND."""
    first = Int32(0)
    while first < hits:
        j = first + k.lane
        i = sync.lds_int(k.red + k.wid * (4 * SEGMENT) + cutlass.min(j, hits - 1) * 4)
        numbers, lanes, count = [], [], Int32(0)
        for e, word in enumerate(sync.ld_fresh_words(row + Int64(i) * 16)):
            column = 4 * i + e
            numbers.append(number_of(key_of(sync.as_float(word)), column))
            ok = (j < hits) & (column < columns) & (numbers[e] >= least)
            lanes.append(sync.lanes_where(ok))
            count = count + sync.count_bits(lanes[e])
        place = take_places(k, N_FOUND, count)
        for number, some in zip(numbers, lanes, strict=True):
            mine = place_of(k, some, place)
            if (((some >> Uint32(k.lane)) & Uint32(1)) != 0) & (mine < ROOM):
                sync.sts_long(k.attention + FOUND + mine * 8, number)
            place = place + sync.count_bits(some)
        first = first + 32


@cute.jit
def collect(k: cutlass.Constexpr, row: Int64, columns: Int32, least: Int64, largest: Uint32):
    """The numbers from `least` on, to FOUND in any order; how many, or more than ROOM where there
    are more than fit. largest: the key of this thread's largest value."""
    threads, is_hot = k.c.warps * 32, largest >= key_in(least)
    lanes = sync.lanes_where(is_hot)
    place = place_of(k, lanes, take_places(k, N_HOT, sync.count_bits(lanes)))
    if is_hot:
        sync.sts_int(k.attention + HOT + place * 4, k.tid)
    sync.consumer_sync(threads)
    hits = find_hits(k, row, columns, least, sync.lds_int(k.attention + N_HOT))
    cute.arch.sync_warp()
    read_hits(k, row, columns, least, cutlass.min(hits, Int32(SEGMENT)))
    if (hits > SEGMENT) & (k.lane == 0):
        sync.add_shared(k.attention + N_FOUND, Int32(ROOM + 1))
    sync.consumer_sync(threads)
    found = sync.lds_int(k.attention + N_FOUND)
    if k.tid == 0:
        sync.sts_int(k.attention + N_HOT, Int32(0))
    sync.consumer_sync(threads)
    if k.tid == 0:  # nobody adds to it before the next `consumer_sync`
        sync.sts_int(k.attention + N_FOUND, Int32(0))
    return found


# -- order -------------------------------------------------------------------------------------
@cute.jit
def off_the_top(k: cutlass.Constexpr, largest: Uint32, want: Int32):
    """The key that the warp's share of `want` keys reach; where keys are equal more do."""
    least, rest = largest, largest
    for _ in cutlass.range((want + k.c.warps - 1) // k.c.warps, unroll=1):
        now = sync.warp_reduce("max", rest)
        least = sync.select(now != 0, now, least)
        rest = sync.select(rest == now, Uint32(0), rest)
    return least


@cute.jit
def of_all(k: cutlass.Constexpr, largest: Uint32, want: Int32):
    """The least of the warp's keys that are among the first `want` of all threads' keys."""
    base, threads = k.attention + FOUND, k.c.warps * 32  # nothing is found yet
    sync.sts_int(base + k.tid * 4, largest)
    sync.consumer_sync(threads)
    before, at = Int32(0), base
    while at < base + threads * 4:
        for j in cutlass.range_constexpr(4):
            for other in sync.lds_words(at + 16 * j):
                before = before + Int32(other > largest)
        at = at + 64
    return sync.select(before < want, largest, Uint32(0xFFFFFFFF))


@cute.jit
def bound(k: cutlass.Constexpr, largest: Uint32, want: Int32):
    """(a key that at least `want` of all threads' keys reach, the largest key); want <= threads.
    The largest such key where many are wanted: what is found is then put in order by comparing all
    with all."""
    at, least = k.attention + SORTED, Uint32(0)  # nothing is sorted yet
    if want <= FEW:
        least = off_the_top(k, largest, want)
    else:
        least = of_all(k, largest, want)
    least, most = sync.warp_reduce("min", least), sync.warp_reduce("max", largest)
    if k.lane == 0:
        sync.sts_int(at + k.wid * 8, least)
        sync.sts_int(at + k.wid * 8 + 4, most)
    if k.tid == 0:
        sync.sts_pair(k.attention + N_HOT, Float32(0.0), Float32(0.0))
    sync.consumer_sync(k.c.warps * 32)
    one = at + cutlass.min(k.lane, k.c.warps - 1) * 8
    least, most = sync.lds_word(one), sync.lds_word(one + 4)
    return sync.warp_reduce("min", least), sync.warp_reduce("max", most)


@cute.jit
def sort_found(k: cutlass.Constexpr, n: Int32, want: Int32):
    """The first `want` of FOUND's n numbers to SORTED, as (value, column)."""
    threads, base = k.c.warps * 32, k.attention + FOUND
    if k.tid < (-n & 7):
        sync.sts_long(base + (n + k.tid) * 8, Int64(0))
    sync.consumer_sync(threads)
    mine_at = k.tid
    while mine_at < n:
        mine, before, at = sync.lds_long(base + mine_at * 8), Int32(0), base
        while at < base + n * 8:
            for j in cutlass.range_constexpr(4):
                for other in sync.lds_longs(at + 16 * j):
                    before = before + Int32(other > mine)
            at = at + 64
        if before < want:
            to = k.attention + SORTED + before * 8
            sync.sts_pair(to, value_of(key_in(mine)), sync.as_float(column_in(mine)))
        mine_at = mine_at + threads
    sync.consumer_sync(threads)


def check_room(c):
    """At trace time."""
    plan = c.smem_plan()
    for part, needed in (("attention", SMEM_BYTES), ("partial sums", hit_bytes(c.warps))):
        if plan.get(part, 0) < needed:
            raise ValueError(
                f"{c.shape.name}: ranking needs {needed} B of shared memory for {part!r}, of which"
                f" the plan has {plan.get(part, 0)}"
            )


@cute.jit
def top_k(k: cutlass.Constexpr, row: Int64, columns: Int32, want: Int32):
    """All consumer warps of a CTA: the first `want` (1 .. 127) values above -inf of a row, in
    (value descending, column ascending) order, as pairs (fp32, int32 column) at k.attention +
    SORTED; returns how many, fewer where there are no more.

    row: address of fp32 [columns], 16-byte aligned, readable up to a multiple of 4, written by
    whomever before a hand-off that every thread here has seen or is synchronised with; no NaN and
    no +inf among the columns. Uses attention's part and the scratch for partial sums, which must be
    free (rank_plan.py), until the caller's next `consumer_sync` behind its own reads of SORTED.
    """
    check_room(k.c)
    largest = key_of(own_largest(k, row, columns))
    least, most = bound(k, largest, want)
    low = number_of(sync.larger(least, Uint32(LOWEST_KEY)), Int32(0x3FFFF))
    high = number_of(most, Int32(0)) + 1  # no number of the row is as large
    at, n, narrowing, searching = low, Int32(0), Boolean(False), Boolean(True)
    while searching:
        n = collect(k, row, columns, at, largest)
        searching = Boolean(False)
        if n > ROOM:
            low, narrowing, searching = at, Boolean(True), Boolean(True)
        elif narrowing & (n < want):
            high, searching = at, Boolean(True)
        at = low + ((high - low) >> 1)
    sort_found(k, n, want)
    return cutlass.min(n, want)
