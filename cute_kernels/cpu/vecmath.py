"""Elementwise functions and reductions with one fixed arithmetic, as LLVM vector code.

Transcendental functions are our own: library ones differ between machines and between their scalar
and vector forms. Every reduction keeps 16 partial results (lane = index mod 16) and folds them in
one fixed order, so no result depends on what the compiler makes of a loop.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cute_kernels.cpu.simd import (
    F32,
    I1,
    I32,
    I64,
    LANES,
    VEC,
    call,
    fma,
    load_vector,
    loop,
    splat,
    store_vector,
)
from cute_kernels.cpu.state import PAGE
from host.jit import jit

_INT_VEC = ir.VectorType(I32, LANES)
_LOWEST, _HIGHEST = -87.3365402, 88.3762589
"""Below the first, exp is 0 (its results would be subnormal); above the second, where 2**n would
no longer be a float32, infinite."""

_LOG2_E = float(np.float32(math.log2(math.e)))
_LN2_HIGH = float(np.float32(math.log(2)))
_LN2_LOW = float(np.float32(math.log(2) - _LN2_HIGH))
_ONE = 0x3F800000  # the bits of 1.0
_ROUND = 12582912.0  # 1.5 * 2**23: adding it rounds to an integer, left in the low mantissa bits
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)


def _like(value, number):
    """The constant `number` as a scalar or vector of `value`'s type."""
    vector = isinstance(value.type, ir.VectorType)
    return ir.Constant(value.type, [number] * LANES if vector else number)


def emit_exp(builder, x, positive=True):
    """e**x of a float32 or a vector of them, within 1 ulp; NaN stays NaN.

    With `positive` false, x is known to be at most 0.
    """
    shifted = fma(builder, x, _like(x, _LOG2_E), _like(x, _ROUND))
    n = builder.fsub(shifted, _like(x, _ROUND))
    r = fma(builder, n, _like(x, -_LN2_HIGH), x)
    r = fma(builder, n, _like(x, -_LN2_LOW), r)
    poly = _like(x, _EXP[0])
    for coefficient in _EXP[1:]:
        poly = fma(builder, poly, r, _like(x, coefficient))
    poly = fma(builder, poly, builder.fmul(r, r), r)
    poly = builder.fadd(poly, _like(x, 1.0))
    bits = builder.bitcast(shifted, _INT_VEC if isinstance(x.type, ir.VectorType) else I32)
    bits = builder.add(builder.shl(bits, _like(bits, 23)), _like(bits, _ONE))
    result = builder.fmul(poly, builder.bitcast(bits, x.type))
    tiny = builder.fcmp_ordered("<", x, _like(x, _LOWEST))
    result = builder.select(tiny, _like(x, 0.0), result)
    if not positive:
        return result
    huge = builder.fcmp_ordered(">", x, _like(x, _HIGHEST))
    return builder.select(huge, _like(x, math.inf), result)


def _fold(builder, vector, combine):
    """Combine the 16 lanes of a vector in one fixed order: halves, quarters, ..."""
    width = LANES
    undefined = ir.Constant(VEC, ir.Undefined)
    while width > 1:
        width //= 2
        lanes = ir.Constant(_INT_VEC, [(i + width) % LANES for i in range(LANES)])
        vector = combine(builder, vector, builder.shuffle_vector(vector, undefined, lanes))
    return builder.extract_element(vector, ir.Constant(I32, 0))


def _add(builder, a, b):
    return builder.fadd(a, b)


