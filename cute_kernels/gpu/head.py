"""The head's results: fp32 logits in memory, and per row what every CTA says about its share.

A thread keeps, over the CTA's tiles, for one row and its column pairs: the largest logit, the
smallest token that has it, the sum of exp(logit - largest), and whether a logit was NaN or +inf.
The threads of a row are merged in a fixed order, and so are the CTAs (by the service warp), so the
sums do not depend on timing. Columns beyond the vocabulary (padding to whole tiles) do not count.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.board import result_at
from cute_kernels.gpu.config import ROWS
from cute_kernels.gpu.fragments import exp2

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
NEG_INF, INF = -float("inf"), float("inf")
NO_TOKEN = 0x7FFFFFFF
LOGIT, TOKEN, SUM, FLAGS = range(4)  # places of `stats`; TOKEN as bits


def no_stats():
    return [Float32(NEG_INF), Int32(NO_TOKEN), Float32(0.0), Int32(0)]


def product(a, b):
    """Rounded on its own, whatever is added to it."""
    return sync.ptx_read("mul.rn.f32 {$w0}, {$r0}, {$r1};", [Float32], a, b)


def power(logit, top):
    """exp(logit - top)."""
    return exp2(product(logit - top, Float32(LOG2_E)))


def merged(a, b):
    """Of two (logit, token, sum, flags), in that order."""
    top = sync.maximum([a[LOGIT], b[LOGIT]])
    safe = sync.choose(top > NEG_INF, top, 0.0)
    ea, eb = power(a[LOGIT], safe), power(b[LOGIT], safe)
    total = product(a[SUM], ea) + product(b[SUM], eb)
    low = cutlass.min(a[TOKEN], b[TOKEN])
    token = sync.select_int(a[LOGIT] > b[LOGIT], a[TOKEN], low)
    token = sync.select_int(b[LOGIT] > a[LOGIT], b[TOKEN], token)
    return [top, token, total, a[FLAGS] | b[FLAGS]]


def over_lanes(mine, offsets):
    """Merged by butterfly. Rounding may differ between lanes: let one of them speak."""
    for offset in offsets:
        other = [cute.arch.shuffle_sync_bfly(v, offset=offset) for v in mine]
        mine = merged(mine, other)
    return mine


# -- in the epilogue -----------------------------------------------------------------------------
def new_stats():
    """A thread's running values: 4 words, the token and the flags as they are."""
    out = cute.make_rmem_tensor(cute.make_layout(4), Uint32)
    for i, v in enumerate(no_stats()):
        out[i] = sync.as_bits(v)
    return out


def unpacked(words):
    """(logit, token, sum, flags) of four words."""
    return [
        sync.as_float(words[LOGIT]), sync.as_int(words[TOKEN]),
        sync.as_float(words[SUM]), sync.as_int(words[FLAGS]),
    ]  # fmt: skip


@cute.jit
def store_logits(k: cutlass.Constexpr, rows: Int32, col: Int32, v0: Float32, v1: Float32,
                 logits: Int64):  # fmt: skip
    if k.row < rows:
        at = logits + (Int64(k.row) * k.c.logit_stride + Int64(col)) * 4
        sync.ptx_do("st.global.v2.f32 [{$r0}], {{$r1},{$r2}};", at, v0, v1)


def note_logits(k, stats, rows, col, v0, v1, logits):
    """Columns col, col + 1 of the thread's row: into memory and into its running values."""
    store_logits(k, rows, col, v0, v1, logits)
    add_logits(k, stats, col, v0, v1)


def add_logits(k, stats, col, v0, v1):
    """Into the running values. Its multiplications are fixed, not left to contraction: the row form
    makes the same bits of the same logits."""
    c = k.c
    now = unpacked(stats)
    values, flags = [v0, v1], now[FLAGS]
    for i in range(2):
        real = Boolean(True)
        if c.logit_stride != c.shape.vocab:
            real = col + i < c.shape.vocab
        bad = sync.select_int(values[i] < INF, Int32(0), Int32(1))
        flags = flags | sync.select_int(real, bad, Int32(0))
        values[i] = sync.choose(real, values[i], NEG_INF)
    pair = sync.maximum(values)
    top = sync.maximum([now[LOGIT], pair])
    safe = sync.choose(top > NEG_INF, top, 0.0)
    total = product(now[SUM], power(now[LOGIT], safe))
    for v in values:
        total = total + power(v, safe)
    first = sync.select_int(values[1] > values[0], col + 1, col)
    token = sync.select_int(pair > now[LOGIT], first, now[TOKEN])
    for i, v in enumerate((top, token, total, flags)):
        stats[i] = sync.as_bits(v)


