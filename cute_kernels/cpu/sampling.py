"""The decision: from one row of target logits to one token.

Order of the pipeline: bias, temperature, top-k, top-p, min-p. Each filter keeps a prefix of the
tokens in (logit descending, id ascending) order, so what is left is a prefix too. Of these the
token with the smallest E / p is chosen, E the token's exponential noise at this position: that is
token i with probability p_i, and the same token wherever and with whatever else it is computed.

Noise has 32 bits: a token less than 5e-12 times as likely as the likeliest one is never chosen.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cute_kernels.cpu.noise import GROUP, exponential, noise_of_group
from cute_kernels.cpu.simd import (
    I32,
    I64,
    LANES,
    VEC,
    load_vector,
    loop,
    pointer,
    splat,
    store_vector,
)
from cute_kernels.cpu.topk import (
    INF,
    LOWEST,
    candidates,
    lane_bits,
    lanes_at_least,
    lowest_bit,
    measure,
    narrow,
    prefix_end,
    top_k_end,
    top_k_sorted,
)
from cute_kernels.cpu.vecmath import argmax, emit_exp, exp, log, sum_exp
from host.jit import jit

_HIGHEST = float(np.finfo(np.float32).max)
_NAN = np.float32(np.nan)
_FEW = 1024
"""Candidates that are better sorted out one by one than by passes over the row."""

_SLACK = 1e-3
"""More than float32 weights are off by, relatively: bounds that are widened by it are safe."""


@intrinsic
def softmax_weights(typingctx, values, count, largest, inverse, out):
    """`out[i] = exp((values[i] - largest) * inverse)`, 16 at a time.

    Reads and writes up to a multiple of 16; what lies beyond `count` has no meaning.
    """

    def codegen(context, builder, signature, args):
        count = context.cast(builder, args[1], signature.args[1], types.int64)
        largest = splat(builder, context.cast(builder, args[2], signature.args[2], types.float32))
        inverse = splat(builder, context.cast(builder, args[3], signature.args[3], types.float32))

        def body(builder, k, carried):
            value = load_vector(builder, builder.gep(args[0], [k]))
            value = builder.fmul(builder.fsub(value, largest), inverse)
            store_vector(builder, emit_exp(builder, value), builder.gep(args[4], [k]))
            return []

        loop(builder, I64(0), count, LANES, [], body)
        return context.get_dummy_value()

    return types.void(values, count, largest, inverse, out), codegen


@intrinsic
def _lanes_in_reach(typingctx, noise, weight, reach):
    """Bit i is set if `noise[i] < reach * weight[i]`, for 16 tokens."""

    def codegen(context, builder, signature, args):
        words = builder.load(
            builder.bitcast(args[0], ir.VectorType(I32, LANES).as_pointer()), align=4
        )
        reach = splat(builder, context.cast(builder, args[2], signature.args[2], types.float32))
        limit = builder.fmul(load_vector(builder, args[1]), reach)
        return lane_bits(builder, builder.fcmp_ordered("<", builder.uitofp(words, VEC), limit))

    return types.int64(noise, weight, reach), codegen


@jit
def _add_bias(logits, vocab, sampling, out):
    for i in range(vocab):
        out[i] = logits[i]
    for i in range(sampling.bias_count):
        token = sampling.bias_ids[i]
        if 0 <= token < vocab:
            out[token] += sampling.bias[i]


@jit
def _remove(z, weight, cut, last):
    """Weight 0 for what is outside a prefix."""
    if cut > -INF:
        for i in range(z.size):
            weight[i] = weight[i] if z[i] >= cut else np.float32(0.0)
        ties, weights = z[last + 1 :], weight[last + 1 :]
        for i in range(ties.size):
            weights[i] = np.float32(0.0) if ties[i] == cut else weights[i]


@jit
def _top_p_end(z, weight, largest, floor, sampling, space, worker):
    """`(cut, last)` of top-p; what has weight is at or above `floor`.

    A token stays if the mass before it is below top_p times all mass, so at least the first does.
    """
    total = measure(z, weight, False, -INF)
    limit = max(np.int64(math.ceil(np.float64(sampling.top_p) * np.float64(total))), 1)
    ids = space.ids[worker]
    low, high, before = max(floor, LOWEST), INF, 0
    if sampling.top_k <= 0 or sampling.top_k > _FEW:
        low, high, before = narrow(z, weight, False, limit, largest, sampling.temperature)
    n = candidates(z, low, high, ids)
    return prefix_end(
        z, ids, n, weight, False, before, limit, space.spare[worker], space.sums[worker]
    )


@jit
def _filter(z, largest, sampling, space, worker):
    """Set the weights of what top-k, top-p and min-p remove to 0; `z` is the row as it is."""
    weight = space.weight[worker]
    cut = -INF
    if 0 < sampling.top_k < z.size:
        cut, last = top_k_end(z, largest, np.int64(sampling.top_k), space, worker)
        _remove(z, weight, cut, last)
    if sampling.top_p < np.float32(1.0):
        cut, last = _top_p_end(z, weight, largest, cut, sampling, space, worker)
        _remove(z, weight, cut, last)
    if sampling.min_p > np.float32(0.0):
        exact = np.float64(largest)
        exact += np.float64(sampling.temperature) * log(np.float64(sampling.min_p))
        cut = np.float32(exact)
        last = np.int64(z.size - 1 if np.float64(cut) >= exact else -1)
        _remove(z, weight, cut, last)


@jit
def _reach(score):
    """A token of weight w can only beat `score` if its 32-bit number is below w times this."""
    return exp(np.float32(-score)) * np.float32((1.0 + _SLACK) * 2.0**32)


@jit
def _race(z, top, sampling, position, space, worker):
    """The kept token with the smallest E / p, the lowest id of equals.

    Compared as z / temperature - log E in float64. That is computed for few tokens: E is at least
    its uniform number, so a token whose number is not below (smallest E / p so far) * p has lost.
    The likeliest token goes first; then about log(1 + tokens) of them are computed at most, on
    average, for any distribution. Groups in which even a number of 0 would lose get no noise.
    """
    weight, noise = space.weight[worker], space.noise[worker]
    seed, largest = sampling.seed, np.float64(z[top])
    temperature = np.float64(sampling.temperature)
    noise_of_group(seed, position, top // GROUP, noise)
    winner, best = top, -log(exponential(noise[top % GROUP]))
    reach = _reach(best)
    for first in range(0, z.size, GROUP):
        hopeless = np.float32(0.5) / reach
        near = 0
        for i in range(first, first + GROUP, LANES):
            near |= lanes_at_least(pointer(weight, i), hopeless)
        if near == 0:
            continue
        noise_of_group(seed, position, first // GROUP, noise)
        for i in range(0, GROUP, LANES):
            lanes = _lanes_in_reach(pointer(noise, i), pointer(weight, first + i), reach)
            while lanes:
                token = first + i + lowest_bit(lanes)
                lanes &= lanes - 1
                score = (np.float64(z[token]) - largest) / temperature
                score -= log(exponential(noise[token - first]))
                if score > best or (score == best and token < winner):
                    winner, best = token, score
                    reach = _reach(best)
    return winner


@jit
def _draw(z, top, sampling, position, space, worker):
    """One token of the row `z`, whose largest value is `z[top]`, at a temperature above 0."""
    weight = space.weight[worker]
    inverse = np.float32(min(1.0 / np.float64(sampling.temperature), _HIGHEST))
    softmax_weights(pointer(z, 0), z.size, z[top], inverse, pointer(weight, 0))
    for i in range(z.size, (z.size + GROUP - 1) // GROUP * GROUP):
        weight[i] = np.float32(0.0)
    _filter(z, z[top], sampling, space, worker)
    return _race(z, top, sampling, position, space, worker)


@jit
def _log_probability(value, largest, log_total):
    return np.float32(-(log_total + (np.float64(largest) - np.float64(value))))


@jit
def decide(logits, vocab, sampling, position, space, worker):
    """The token that follows a row of logits, and its log-probability: `(int64, float32)`.

    `logits` is a row of at least `vocab` float32 rounded up to a multiple of 16; `sampling` a
    record of `host.wire.SAMPLING`; `position` the absolute position the token will have; `space` a
    `Workspace` of which row `worker` is used. The log-probability is that of the raw logits, before
    bias and temperature. Token -1, log-probability NaN: there is a NaN or +inf among the logits, or
    nothing is left above -inf.
    """
    top = argmax(pointer(logits, 0), vocab)
    if top < 0:
        return top, _NAN
    log_total = log(np.float64(sum_exp(pointer(logits, 0), vocab, logits[top])))
    z, token = logits, top
    if sampling.bias_count > 0:
        z = space.biased[worker]
        _add_bias(logits, vocab, sampling, z)
        token = argmax(pointer(z, 0), vocab)
        if token < 0:
            return token, _NAN
    if sampling.temperature > np.float32(0.0):
        token = _draw(z[:vocab], token, sampling, position, space, worker)
    return token, _log_probability(logits[token], logits[top], log_total)


@jit
def alternatives(logits, vocab, count, out_ids, out_logprobs, space, worker):
    """The `count` likeliest tokens of the raw logits and their log-probabilities; how many.

    Ordered by (logit descending, id ascending); arguments and result as in `top_k_sorted`.
    """
    values = space.top[worker]
    n = top_k_sorted(logits, vocab, count, out_ids, values, space, worker)
    if n == 0:
        return n
    log_total = log(np.float64(sum_exp(pointer(logits, 0), vocab, values[0])))
    for i in range(n):
        out_logprobs[i] = _log_probability(values[i], values[0], log_total)
    return n
