"""Arithmetic of the decision, operation by operation that of the CPU device.

Every step here is an IEEE operation with its own rounding (`.rn` is never fused by the assembler),
in the order of cute_kernels/cpu (vecmath.emit_exp, vecmath.log, topk.mass, noise, sampling._race).
So from the same logits both devices keep the same tokens and choose the same one, bit for bit.
Not for streams of weights: slower than the approximate instructions.

Noise: Philox-4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3;
SC 2011). Key: the seed. The number of token `id` at a position is word id % 4 of the block with the
counter (id // 4, position, 0, 0); a position has 31 bits here.
"""

import math
import struct

import numpy as np
from cutlass import Float32, Float64, Int32, Int64, Uint32

from cute_kernels.gpu.sync import ptx_read

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LN2 = math.log(2)
_LN2_HIGH = float(np.float32(_LN2))
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
_TINY = -87.3365402  # below it exp is 0: results would be subnormal
_HIGHEST = float(np.finfo(np.float32).max)
_NUMBERS = 2.0**32  # of 32 bits


def f32(value):
    """An immediate of PTX, rounded to fp32."""
    return "0f" + struct.pack(">f", np.float32(value)).hex().upper()


def f64(value):
    return "0d" + struct.pack(">d", value).hex().upper()


# -- fp32: weights -------------------------------------------------------------------------------
def _exp_text(scale):
    """p = e**x 2^scale (exactly, by the exponent), e**x within 1 ulp, for _TINY <= x <= 0."""
    poly = f"mov.f32 p, {f32(_EXP[0])}; "
    for c in _EXP[1:]:
        poly += f"fma.rn.f32 p, p, r, {f32(c)}; "
    return (
        "{ .reg .f32 s, n, r, p, q; .reg .b32 b; "
        f"fma.rn.f32 s, {{$r0}}, {f32(math.log2(math.e))}, {f32(12582912.0)}; "
        f"sub.rn.f32 n, s, {f32(12582912.0)}; "
        f"fma.rn.f32 r, n, {f32(-_LN2_HIGH)}, {{$r0}}; "
        f"fma.rn.f32 r, n, {f32(-(_LN2 - _LN2_HIGH))}, r; "
        + poly
        + "mul.rn.f32 q, r, r; fma.rn.f32 p, p, q, r; "
        f"add.rn.f32 p, p, {f32(1.0)}; "
        f"mov.b32 b, s; shl.b32 b, b, 23; add.s32 b, b, {0x3F800000 + (scale << 23)}; "
        "mov.b32 q, b; mul.rn.f32 p, p, q; "
    )


_MASS_TEXT = _exp_text(44) + "cvt.rzi.s64.f32 {$w0}, p; }"


def minus(a, b):
    return ptx_read("sub.rn.f32 {$w0}, {$r0}, {$r1};", [Float32], a, b)


def plus(a, b):
    return ptx_read("add.rn.f32 {$w0}, {$r0}, {$r1};", [Float32], a, b)


def times(a, b):
    return ptx_read("mul.rn.f32 {$w0}, {$r0}, {$r1};", [Float32], a, b)


def mass(value, largest, inverse):
    """The weight as an integer number of 2^-44, rounded down."""
    x = times(minus(value, largest), inverse)
    x = ptx_read(f"max.f32 {{$w0}}, {{$r0}}, {f32(_TINY)};", [Float32], x)  # no mass either way
    return ptx_read(_MASS_TEXT, [Int64], x)


def whole(x):
    """Rounded towards zero, as 64 bits."""
    return ptx_read("cvt.rzi.s64.f32 {$w0}, {$r0};", [Int64], x)


# -- fp64: scores, by few threads ----------------------------------------------------------------
def _log_text(x, out):
    """ln of a positive, finite, normal fp64: registers `x` -> `out` (of the surrounding block)."""
    series = f"mov.f64 u, {f64(1.0 / 23)}; "
    for n in range(21, 0, -2):
        series += f"mul.rn.f64 u, u, z; add.rn.f64 u, u, {f64(1.0 / n)}; "
    return (
        "{ .reg .f64 m, a, b, s, z, u; .reg .b32 lo, hi, e; .reg .pred t; "
        f"mov.b64 {{lo, hi}}, {x}; shr.u32 e, hi, 20; sub.s32 e, e, 1022; "
        "and.b32 hi, hi, 0x000fffff; or.b32 hi, hi, 0x3fe00000; mov.b64 m, {lo, hi}; "
        f"setp.lt.f64 t, m, {f64(0.7071067811865476)}; "
        f"@t mul.rn.f64 m, m, {f64(2.0)}; @t sub.s32 e, e, 1; "
        f"add.rn.f64 a, m, {f64(-1.0)}; add.rn.f64 b, m, {f64(1.0)}; div.rn.f64 s, a, b; "
        "mul.rn.f64 z, s, s; " + series + f"mul.rn.f64 s, s, {f64(2.0)}; mul.rn.f64 s, s, u; "
        f"cvt.rn.f64.s32 a, e; mul.rn.f64 a, a, {f64(0.6931471805599453)}; "
        f"add.rn.f64 {out}, s, a; }} "
    )


