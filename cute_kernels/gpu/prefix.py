"""The prefix of a row of logits that a filter keeps, and the passes over the row that look for it.

The order is (logit descending, id ascending). A prefix is given by CUT and LAST: a token belongs to
it if its logit is above CUT, or equal to it and its id at most LAST. How it is found, and what the
passes are for: prefix_search.py. All of it is done by the consumer warps of one CTA, over a row
that lies in L2, with a few words in shared memory that say how things stand.
"""

from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.gpu import exact, sync
from cute_kernels.gpu.config import MAX_VOCAB
from cute_kernels.gpu.fragments import exp2
from cute_kernels.gpu.sync import ptx_read
from cute_kernels.gpu.topk import key_of, value_of

LISTED = 512  # entries of a list, 8 bytes each: order key of the value, complemented, above the id
BINS = 256
UPPER = BINS  # a bin more: what a histogram's window has above it
QUADS = 4  # vectors of four logits that a thread has in hand
MASS = 2.0**44
LOG2_E = 1.4426950408889634
LOWEST, INF = -3.4028234663852886e38, float("inf")
FIRST_ID = MAX_VOCAB  # of -x, where ids take the logits' place: all have the same exponent
SPARSE_BITS = 4  # one of 16 vectors is a sample's
ESTIMATE, SURVEY, GATHER, SAMPLE, HISTOGRAM, DONE = range(6)


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
    MOST = 20  # 64 bits: what the limit is at most, where LIMIT is what it is at least
    REACH = 22  # of race.py
    CEIL = 23  # order key: BEFORE and ABOVE are of what is at or above; HIGH, or more
    REST = 24  # 64 bits: what is beyond the end; below 0 where that is not known


CONTROL_BYTES = 4 * (W.REST + 2)
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


def load_quads(k, row, first, n, values, sparse=0):
    """Vectors first + i threads + tid, i < n, of the row, or of a sample (sparse: SPARSE_BITS, else
    0); what is not there is -inf."""
    vocab, threads = k.c.shape.vocab, k.c.warps * 32
    for i in range(n):
        quad = sampled(first + i * threads + k.tid, sparse)
        four = sync.ld_floats_if(Int32(quad < quads(k)), row + Int64(quad) * 16, -INF)
        for e in range(4):
            if vocab % 4:
                four[e] = sync.choose(4 * quad + e < vocab, four[e], -INF)
            values[4 * i + e] = four[e]


def sampled(i, sparse):
    """Vector i of a sample of every 2^sparse-th, not always the same of so many."""
    return (i << sparse) + ((i * 5) & ((1 << sparse) - 1))


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
def append(k: cutlass.Constexpr, x: Float32, token: Int32):
    """To the list; how many there were before."""
    seen = sync.add_shared(at(k, W.FOUND), Int32(1))
    if seen < LISTED:
        sync.sts_long(k.red + 8 * seen, packed(x, token))
    return seen


