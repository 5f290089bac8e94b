"""Exact selection in one row of logits: the first tokens in (logit descending, id ascending) order.

Nothing is sorted in full. `prefix_end` finds where a prefix of the order ends by radix: it bins the
candidates by the leading bits of an order-preserving integer of the logit, keeps the bin in which
the end lies, and goes on with the next bits. What can be ruled out by passes over the whole row,
which are vector code and cheap, is ruled out before. A prefix is given as `(cut, last)`: a token
belongs to it if its logit is above `cut`, or equal to it and its id at most `last`.

What is counted up to the end is an integer, tokens or mass, so the sums are exact in any order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cute_kernels.cpu.noise import GROUP
from cute_kernels.cpu.simd import I16, I64, LANES, call, load_vector, pointer, splat
from cute_kernels.cpu.vecmath import argmax, log, sum_exp
from host.jit import jit

MAX_SORTED = 256
"""The most tokens `top_k_sorted` lists."""

MASS = 2.0**44
"""The mass of a token of weight 1. 2^18 of them, more than any vocabulary has, fit in 63 bits."""

_BITS = 8
_BINS = 1 << _BITS
_STEPS, _HALVINGS = 12, 9
LOWEST, INF = np.float32(np.finfo(np.float32).min), np.float32(np.inf)


class Workspace(NamedTuple):
    """What the functions of a row work in; a worker uses row `worker` of each."""

    biased: np.ndarray  # [workers, V*] float32: logits with their bias
    weight: np.ndarray  # [workers, V*] float32: exp((logit - largest) / temperature), 0 if removed
    ids: np.ndarray  # [workers, V*] int32: candidates, ascending
    spare: np.ndarray  # [workers, V*] int32
    largest: np.ndarray  # [workers, V*] float32: of groups of tokens
    sums: np.ndarray  # [workers, bins] int64
    noise: np.ndarray  # [workers, GROUP] uint32
    top: np.ndarray  # [workers, MAX_SORTED] float32


def make_workspace(workers: int, vocab: int) -> Workspace:
    """A workspace for rows of up to `vocab` logits."""
    width = -(-vocab // GROUP) * GROUP
    return Workspace(
        biased=np.zeros((workers, width), np.float32),
        weight=np.zeros((workers, width), np.float32),
        ids=np.zeros((workers, width), np.int32),
        spare=np.zeros((workers, width), np.int32),
        largest=np.zeros((workers, width), np.float32),
        sums=np.zeros((workers, _BINS), np.int64),
        noise=np.zeros((workers, GROUP), np.uint32),
        top=np.zeros((workers, MAX_SORTED), np.float32),
    )


def lane_bits(builder, flags):
    """A vector of 16 flags as the low bits of an int64."""
    return builder.zext(builder.bitcast(flags, I16), I64)


@intrinsic
def lanes_at_least(typingctx, values, floor):
    """Bit i is set if `values[i] >= floor`, for 16 floats."""

    def codegen(context, builder, signature, args):
        limit = splat(builder, context.cast(builder, args[1], signature.args[1], types.float32))
        return lane_bits(builder, builder.fcmp_ordered(">=", load_vector(builder, args[0]), limit))

    return types.int64(values, floor), codegen


@intrinsic
def lowest_bit(typingctx, word):
    """Index of the lowest bit set in an int64 that is not 0."""

    def codegen(context, builder, signature, args):
        return call(builder, "llvm.cttz.i64", I64, args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), codegen


@intrinsic
def _bits_of(typingctx, value):
    """The 32 bits of a float32, as an int64 >= 0."""

    def codegen(context, builder, signature, args):
        value = context.cast(builder, args[0], signature.args[0], types.float32)
        return builder.zext(builder.bitcast(value, ir.IntType(32)), I64)

    return types.int64(value), codegen


@jit
def _key(value):
    """An integer >= 0 that orders as the floats do; both zeros have the same."""
    bits = _bits_of(value + np.float32(0.0))
    negative = bits >> 31
    return (bits ^ (negative * 0x7FFFFFFF)) + 0x80000000 - (negative << 32)


@jit
def candidates(values, floor, ceiling, ids):
    """The ids of all `floor <= value < ceiling`, ascending; how many."""
    n = 0
    whole = values.size // LANES * LANES
    for first in range(0, whole, LANES):
        some = pointer(values, first)
        lanes = lanes_at_least(some, floor) & ~lanes_at_least(some, ceiling)
        while lanes:
            ids[n] = first + lowest_bit(lanes)
            n += 1
            lanes &= lanes - 1
    for i in range(whole, values.size):
        ids[n] = i
        n += (values[i] >= floor) & (values[i] < ceiling)
    return n


@jit
def mass(weight):
    """A weight in [0, 1] as an integer number of 2^-44, rounded down."""
    return np.int64(weight * np.float32(MASS))


@jit
def measure(values, weight, counts, floor):
    """What is at or above `floor`: the number of values if `counts`, else the mass of weights."""
    total = 0
    if counts:
        for i in range(values.size):
            total += values[i] >= floor
    else:
        for i in range(values.size):
            total += mass(weight[i] if values[i] >= floor else np.float32(0.0))
    return total


@jit
def narrow(values, weight, counts, limit, top, unit):
    """`(low, high, before)`: values have less than `limit` before them if they are `>= high`, and
    do not if they are `< low`. `before` is what is at or above `high`.

    `top` is the largest value. Goes down from it in growing steps, `unit` first, then bisects.
    """
    found = measure(values, weight, counts, top)
    if found >= limit:
        return top, INF, 0
    low, high, before = LOWEST, top, found
    step = np.float32(unit)
    for _ in range(_STEPS):
        at = max(top - step, LOWEST)
        found = measure(values, weight, counts, at)
        if found >= limit:
            low = at
            break
        high, before = at, found
        step *= np.float32(4.0)
    for _ in range(_HALVINGS):
        middle = np.float32(0.5) * low + np.float32(0.5) * high
        if not low < middle < high:
            break
        found = measure(values, weight, counts, middle)
        if found >= limit:
            low = middle
        else:
            high, before = middle, found
    return low, high, before


@jit
def prefix_end(values, ids, n, weight, counts, before, limit, spare, sums):
    """`(cut, last)` of the candidates that have less than `limit` before them in the order.

    `ids[:n]`, ascending, are the candidates; above the first of them is `before` (< limit). What
    is before a candidate is a number if `counts`, else a sum of `mass(weight[id])`. If all qualify
    the cut is -inf.
    """
    highest, lowest = 0, 0xFFFFFFFF
    for i in range(n):
        key = _key(values[ids[i]])
        highest = max(highest, key)
        lowest = min(lowest, key)
    shift = 0
    while (highest - lowest) >> shift >= _BINS:
        shift += 1
    source = ids
    while True:
        sums[:] = 0
        for i in range(n):
            token = source[i]
            bin_ = ((highest - _key(values[token])) >> shift) & (_BINS - 1)
            sums[bin_] += 1 if counts else mass(weight[token])
        end = 0
        while end < _BINS and before + sums[end] < limit:
            before += sums[end]
            end += 1
        if end == _BINS:
            return -INF, np.int64(-1)
        kept = 0
        for i in range(n):
            token = source[i]
            spare[kept] = token
            kept += ((highest - _key(values[token])) >> shift) & (_BINS - 1) == end
        source, n = spare, kept
        if shift == 0:
            break
        shift = max(shift - _BITS, 0)
    # Equal logits are left, ids ascending.
    last = np.int64(-1)
    for i in range(n):
        if before >= limit:
            break
        last = np.int64(source[i])
        before += 1 if counts else mass(weight[last])
    return values[source[0]], last


@jit
def _floor_of_top(values, k, space, worker):
    """A value that at least k of `values` reach, if so many are above -inf; not far from the k-th.

    Every value belongs to one of at least 2 k groups. The k-th largest of the groups' maxima will
    do: each of k groups has a value that reaches it.
    """
    groups = GROUP
    while groups < 2 * k:
        groups *= 2
    if 4 * groups > values.size:
        return LOWEST
    largest, ids = space.largest[worker], space.ids[worker]
    for i in range(groups):
        largest[i] = -INF
        ids[i] = i
    for first in range(0, values.size, groups):
        some = values[first : min(first + groups, values.size)]
        for i in range(some.size):
            largest[i] = some[i] if some[i] > largest[i] else largest[i]
    floor, _ = prefix_end(
        largest, ids, groups, largest, True, 0, k, space.spare[worker], space.sums[worker]
    )
    return max(floor, LOWEST)


@jit
def top_k_end(values, top, k, space, worker):
    """`(cut, last)` of the first k (>= 1) values, of which -inf are left out.

    No value is NaN; `top` is the largest of them and above -inf.
    """
    ids = space.ids[worker]
    if k <= MAX_SORTED:
        low, high, before = _floor_of_top(values, k, space, worker), INF, 0
    else:
        low, high, before = narrow(values, values, True, k, top, 1.0)
    n = candidates(values, low, high, ids)
    return prefix_end(
        values, ids, n, values, True, before, k, space.spare[worker], space.sums[worker]
    )


@jit
def top_k_sorted(logits, vocab, k, out_ids, out_logits, space, worker):
    """The first `k` tokens in (logit descending, id ascending) order; how many there are.

    `logits` is a row of at least `vocab` float32 rounded up to a multiple of 16; `out_ids` (int32)
    and `out_logits` (float32) hold k, at most MAX_SORTED. Fewer than k if the vocabulary or what
    is above -inf is smaller; none if the row holds a NaN or +inf.
    """
    top = argmax(pointer(logits, 0), vocab)
    if k < 1 or top < 0:
        return 0
    values, ids = logits[:vocab], space.ids[worker]
    cut, last = top_k_end(values, logits[top], k, space, worker)
    n = 0
    for i in range(candidates(values, max(cut, LOWEST), INF, ids)):
        token = ids[i]
        value = values[token]
        if value == cut and token > last:
            continue
        at = n
        n += 1
        while at > 0 and out_logits[at - 1] < value:
            out_logits[at] = out_logits[at - 1]
            out_ids[at] = out_ids[at - 1]
            at -= 1
        out_logits[at] = value
        out_ids[at] = token
    return n


@jit
def logsumexp(logits, vocab):
    """log(sum(exp(logits[:vocab]))) as float64, in one fixed order; NaN if the row holds a NaN or
    +inf, or nothing above -inf."""
    top = argmax(pointer(logits, 0), vocab)
    if top < 0:
        return np.nan
    return np.float64(logits[top]) + log(
        np.float64(sum_exp(pointer(logits, 0), vocab, logits[top]))
    )
