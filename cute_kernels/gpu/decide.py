"""The decision: from one row of target logits to one token, by one CTA.

Order of the pipeline: bias, temperature, top-k, top-p, min-p, then the race (race.py). Each filter
keeps a prefix of the tokens in (logit descending, id ascending) order (prefix_search.py). The
definition is that of the CPU device (cute_kernels/cpu/sampling.py), the arithmetic too (exact.py):
from the same logits both give the same token.

A row's token does not depend on which CTA decides it, with how many threads, or on what else the
step holds. What comes from the row's results (largest logit, its id, log of the sum) is merged in a
fixed order by the same code as in a step without DECIDE, so that log-probabilities have the same
bits. Counts and masses are integers, the prefix is a set, the list is sorted by keys that all
differ; thresholds, floors and reaches decide only what is looked at, never what comes of it; and
the winner of the race is the best of a total order.

Biases are added to the row where it lies, and what stood there is put back: alternatives and
log-probabilities are those of the raw logits.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.gpu import exact, head, sync
from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.board import ROW_WORDS, Board, Desc, RowWord, Segment
from cute_kernels.gpu.core import arg, desc_word, note_phase
from cute_kernels.gpu.prefix import (
    DONE,
    ESTIMATE,
    GATHER,
    INF,
    LOWEST,
    MAXIMA_AT,
    QUADS,
    SAMPLE,
    W,
    check,
    entry_id,
    entry_value,
    halves,
    joined,
    load_quads,
    new_values,
    number,
    packed,
    put,
    quads,
    word,
)
from cute_kernels.gpu.prefix_search import (
    end_in_list,
    entry,
    floor_of_maxima,
    guess,
    list_mass,
    open_search,
    search,
    widened,
)
from cute_kernels.gpu.race import run_race, winner
from cute_kernels.gpu.sync import ptx_do
from host.wire import MAX_ALTERNATIVES, MAX_BIAS, sampling_at

ALTERNATIVES, TOP_K, TOP_P = range(3)  # prefixes of a row, in the order they are searched
NO_VALUE = 0x7FC00000  # a NaN that is not EMPTY


# -- the row's results ---------------------------------------------------------------------------
@cute.jit
def take_results(k: cutlass.Constexpr, row: Int32):
    """Warp 0: wait for the row's results, note them, set them back to EMPTY."""
    words = head.result_words(k)
    head.wait_results(k, words, row)
    sync.fence_gpu()  # the logits are read behind this
    largest, top, log_sum, flags = head.merge_results(k, words)
    for i in cutlass.range_constexpr(words.layout.shape // 4):
        cta = k.lane + 32 * i
        if cta < padded_ctas(k):
            logit = sync.choose(cta < k.c.ctas, sync.as_float(words[4 * i]), -INF)
            sync.sts(k.red + MAXIMA_AT + 4 * cta, logit)
    head.clear_row(k, row)
    sync.fence_gpu()  # EMPTY before DECISION
    if k.lane == 0:
        for name, v in ((W.LARGEST, largest), (W.TOP, top), (W.LOG_SUM, log_sum)):
            put(k, name, v)
        bad = Int32(flags != 0) | Int32(largest == -INF)
        put(k, W.FLAGS, bad)
        put(k, W.MAXIMA, Int32(padded_ctas(k)))
        put(k, W.GUESS, Int32(guess(k.c.ctas)))
        put(k, W.CUT, Float32(-INF))
        put(k, W.LAST, Int32(-1))
        put(k, W.KEPT, Int32(-1))


def padded_ctas(k):
    return -(-k.c.ctas // 4) * 4


# -- bias ----------------------------------------------------------------------------------------
def bias_at(how, row, i):
    """(address of the logit, bias) of pair i; behind `bias_in`."""
    token = sync.as_int(sync.ld_word(how + sampling_at("bias_ids") + Int64(i) * 4))
    return row + Int64(token) * 4, sync.ld_float(how + sampling_at("bias") + Int64(i) * 4)


def bias_in(k, how, i, count):
    """1 where pair i names a token of the vocabulary."""
    token = sync.ld_word(
        how + sampling_at("bias_ids") + Int64(cutlass.min(i, Int32(MAX_BIAS - 1))) * 4
    )
    return Int32(i < count) & Int32(token < k.c.shape.vocab)


@cute.jit
def move_bias(k: cutlass.Constexpr, how: Int64, row: Int64, count: Int32, saved: cute.Tensor,
              restore: cutlass.Constexpr):  # fmt: skip
    """Add the biases, or put back the logits that this thread has saved."""
    for i in cutlass.range_constexpr(saved.layout.shape):
        pair = k.tid + i * k.c.warps * 32
        if bias_in(k, how, pair, count) != 0:
            to, bias = bias_at(how, row, pair)
            if cutlass.const_expr(restore):
                ptx_do("st.global.f32 [{$r0}], {$r1};", to, saved[i])
            else:
                saved[i] = sync.ld_float(to)
                ptx_do("st.global.f32 [{$r0}], {$r1};", to, exact.plus(saved[i], bias))


@cute.jit
def find_largest(k: cutlass.Constexpr, row: Int64):
    """All consumer warps: LARGEST, TOP and the maxima of a row that was changed."""
    threads = k.c.warps * 32
    best, token, first = Float32(-INF), Int32(0), Int32(0)
    values = new_values(2 * QUADS)
    while first < quads(k):
        load_quads(k, row, first, 2 * QUADS, values)
        for i in cutlass.range_constexpr(2 * QUADS):
            most = sync.maximum([values[4 * i + e] for e in range(4)])
            if most > best:
                best = most
                for e in cutlass.range_constexpr(3, -1, -1):
                    here = 4 * (first + i * threads + k.tid) + e
                    token = sync.select_int(values[4 * i + e] == most, here, token)
        first = first + 2 * QUADS * threads
    sync.sts(k.red + MAXIMA_AT + 4 * k.tid, best)
    own = packed(best, token)
    for d in cutlass.range_constexpr(5):
        own = earlier(own, joined(*(cute.arch.shuffle_sync_bfly(w, offset=1 << d)
                                    for w in halves(own))))  # fmt: skip
    if k.lane == 0:
        sync.sts_long(k.red + 8 * k.wid, own)
    sync.consumer_sync(threads)
    if k.tid == 0:
        for w in cutlass.range_constexpr(k.c.warps):
            own = earlier(own, sync.lds_long(k.red + 8 * w))
        largest = entry_value(own)
        put(k, W.LARGEST, largest)
        put(k, W.TOP, entry_id(own))
        put(k, W.MAXIMA, Int32(threads))
        put(k, W.GUESS, Int32(guess(threads)))
        is_number = Int32(largest >= LOWEST) & Int32(largest < INF)
        put(k, W.FLAGS, 1 - is_number)
    sync.consumer_sync(threads)


def earlier(a, b):
    """The smaller of two entries, as unsigned numbers."""
    return sync.ptx_read("min.u64 {$w0}, {$r0}, {$r1};", [Int64], a, b)


# -- filters -------------------------------------------------------------------------------------
@cute.jit
def cut_list(k: cutlass.Constexpr, n: Int32, temperature: Float32, top_p: Float32):
    """Warp 0: top-p where the sorted list is all that is left."""
    total = list_mass(k, n, temperature)
    if k.lane == 0:
        open_search(k, exact.mass_limit(top_p, total), Int32(DONE))
    cute.arch.sync_warp()
    end_in_list(k, n, Int32(1), temperature)


@cute.jit
def find_prefix(k: cutlass.Constexpr, row: Int64, limit: Int32, temperature: Float32,
                top_p: Float32):  # fmt: skip
    """The first `limit` tokens, or with limit 0 top-p's, of the prefix so far. All warps."""
    threads = k.c.warps * 32
    kept, by_mass = word(k, W.KEPT), Int32(limit == 0)
    sync.consumer_sync(threads)
    if (by_mass != 0) & (kept >= 0):
        if k.wid == 0:
            cut_list(k, kept, temperature, top_p)
        sync.consumer_sync(threads)
    else:
        most = word(k, W.GUESS)
        few = (1 - by_mass) & Int32(limit <= most)
        state = sync.select_int(few != 0, Int32(GATHER), Int32(SAMPLE))
        if k.tid == 0:
            state = sync.select_int(by_mass != 0, Int32(ESTIMATE), state)
            open_search(k, Int64(limit), state)
        # of top-p fewer: sorting is quadratic, and the end is mostly among the first hundred
        rank = sync.select_int(by_mass != 0, most - (most >> 2) + (most >> 4), most)
        floor_of_maxima(k, sync.select_int(few != 0, limit, rank))
        sync.consumer_sync(threads)
        if (few | by_mass) == 0:
            if k.tid == 0:
                put(k, W.LOW, widened(k, Uint32(word(k, W.LOW)), 2.0))
            sync.consumer_sync(threads)
        search(k, row, by_mass, temperature, top_p)


@cute.jit
def write_alternatives(k: cutlass.Constexpr, row: Int32, count: Int32):
    """The list's first tokens with the log-probabilities of the raw logits; ids of -1 where the
    vocabulary has no more. Then the prefix is the whole row again."""
    kept = word(k, W.KEPT)
    if k.tid < count:
        to = arg(k, Arg.ALTERNATIVES) + Int64(row * MAX_ALTERNATIVES + k.tid) * 8
        token, logprob = Int32(-1), Float32(0.0)
        if k.tid < kept:
            token = entry_id(entry(k, k.tid))
            logprob = log_probability(k, entry_value(entry(k, k.tid)), number(k, W.LARGEST))
        ptx_do("st.global.v2.b32 [{$r0}], {{$r1},{$r2}};", to, token, sync.as_bits(logprob))
    sync.consumer_sync(k.c.warps * 32)
    if k.tid == 0:
        put(k, W.CUT, Float32(-INF))
        put(k, W.LAST, Int32(-1))
        put(k, W.KEPT, Int32(-1))


def log_probability(k, logit, largest):
    """Of a raw logit; of the largest it is minus LOG_SUM to the bit, as without DECIDE."""
    below = exact.plus(number(k, W.LOG_SUM), exact.minus(largest, logit))
    return sync.as_float(sync.as_bits(below) ^ Uint32(0x80000000))


# -- one row -------------------------------------------------------------------------------------
@cute.jit
def position_of(k: cutlass.Constexpr, row: Int32):
    """Of the token that is decided."""
    position = Int32(0)
    if desc_word(k, Desc.KIND) == int(Segment.ROWS):
        table = arg(k, Arg.ROW_TABLE)
        at_row = table + Int64(row * ROW_WORDS + int(RowWord.POSITION)) * 4
        position = sync.as_int(sync.ld_word(at_row))
    else:
        position = sync.lds_int(k.desc + 4 * (int(Desc.ROW_POSITION) + row))
    return position + 1


@cute.jit
def decide_row(k: cutlass.Constexpr, how: Int64, logits: Int64, row: Int32):
    threads = k.c.warps * 32
    if k.wid == 0:
        take_results(k, row)
    sync.consumer_sync(threads)
    temperature, top_p, min_p, top_k = [sync.as_float(v) for v in sync.ld_words(how)]
    seed_low, seed_high, logprobs, biases = sync.ld_words(how + 16)
    top_k, logprobs, biases = sync.as_int(top_k), sync.as_int(logprobs), sync.as_int(biases)
    saved = cute.make_rmem_tensor(cute.make_layout(-(-MAX_BIAS // threads)), Float32)
    raw_largest = number(k, W.LARGEST)
    token = word(k, W.TOP)
    if word(k, W.FLAGS) == 0:
        for search_for in cutlass.range(3, unroll=1):
            if (search_for == TOP_K) & (biases > 0):
                move_bias(k, how, logits, biases, saved, False)
                sync.consumer_sync(threads)
                find_largest(k, logits)
            limit, wanted = Int32(0), Int32(logprobs > 0)
            if search_for == ALTERNATIVES:
                limit = cutlass.min(logprobs, Int32(MAX_ALTERNATIVES))
            else:
                is_free = Int32(temperature > 0.0) & (1 - word(k, W.FLAGS))
                wanted = is_free & Int32(top_p < 1.0)
                if search_for == TOP_K:
                    limit = top_k
                    wanted = is_free & Int32(top_k > 0) & Int32(top_k < k.c.shape.vocab)
            if wanted != 0:
                find_prefix(k, logits, limit, temperature, top_p)
                if search_for == ALTERNATIVES:
                    write_alternatives(k, row, limit)
            sync.consumer_sync(threads)
        token = word(k, W.TOP)
        if (temperature > 0.0) & (word(k, W.FLAGS) == 0):
            position = position_of(k, row)
            run_race(k, logits, position, temperature, min_p, seed_low, seed_high)
            sync.consumer_sync(threads)
            token = winner(k)
        if biases > 0:
            move_bias(k, how, logits, biases, saved, True)
    sync.consumer_sync(threads)
    if k.tid == 0:
        write_decision(k, logits, row, token, raw_largest)


@cute.jit
def write_decision(k: cutlass.Constexpr, logits: Int64, row: Int32, token: Int32,
                   largest: Float32):  # fmt: skip
    """One thread, behind everything that the CTA does for the row."""
    bits, flags = Uint32(NO_VALUE), word(k, W.FLAGS)
    if flags == 0:
        raw = sync.ld_float(logits + Int64(token) * 4)
        bits = sync.as_bits(log_probability(k, raw, largest))
    else:
        token = Int32(0)
    sync.fence_gpu()
    to = k.board + Int64((int(Board.DECISION) + 4 * row) * 4)
    sync.st_words(to, [Uint32(token), bits, Uint32(flags), Uint32(0)])


@cute.jit
def decide_rows(k: cutlass.Constexpr):
    """Consumer warps of every CTA, behind the results of a step with DECIDE."""
    check(k.c)
    rows, row = desc_word(k, Desc.ROWS), k.bid
    how, logits = arg(k, Arg.SAMPLING), arg(k, Arg.LOGITS)
    note_phase(k, k.phases + 1)
    while row < rows:
        sync.consumer_sync(k.c.warps * 32)  # the scratch is free
        decide_row(k, how, logits + Int64(row) * (k.c.logit_stride * 4), row)
        row = row + k.c.ctas