def _larger(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", b, a), b, a)


def _lane_numbers(builder, start):
    """start, start + 1, ..., start + 15 as 32-bit integers; `start` is int64."""
    narrow = builder.trunc(start, I32)
    one = builder.insert_element(ir.Constant(_INT_VEC, ir.Undefined), narrow, ir.Constant(I32, 0))
    zeros = ir.Constant(_INT_VEC, [0] * LANES)
    wide = builder.shuffle_vector(one, ir.Constant(_INT_VEC, ir.Undefined), zeros)
    return builder.add(wide, ir.Constant(_INT_VEC, list(range(LANES))))


def _below(builder, numbers, count):
    """Lane mask of `numbers < count`; `count` is int64."""
    narrow = builder.trunc(count, I32)
    one = builder.insert_element(ir.Constant(_INT_VEC, ir.Undefined), narrow, ir.Constant(I32, 0))
    zeros = ir.Constant(_INT_VEC, [0] * LANES)
    limit = builder.shuffle_vector(one, ir.Constant(_INT_VEC, ir.Undefined), zeros)
    return builder.icmp_signed("<", numbers, limit)


_ZERO, _ZEROS = ir.Constant(I64, 0), ir.Constant(VEC, [0.0] * LANES)
_LOWEST_LANES = ir.Constant(VEC, [-math.inf] * LANES)


@intrinsic
def exp(typingctx, x):
    """e**x in float32, within 1 ulp; 0 where the result would be subnormal."""

    def codegen(context, builder, signature, args):
        return emit_exp(builder, context.cast(builder, args[0], signature.args[0], types.float32))

    return types.float32(x), codegen


@jit
def log(x):
    """Natural logarithm of a positive, finite, normal float64, within 1e-15 relative."""
    mantissa, exponent = math.frexp(x)
    if mantissa < 0.7071067811865476:
        mantissa *= 2.0
        exponent -= 1
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    series = 0.0
    for k in range(23, 0, -2):
        series = series * z + 1.0 / k
    return 2.0 * s * series + exponent * 0.6931471805599453


@intrinsic
def sum_squares(typingctx, ptr, count):
    """Sum of the squares of `count` floats; `count` is a multiple of 16."""

    def codegen(context, builder, signature, args):
        count = context.cast(builder, args[1], signature.args[1], types.int64)

        def body(builder, k, carried):
            value = load_vector(builder, builder.gep(args[0], [k]))
            return [fma(builder, value, value, carried[0])]

        return _fold(builder, loop(builder, _ZERO, count, LANES, [_ZEROS], body)[0], _add)

    return types.float32(ptr, count), codegen


@intrinsic
def silu_product(typingctx, pair, out):
    """`out[j] = silu(pair[j]) * pair[16 + j]` for 16 lanes."""

    def codegen(context, builder, signature, args):
        gate = load_vector(builder, args[0])
        up = load_vector(builder, builder.gep(args[0], [ir.Constant(I64, LANES)]))
        below = emit_exp(builder, builder.fneg(gate))
        swish = builder.fdiv(gate, builder.fadd(below, _like(gate, 1.0)))
        store_vector(builder, builder.fmul(swish, up), args[1])
        return context.get_dummy_value()

    return types.void(pair, out), codegen


@intrinsic
def softmax_step(typingctx, scores, keys, state):
    """Take `keys` scores into a running softmax; the factor that rescales what came before.

    `state` holds the running maximum and sum (start: -inf, 0) and is updated. `scores[:keys]`
    becomes exp(score - maximum), and zero from there to the next multiple of 16; what stood there
    takes no part.
    """

    def codegen(context, builder, signature, args):
        scores, state = args[0], args[2]
        keys = context.cast(builder, args[1], signature.args[1], types.int64)
        total_at = builder.gep(state, [ir.Constant(I64, 1)])
        old = builder.load(state)

        def maximum(builder, k, carried):
            value = load_vector(builder, builder.gep(scores, [k]))
            inside = _below(builder, _lane_numbers(builder, k), keys)
            return [_larger(builder, carried[0], builder.select(inside, value, _LOWEST_LANES))]

        lanes = loop(builder, _ZERO, keys, LANES, [_LOWEST_LANES], maximum)[0]
        new = _larger(builder, old, _fold(builder, lanes, _larger))
        wide = splat(builder, new)

        def exponentials(builder, k, carried):
            at = builder.gep(scores, [k])
            inside = _below(builder, _lane_numbers(builder, k), keys)
            value = builder.fsub(load_vector(builder, at), wide)
            value = builder.select(inside, emit_exp(builder, value, positive=False), _ZEROS)
            store_vector(builder, value, at)
            return [builder.fadd(carried[0], value)]

        lanes = loop(builder, _ZERO, keys, LANES, [_ZEROS], exponentials)[0]
        factor = emit_exp(builder, builder.fsub(old, new), positive=False)
        total = fma(builder, builder.load(total_at), factor, _fold(builder, lanes, _add))
        builder.store(new, state)
        builder.store(total, total_at)
        return factor

    return types.float32(scores, keys, state), codegen


@intrinsic
def softmax_page(typingctx, scores, rows, states, sums, size):
    """`softmax_step` for `rows` rows of 64 scores each, which also rescales `sums[rows, size]`.

    Two passes, so that rows overlap: each has long chains of dependent instructions.
    """

    def codegen(context, builder, signature, args):
        scores, states, sums = args[0], args[2], args[3]
        rows = context.cast(builder, args[1], signature.args[1], types.int64)
        size = context.cast(builder, args[4], signature.args[4], types.int64)
        vectors = PAGE // LANES

        def places(builder, row):
            first = builder.gep(scores, [builder.mul(row, ir.Constant(I64, PAGE))])
            at = [builder.gep(first, [ir.Constant(I64, LANES * i)]) for i in range(vectors)]
            state = builder.gep(states, [builder.mul(row, ir.Constant(I64, 2))])
            return at, state, builder.gep(state, [ir.Constant(I64, 1)])

        def rescale(builder, row, carried):
            at, state, total_at = places(builder, row)
            lanes = load_vector(builder, at[0])
            for place in at[1:]:
                lanes = _larger(builder, lanes, load_vector(builder, place))
            old = builder.load(state)
            new = _larger(builder, old, _fold(builder, lanes, _larger))
            factor = emit_exp(builder, builder.fsub(old, new), positive=False)
            builder.store(new, state)
            builder.store(builder.fmul(builder.load(total_at), factor), total_at)
            changed = builder.fcmp_unordered("!=", factor, ir.Constant(F32, 1.0))
            with builder.if_then(changed):
                wide = splat(builder, factor)
                first = builder.gep(sums, [builder.mul(row, size)])

                def multiply(builder, d, carried):
                    place = builder.gep(first, [d])
                    store_vector(builder, builder.fmul(load_vector(builder, place), wide), place)
                    return []

                loop(builder, _ZERO, size, LANES, [], multiply)
            return []

        def exponentials(builder, row, carried):
            at, state, total_at = places(builder, row)
            new = splat(builder, builder.load(state))
            lanes = None
            for place in at:
                value = builder.fsub(load_vector(builder, place), new)
                value = emit_exp(builder, value, positive=False)
                store_vector(builder, value, place)
                lanes = value if lanes is None else builder.fadd(lanes, value)
            total = builder.fadd(builder.load(total_at), _fold(builder, lanes, _add))
            builder.store(total, total_at)
            return []

        loop(builder, _ZERO, rows, 1, [], rescale)
        loop(builder, _ZERO, rows, 1, [], exponentials)
        return context.get_dummy_value()

    return types.void(scores, rows, states, sums, size), codegen


@intrinsic
def merge_parts(typingctx, totals, total, states, values, rows, size, is_first):
    """Add `rows` parts (maximum and sum in `states`, weighted `values[rows, size]`) to totals.

    The totals have the same form. With `is_first` they are taken over as they are.
    """

    def codegen(context, builder, signature, args):
        rows = context.cast(builder, args[4], signature.args[4], types.int64)
        size = context.cast(builder, args[5], signature.args[5], types.int64)
        first = context.cast(builder, args[6], signature.args[6], types.boolean)
        one = ir.Constant(I64, 1)

        def row(builder, r, carried):
            twice = builder.mul(r, ir.Constant(I64, 2))
            into, state = (builder.gep(args[i], [twice]) for i in (0, 2))
            into_sum, state_sum = (builder.gep(at, [one]) for at in (into, state))
            old, new = builder.load(into), builder.load(state)
            top = builder.select(first, new, _larger(builder, old, new))
            # A first part counts in full and what the totals held not at all, were it NaN.
            keep = emit_exp(builder, builder.fsub(old, top), positive=False)
            take = emit_exp(builder, builder.fsub(new, top), positive=False)
            take = builder.select(first, ir.Constant(F32, 1.0), take)
            builder.store(top, into)
            none = ir.Constant(F32, 0.0)
            held = builder.select(first, none, builder.fmul(builder.load(into_sum), keep))
            builder.store(fma(builder, builder.load(state_sum), take, held), into_sum)
            keeps, takes = splat(builder, keep), splat(builder, take)
            base = builder.mul(r, size)
            to, of = (builder.gep(args[i], [base]) for i in (1, 3))

            def columns(builder, d, carried):
                place = builder.gep(to, [d])
                held = builder.fmul(load_vector(builder, place), keeps)
                held = builder.select(first, _ZEROS, held)
                value = load_vector(builder, builder.gep(of, [d]))
                store_vector(builder, fma(builder, value, takes, held), place)
                return []

            loop(builder, _ZERO, size, LANES, [], columns)
            return []

        loop(builder, _ZERO, rows, 1, [], row)
        return context.get_dummy_value()

    return types.void(totals, total, states, values, rows, size, is_first), codegen


@intrinsic
def argmax(typingctx, values, count):
    """Index of the largest of `count` floats, the lowest of equals; -1 if there is none to take.

    None to take: a NaN or +inf anywhere, or nothing but -inf. Reads up to a multiple of 16.
    """

    def codegen(context, builder, signature, args):
        count = context.cast(builder, args[1], signature.args[1], types.int64)
        flags = ir.VectorType(I1, LANES)
        top = ir.Constant(VEC, [float(np.finfo(np.float32).max)] * LANES)

        def body(builder, k, carried):
            best, where, bad = carried
            number = _lane_numbers(builder, k)
            value = load_vector(builder, builder.gep(args[0], [k]))
            value = builder.select(_below(builder, number, count), value, _LOWEST_LANES)
            bad = builder.or_(bad, builder.fcmp_unordered(">", value, top))
            better = builder.fcmp_ordered(">", value, best)
            return [
                builder.select(better, value, best),
                builder.select(better, number, where),
                bad,
            ]

        start = [_LOWEST_LANES, ir.Constant(_INT_VEC, [0] * LANES), ir.Constant(flags, [0] * LANES)]
        best, where, bad = loop(builder, _ZERO, count, LANES, start, body)
        value, index = None, None
        for lane in range(LANES):
            v = builder.extract_element(best, ir.Constant(I32, lane))
            i = builder.extract_element(where, ir.Constant(I32, lane))
            if value is None:
                value, index = v, i
                continue
            equal = builder.and_(
                builder.fcmp_ordered("==", v, value), builder.icmp_signed("<", i, index)
            )
            take = builder.or_(builder.fcmp_ordered(">", v, value), equal)
            value, index = builder.select(take, v, value), builder.select(take, i, index)
        wrong = call(builder, "llvm.vector.reduce.or.v16i1", I1, bad)
        none = builder.fcmp_ordered("==", value, ir.Constant(F32, -math.inf))
        index = builder.select(builder.or_(wrong, none), ir.Constant(I32, -1), index)
        return builder.sext(index, I64)

    return types.int64(values, count), codegen


@intrinsic
def sum_exp(typingctx, values, count, shift):
    """Sum of exp(value - shift) over `count` floats. Reads up to a multiple of 16."""

    def codegen(context, builder, signature, args):
        count = context.cast(builder, args[1], signature.args[1], types.int64)
        shift = splat(builder, context.cast(builder, args[2], signature.args[2], types.float32))

        def body(builder, k, carried):
            value = load_vector(builder, builder.gep(args[0], [k]))
            value = emit_exp(builder, builder.fsub(value, shift))
            inside = _below(builder, _lane_numbers(builder, k), count)
            return [builder.fadd(carried[0], builder.select(inside, value, _ZEROS))]

        return _fold(builder, loop(builder, _ZERO, count, LANES, [_ZEROS], body)[0], _add)

    return types.float32(values, count, shift), codegen