@cute.jit
def survey(k: cutlass.Constexpr, row: Int64, temperature: Float32, exactly: Int32):
    """Mass of the prefix so far, or an estimate, per warp into the sorted list's place; its tokens
    with LOW <= x into the list, in any order."""
    threads = k.c.warps * 32
    cut, last, largest = number(k, W.CUT), word(k, W.LAST), number(k, W.LARGEST)
    inverse, total, first = exact.inverse_temperature(temperature), Int64(0), Int32(0)
    floor, about = value_of(Uint32(word(k, W.LOW))), Float32(0.0)
    scale = sync.least(inverse * LOG2_E, Float32(-LOWEST))
    # exp(-31) < 2^-44: nothing below has mass
    low = exact.minus(largest, exact.times(Float32(31.0), temperature))
    low = sync.least(sync.maximum([low, cut]), floor)
    now, coming = new_values(QUADS), new_values(QUADS)
    load_quads(k, row, first, QUADS, now)
    while first < quads(k):
        load_quads(k, row, first + QUADS * threads, QUADS, coming)
        if cut > -INF:
            for i in cutlass.range_constexpr(4 * QUADS):
                token = 4 * (first + i // 4 * threads + k.tid) + i % 4
                stays = in_prefix(now[i], token, cut, last)
                now[i] = sync.choose(stays != 0, now[i], -INF)
        for i in cutlass.range(QUADS, unroll=1):
            most = sync.maximum([now[e] for e in range(4)])
            if most >= low:
                token = 4 * (first + i * threads + k.tid)
                if exactly != 0:
                    for e in cutlass.range_constexpr(4):
                        total = total + exact.mass(now[e], largest, inverse)
                else:
                    weights = [exp2((now[e] - largest) * scale) for e in range(4)]
                    about = about + ((weights[0] + weights[1]) + (weights[2] + weights[3]))
                if most >= floor:
                    for e in cutlass.range_constexpr(4):
                        if now[e] >= floor:
                            append(k, now[e], token + e)
            shift(now)
        for i in cutlass.range_constexpr(4 * QUADS):
            now[i] = coming[i]
        first = first + QUADS * threads
    total = over_warp(total)
    for d in cutlass.range_constexpr(5):
        about = about + cute.arch.shuffle_sync_bfly(about, offset=1 << d)
    if exactly == 0:
        total = exact.whole(about * MASS)
    if k.lane == 0:
        sync.sts_long(k.red + SORTED_AT + 8 * k.wid, total)


def over_warp(total):
    """The sum over the lanes. A lane's has at most 57 bits: 2^13 tokens of 2^44."""
    parts = [sync.warp_reduce("add", Uint32(total >> (20 * i)) & 0xFFFFF) for i in range(3)]
    return Int64(parts[0]) + (Int64(parts[1]) << 20) + (Int64(parts[2]) << 40)


def bin_at(k, part, i):
    """Low words of the masses, high words, numbers: three arrays of BINS + 1 words."""
    return k.red + 4 * (part * (BINS + 1) + i)


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
def histogram(k: cutlass.Constexpr, row: Int64, by_mass: Int32, temperature: Float32,
              sparse: Int32):  # fmt: skip
    """What [LOW, HIGH) holds, by bins of keys, and [HIGH, CEIL), in one; they are 0 before. Of a
    sample (see `load_quads`) the bins are of equal width in logits."""
    threads, vectors = k.c.warps * 32, (quads(k) + (1 << sparse) - 1) >> sparse
    cut, last, largest = number(k, W.CUT), word(k, W.LAST), number(k, W.LARGEST)
    ties, value = word(k, W.TIES), number(k, W.VALUE)
    low_key, high_key = Uint32(word(k, W.LOW)), Uint32(word(k, W.HIGH))
    span, reach = high_key - low_key, Uint32(word(k, W.CEIL)) - low_key
    bits, low = bits_per_bin(span), value_of(low_key)
    high, per_logit = value_of(high_key), bins_per_logit(k)
    inverse, amount = exact.inverse_temperature(temperature), Int64(1)
    if by_mass != 0:
        amount = exact.mass(value, largest, inverse)
    varies = by_mass & (1 - ties)
    # equal neighbours are added up before they go to their bin
    same, total, n, first = Int32(0), Int64(0), Int32(0), Int32(0)
    upper, n_upper = Int64(0), Int32(0)
    now, coming = new_values(QUADS), new_values(QUADS)
    load_quads(k, row, first, QUADS, now, sparse)
    while first < vectors:
        load_quads(k, row, first + QUADS * threads, QUADS, coming, sparse)
        if ties != 0:
            turn_to_ids(now, first + k.tid, threads, value)
        for i in cutlass.range(QUADS, unroll=1):
            if sync.maximum([now[e] for e in range(4)]) >= low:
                token = 4 * sampled(first + i * threads + k.tid, sparse)
                for e in cutlass.range_constexpr(4):
                    from_low = key_of(now[e]) - low_key
                    logit = sync.choose(ties != 0, value, now[e])
                    if (from_low < reach) & (in_prefix(logit, token + e, cut, last) != 0):
                        if varies != 0:
                            amount = exact.mass(now[e], largest, inverse)
                        if from_low < span:
                            mine = Int32(from_low >> Uint32(bits))
                            if sparse != 0:
                                mine = bin_below(high - now[e], per_logit)
                            if mine != same:
                                flush(k, same, total, n)
                                same, total, n = mine, Int64(0), Int32(0)
                            total, n = total + amount, n + 1
                        else:
                            upper, n_upper = upper + amount, n_upper + 1
            shift(now)
        for i in cutlass.range_constexpr(4 * QUADS):
            now[i] = coming[i]
        first = first + QUADS * threads
    flush(k, same, total, n)
    upper, n_upper = over_warp(upper), Int32(sync.warp_reduce("add", Uint32(n_upper)))
    if k.lane == 0:
        flush(k, Int32(UPPER), upper, n_upper)


def bins_per_logit(k):
    """Of a sample's bins."""
    low, high = value_of(Uint32(word(k, W.LOW))), value_of(Uint32(word(k, W.HIGH)))
    return ptx_read("div.approx.f32 {$w0}, {$r0}, {$r1};", [Float32], Float32(BINS), high - low)


def bin_below(distance, per_logit):
    """Of a sample, the bin of a logit that is so far below HIGH; the first is BINS - 1."""
    return BINS - 1 - cutlass.min(cutlass.max(Int32(distance * per_logit), 0), BINS - 1)


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
                        seen = append(k, x, token)
        first = first + 2 * QUADS * threads