# -- the CTA's results ---------------------------------------------------------------------------
def over_groups(k):
    """Of row `tid`: what the threads of the group's tiles found, ascending."""
    total = no_stats()
    for j in range(k.c.group):
        total = merged(total, unpacked(sync.lds_words(k.results + (j * ROWS + k.tid) * 16)))
    return total


@cute.jit
def publish_results(
    k: cutlass.Constexpr, rows: Int32, stats: cute.Tensor, first: cutlass.Constexpr = 0
):
    """All consumer warps, behind the last phase: merge the row's threads, tell who waits. Rows are
    first .. first + rows - 1 of the board (an Int32, or 0).

    The caller has made sure that the CTA's clearing of activation words is fenced."""
    c = k.c
    mine = over_lanes(unpacked(stats), (2, 4))  # the four lanes of a row
    if k.t == 0:
        at = k.results + (k.j * ROWS + k.row) * 16
        sync.sts_words(at, [sync.as_bits(v) for v in mine])
    sync.consumer_sync(c.warps * 32)
    if k.tid < rows:
        total = over_groups(k)
        sync.fence_gpu()  # everything this CTA wrote in the step is seen before its results are
        sync.st_words(result_address(k, first + k.tid, k.bid), [sync.as_bits(v) for v in total])


# -- the service warp's side ---------------------------------------------------------------------
def result_address(k, row, cta):
    base = k.board + Int64(result_at(0, 0))
    return base + Int64(row * (result_at(1, 0) - result_at(0, 0)) + cta * 16)


def ask_results(k, words, row):
    """One round of loads of a row's results; words: 4 per CTA of this lane (lane + 32 i), see
    `result_words`. Returns the largest word: EMPTY until all are there. Whole warps."""
    for i in range(words.layout.shape // 4):
        cta = k.lane + 32 * i
        ok = Int32(cta < k.c.ctas)
        for e, v in enumerate(sync.ld_words_if(ok, result_address(k, row, cta))):
            words[4 * i + e] = v
    return sync.largest([words[i] for i in range(words.layout.shape)])


@cute.jit
def wait_results(k: cutlass.Constexpr, words: cute.Tensor, row: Int32):
    """A warp: until every CTA has spoken about the row."""
    tries, since = Int32(0), Int64(0)
    while sync.any_lane_empty(ask_results(k, words, row)) != 0:
        tries, since = sync.overdue(tries, since)


def result_words(k):
    return cute.make_rmem_tensor(cute.make_layout(-(-k.c.ctas // 32) * 4), Uint32)


def merge_results(k, words):
    """(largest logit, its smallest token, log of the sum of exp(logit - largest), flags) of a row
    whose results are complete; the same in every lane. The token's log-probability is minus the
    third."""
    total = no_stats()
    for i in range(words.layout.shape // 4):
        there = k.lane + 32 * i < k.c.ctas
        now = unpacked([words[4 * i + e] for e in range(4)])
        now[LOGIT] = sync.choose(there, now[LOGIT], NEG_INF)
        now[TOKEN] = sync.select_int(there, now[TOKEN], Int32(NO_TOKEN))
        total = merged(total, now)
    total = [cute.arch.shuffle_sync(v, 0) for v in over_lanes(total, (1, 2, 4, 8, 16))]
    log_sum = cute.math.log2(total[SUM], fastmath=True) * LN_2
    return total[LOGIT], total[TOKEN], log_sum, total[FLAGS]


@cute.jit
def clear_row(k: cutlass.Constexpr, row: Int32):
    """A warp: a row's results back to EMPTY; a fence must follow."""
    cta = k.lane
    while cta < k.c.ctas:
        sync.st_words(result_address(k, row, cta), [Uint32(sync.EMPTY)] * 4)
        cta = cta + 32


@cute.jit
def clear_results(k: cutlass.Constexpr, rows: Int32):
    """Back to EMPTY, before the next descriptor is published (with a fence in between)."""
    for row in cutlass.range(rows, unroll=1):
        clear_row(k, row)
