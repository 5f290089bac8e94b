"""A drafted position's candidates, from its row of the drafter's logits: layout in rank_plan.py.

CTA r takes row r. Its warp 0 waits for what all CTAs say about the row (head.py): the largest
logit and the sum, hence logsumexp over all columns in fp32, and whether a NaN or +inf is among
them. The words go back to EMPTY before anything else of this CTA is published. Then all consumer
warps find the first candidates (topk.py): as many as the tree may have nodes, since no node's rank
exceeds the number of nodes; one alone, a chain's, is what the results say. Columns ascend in token
id, so equal logits are in the order of ids.

With a script (Arg.DRAFT_SCRIPT) the row's candidates come from there, by the absolute position that
the row predicts: for measuring and for tests. The drafter's logits are then not looked at.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.gpu import head, sync
from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.board import Board, Desc
from cute_kernels.gpu.core import arg, desc_word, note_phase
from cute_kernels.gpu.fragments import exp2
from cute_kernels.gpu.rank_plan import (
    IDS,
    LOGPROBS,
    MOST,
    RANKED_BYTES,
    SCRIPT_HEAD,
    SORTED,
    WORDS,
)
from cute_kernels.gpu.sync import ptx_read
from cute_kernels.gpu.topk import key_of, top_k, value_of

NEG_INF = -float("inf")
BEST = WORDS + 8  # the row's largest logit and its first column
TOTAL = WORDS + 16  # its logsumexp, and 1 where it has none


def log_sum_exp(k, words):
    """(largest logit, its first column, logsumexp, flags) of a row from its results
    (head.result_words); the same in every lane. The largest first, so that the sums wait for one
    exponential each."""
    now = [
        head.unpacked([words[4 * i + e] for e in range(4)]) for i in range(words.layout.shape // 4)
    ]
    there = [k.lane + 32 * i < k.c.ctas for i in range(len(now))]
    logits = [sync.choose(ok, r[head.LOGIT], NEG_INF) for ok, r in zip(there, now, strict=True)]
    top = value_of(sync.warp_reduce("max", key_of(sync.maximum(logits))))
    safe, total, flags = sync.choose(top > NEG_INF, top, 0.0), Float32(0.0), Int32(0)
    column = Uint32(head.NO_TOKEN)
    for ok, logit, r in zip(there, logits, now, strict=True):
        part = r[head.SUM] * exp2((logit - safe) * head.LOG2_E)
        total = total + sync.choose(ok, part, 0.0)
        flags = flags | sync.select_int(ok, r[head.FLAGS], Int32(0))
        its = sync.select(ok & (logit == top), Uint32(r[head.TOKEN]), column)
        column = sync.smaller(column, its)
    for shift in range(5):
        total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << shift)
    log_sum = cute.math.log2(total, fastmath=True) * head.LN_2
    column, flags = sync.warp_reduce("min", column), sync.warp_reduce("or", Uint32(flags))
    return top, column, top + log_sum, flags


@cute.jit
def take_results(k: cutlass.Constexpr, row: Int32):
    """Warp 0: wait for the row's results, set them back to EMPTY, leave BEST and TOTAL."""
    words = head.result_words(k)
    head.wait_results(k, words, row)
    top, column, total, flags = log_sum_exp(k, words)
    head.clear_row(k, row)
    sync.fence_gpu()
    if k.lane == 0:
        sync.sts_pair(k.attention + BEST, top, sync.as_float(column))
        sync.sts_pair(k.attention + TOTAL, total, sync.as_float(flags))


@cute.jit
def publish(k: cutlass.Constexpr, to: Int64, n: Int32, token: Uint32, logprob: Uint32):
    """A candidate a thread, and how many they are."""
    if k.tid < n:
        sync.st_word(to + Int64(k.tid * 4 + IDS), token)
        sync.st_word(to + Int64(k.tid * 4 + LOGPROBS), logprob)
    if k.tid == 0:
        sync.st_word(to, Uint32(n))


@cute.jit
def follow_script(k: cutlass.Constexpr, script: Int64, position: Int32, want: Int32):
    """(candidates, this thread's token, its log-probability) of an absolute position."""
    n, token, logprob = Int32(0), Uint32(0), Uint32(0)
    if position < Int32(sync.ld_word(script)):
        at = script + Int64(position) * RANKED_BYTES + SCRIPT_HEAD
        n = cutlass.min(Int32(sync.ld_word(at)), want)
        if k.tid < n:
            token = sync.ld_word(at + Int64(k.tid * 4 + IDS))
            logprob = sync.ld_word(at + Int64(k.tid * 4 + LOGPROBS))
    return n, token, logprob


@cute.jit
def rank_logits(k: cutlass.Constexpr, row: Int32, want: Int32):
    """The same from the drafter's logits."""
    n, token, logprob = Int32(0), Uint32(0), Uint32(0)
    total, wrong = sync.lds_pair(k.attention + TOTAL)
    if (sync.as_bits(wrong) == 0) & (want > 0):
        logit, column = sync.lds_pair(k.attention + BEST)
        if want == 1:  # as in every step of a chain
            n = Int32(logit > NEG_INF)
        else:
            logits = arg(k, Arg.DRAFT_LOGITS) + Int64(row) * (k.c.draft_stride * 4)
            n = top_k(k, logits, Int32(arg(k, Arg.DRAFT_COLUMNS)), want)
            if k.tid < n:
                logit, column = sync.lds_pair(k.attention + SORTED + k.tid * 8)
        if k.tid < n:
            logprob, token = sync.as_bits(logit - total), sync.as_bits(column)
            tokens = arg(k, Arg.DRAFT_TOKENS)
            if tokens != 0:
                at = tokens + Int64(token) * 4
                token = ptx_read("ld.global.nc.b32 {$w0}, [{$r0}];", [Uint32], at)
    return n, token, logprob


@cute.jit
def rank_row(k: cutlass.Constexpr, row: Int32):
    threads, place = k.c.warps * 32, row - desc_word(k, Desc.FIRST_DRAFTED)
    if k.wid == 0:
        take_results(k, row)
    sync.consumer_sync(threads)
    if place >= 0:
        want = cutlass.min(desc_word(k, Desc.BUDGET), Int32(MOST))
        if desc_word(k, Desc.CHAIN) != 0:
            want = cutlass.min(want, Int32(1))
        want, script = cutlass.max(want, Int32(0)), arg(k, Arg.DRAFT_SCRIPT)
        n, token, logprob = Int32(0), Uint32(0), Uint32(0)
        if script != 0:
            position = desc_word(k, Desc.POSITION) + 1 + place
            n, token, logprob = follow_script(k, script, position, want)
        else:
            n, token, logprob = rank_logits(k, row, want)
        publish(k, arg(k, Arg.RANKED) + Int64(place) * RANKED_BYTES, n, token, logprob)
        sync.consumer_sync(threads)
        if k.tid == 0:
            tag = k.board + Int64((place + int(Board.RANK_TAG)) * 4)
            sync.st_release(tag, desc_word(k, Desc.TAG))


@cute.jit
def rank_rows(k: cutlass.Constexpr):
    """Consumer warps of all CTAs, behind `head.publish_results` of a DRAFT step. Uses attention's
    part of shared memory, which is free when it returns."""
    note_phase(k, k.phases + 2)
    rows, row = desc_word(k, Desc.ROWS), k.bid
    while row < rows:
        rank_row(k, row)
        row = row + k.c.ctas
