"""The largest values of a row, exactly: by one CTA's consumer warps, in (value, column) order.

A value and its column make one whole number, larger where the value is, then where the column is
smaller; no two are equal, so the first `want` of a row are those from some number on. A first pass
takes every thread's largest value: the want-th of them is reached by `want` values at least, and
not by many more unless the row is made to spite it. A second pass collects what reaches it. Where
that is more than shared memory has room for, the number is bisected, a pass each, until what it
leaves fits. What was collected is ordered by counting, for each, how many are larger.

Loads come from L2, `AT_ONCE` vectors of a thread together: one SM takes 64 bytes a cycle from it,
which needs some 40 KB on their way.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.rank_plan import FOUND, HITS, ROOM, SORTED, WORDS
from cute_kernels.gpu.sync import ptx_read

AT_ONCE = 8
COLUMN_BITS = 18  # of a number: more columns than any vocabulary has
LOWEST_KEY = 0x00800000  # of the lowest finite value
N_HITS, N_FOUND = WORDS, WORDS + 4
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
def vectors_at(k, row, first, n):
    """AT_ONCE vectors first, first + threads, ... of the row's n, as (index, four values)."""
    out = []
    for j in range(AT_ONCE):
        i = first + j * (k.c.warps * 32)
        words = sync.ld_fresh_words_if(Int32(i < n), row + Int64(i) * 16)
        out.append((i, [sync.as_float(w) for w in words]))
    return out


@cute.jit
def own_largest(k: cutlass.Constexpr, row: Int64, columns: Int32):
    """Of this thread's vectors, among real columns."""
    n, first, best = (columns + 3) >> 2, k.tid, Float32(NEG_INF)
    while first < n:
        for i, values in vectors_at(k, row, first, n):
            left = columns - 4 * i
            best = sync.maximum(
                [best] + [sync.choose(left > e, v, NEG_INF) for e, v in enumerate(values)]
            )
        first = first + AT_ONCE * (k.c.warps * 32)
    return best


@cute.jit
def note_hit(k: cutlass.Constexpr, counter: cutlass.Constexpr):
    """The place of one more entry of a list, ROOM or more where it is full. A full list is seen
    before it is counted on: all threads adding to one word would take longer than the pass."""
    place = sync.lds_int(k.attention + counter)
    if place < ROOM:
        place = sync.add_shared(k.attention + counter, Int32(1))
    elif place == ROOM:
        sync.sts_int(k.attention + counter, Int32(ROOM + 1))
    return place


@cute.jit
def find_hits(k: cutlass.Constexpr, row: Int64, columns: Int32, least: Int64):
    """Which vectors of the row can hold numbers from `least` on: at most two more than do, the one
    at its column and the row's last."""
    n, first, floor = (columns + 3) >> 2, k.tid, value_of(key_in(least))
    while first < n:
        for i, values in vectors_at(k, row, first, n):
            top = sync.maximum(values)
            if top >= floor:
                if (i < n) & (number_of(key_of(top), 4 * i) >= least):
                    place = note_hit(k, N_HITS)
                    if place < ROOM:
                        sync.sts_int(k.attention + HITS + place * 4, i)
        first = first + AT_ONCE * (k.c.warps * 32)


@cute.jit
def read_hits(k: cutlass.Constexpr, row: Int64, columns: Int32, least: Int64, hits: Int32):
    """The numbers from `least` on in those vectors."""
    j = k.tid
    while j < hits:
        i = sync.lds_int(k.attention + HITS + j * 4)
        for e, word in enumerate(sync.ld_fresh_words(row + Int64(i) * 16)):
            column = 4 * i + e
            number = number_of(key_of(sync.as_float(word)), column)
            if (column < columns) & (number >= least):
                place = note_hit(k, N_FOUND)
                if place < ROOM:
                    sync.sts_long(k.attention + FOUND + place * 8, number)
        j = j + k.c.warps * 32


@cute.jit
def collect(k: cutlass.Constexpr, row: Int64, columns: Int32, least: Int64):
    """The numbers from `least` on, to FOUND in any order; how many, or more than ROOM."""
    threads = k.c.warps * 32
    if k.tid < 2:
        sync.sts_int(k.attention + WORDS + k.tid * 4, Int32(0))
    sync.consumer_sync(threads)
    find_hits(k, row, columns, least)
    sync.consumer_sync(threads)
    hits = sync.lds_int(k.attention + N_HITS)
    read_hits(k, row, columns, least, cutlass.min(hits, ROOM))
    sync.consumer_sync(threads)
    found = sync.lds_int(k.attention + N_FOUND)
    if hits > ROOM:
        found = Int32(ROOM + 1)
    sync.consumer_sync(threads)
    return found


# -- order -------------------------------------------------------------------------------------
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


@cute.jit
def top_k(k: cutlass.Constexpr, row: Int64, columns: Int32, want: Int32):
    """All consumer warps of a CTA: the first `want` (1 .. 127) values above -inf of a row, in
    (value descending, column ascending) order, as pairs (fp32, int32 column) at k.attention +
    SORTED; returns how many, fewer where there are no more.

    row: address of fp32 [columns], 16-byte aligned, readable up to a multiple of 4, written by
    whomever before a hand-off that every thread here has seen or is synchronised with; no NaN and
    no +inf among the columns. Uses SMEM_BYTES of attention's part, from before the call until the
    caller's next `consumer_sync` behind its own reads of SORTED.
    """
    threads = k.c.warps * 32
    largest = key_of(own_largest(k, row, columns))
    sync.sts_long(k.attention + FOUND + k.tid * 8, number_of(largest, k.tid))
    sort_found(k, Int32(threads), want)
    least = key_of(sync.lds(k.attention + SORTED + (want - 1) * 8))
    most = key_of(sync.lds(k.attention + SORTED))
    sync.consumer_sync(threads)
    low = number_of(sync.larger(least, Uint32(LOWEST_KEY)), Int32(0x3FFFF))
    high = number_of(most, Int32(0)) + 1  # no number of the row is as large
    at, n, narrowing, searching = low, Int32(0), Boolean(False), Boolean(True)
    while searching:
        n = collect(k, row, columns, at)
        searching = Boolean(False)
        if n > ROOM:
            low, narrowing, searching = at, Boolean(True), Boolean(True)
        elif narrowing & (n < want):
            high, searching = at, Boolean(True)
        at = low + ((high - low) >> 1)
    sort_found(k, n, want)
    return cutlass.min(n, want)