_SCORE_TEXT = (
    "{ .reg .f64 w, l, d, y; "
    f"cvt.rn.f64.u32 w, {{$r3}}; add.rn.f64 w, w, {f64(0.5)}; "
    f"mov.f64 l, {f64(_NUMBERS)}; sub.rn.f64 w, l, w; mul.rn.f64 w, w, {f64(1 / _NUMBERS)}; "
    + _log_text("w", "l") + "neg.f64 l, l; " + _log_text("l", "w")
    + "cvt.f64.f32 d, {$r0}; cvt.f64.f32 y, {$r1}; sub.rn.f64 d, d, y; "
    "cvt.f64.f32 y, {$r2}; div.rn.f64 d, d, y; sub.rn.f64 {$w0}, d, w; }"
)  # fmt: skip


def score(value, largest, temperature, number):
    """(value - largest) / temperature - log E, fp64, E = -log(1 - w), w = (number + 1/2) 2^-32."""
    return ptx_read(_SCORE_TEXT, [Float64], value, largest, temperature, Uint32(number))


def inverse_temperature(temperature):
    """1 / temperature in fp32, at most the largest finite number."""
    code = (
        "{ .reg .f64 t; cvt.f64.f32 t, {$r0}; "
        f"rcp.rn.f64 t, t; min.f64 t, t, {f64(_HIGHEST)}; cvt.rn.f32.f64 {{$w0}}, t; }}"
    )
    return ptx_read(code, [Float32], temperature)


def min_p_cut(largest, temperature, min_p):
    """(value, 1 or 0): tokens above the value stay, those equal to it if the second is 1."""
    code = (
        "{ .reg .f64 x, y, z; .reg .pred q; cvt.f64.f32 x, {$r2}; " + _log_text("x", "y")
        + "cvt.f64.f32 x, {$r1}; mul.rn.f64 y, x, y; cvt.f64.f32 x, {$r0}; add.rn.f64 x, x, y; "
        "cvt.rn.f32.f64 {$w0}, x; cvt.f64.f32 z, {$w0}; setp.ge.f64 q, z, x; "
        "selp.b32 {$w1}, 1, 0, q; }"
    )  # fmt: skip
    return ptx_read(code, [Float32, Int32], largest, temperature, min_p)


def mass_limit(top_p, total):
    """A token stays under top-p if the mass before it is below this: at least 1."""
    code = (
        "{ .reg .f64 p, t; cvt.f64.f32 p, {$r0}; cvt.rn.f64.s64 t, {$r1}; mul.rn.f64 p, p, t; "
        "cvt.rpi.s64.f64 {$w0}, p; max.s64 {$w0}, {$w0}, 1; }"
    )
    return ptx_read(code, [Int64], top_p, total)


# -- noise ---------------------------------------------------------------------------------------
def _philox_text():
    lines = [
        "{ .reg .b32 a, b, c, d, h; mov.b32 a, {$r0}; mov.b32 b, {$r1}; ",
        "mov.b32 c, 0; mov.b32 d, 0; ",
    ]
    m0, m1 = (f"0x{m:08x}" for m in _MULTIPLIERS)
    for i in range(_ROUNDS):
        k, m = (f"{{$r{2 + 2 * i + j}}}" for j in range(2))
        # (a, b, c, d) <- (hi(c m1) ^ b ^ k, lo(c m1), hi(a m0) ^ d ^ l, lo(a m0))
        lines.append(
            f"mul.hi.u32 h, c, {m1}; xor.b32 b, b, h; xor.b32 b, b, {k}; mul.lo.u32 c, c, {m1}; "
            f"mul.hi.u32 h, a, {m0}; xor.b32 d, d, h; xor.b32 d, d, {m}; mul.lo.u32 h, a, {m0}; "
            "mov.b32 a, b; mov.b32 b, c; mov.b32 c, d; mov.b32 d, h; "
        )
    lines.append("mov.b32 {$w0}, a; mov.b32 {$w1}, b; mov.b32 {$w2}, c; mov.b32 {$w3}, d; }")
    return "".join(lines)


_PHILOX_TEXT = _philox_text()


def round_keys(low, high):
    """The keys of all rounds, of a seed's two words: made once, outside of loops."""
    steps = [[s * i & 0xFFFFFFFF for s in _KEY_STEPS] for i in range(_ROUNDS)]
    return [word + Uint32(step) for pair in steps for word, step in zip((low, high), pair)]


def numbers(block, position, keys):
    """The 32-bit numbers of tokens 4 block .. 4 block + 3; keys: `round_keys` of the seed."""
    args = (Uint32(block), Uint32(position), *keys)
    return ptx_read(_PHILOX_TEXT, [Uint32] * 4, *args)
