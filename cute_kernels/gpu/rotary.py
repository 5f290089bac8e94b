"""Heads of q and k on their way from the raw columns of qkv into attention: RMSNorm, rotation.

A *head row* is what a quad of lanes holds of one row and head: d/32 vectors of 4 words a lane, a
word being a rotary pair (kv_layout.rotary_order). Arithmetic is fp32 on the bf16 columns, rounded
to bf16 once at the end. Its instructions are fixed, not left to contraction, so that whoever makes
a key (a decode row, a prompt row, a reference) makes the same bits.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels.gpu import sync
from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.core import arg
from cute_kernels.gpu.fragments import bf16_pair, unpack_pair
from cute_kernels.gpu.sync import ptx_read


def turn(lo, hi, cos, sin):
    """(lo cos - hi sin, hi cos + lo sin): the product with sin is rounded, then added fused."""
    return ptx_read(
        "{ .reg .f32 p, q; mul.rn.f32 p, {$r1}, {$r3}; neg.f32 p, p; mul.rn.f32 q, {$r0}, {$r3};"
        " fma.rn.f32 {$w0}, {$r0}, {$r2}, p; fma.rn.f32 {$w1}, {$r1}, {$r2}, q; }",
        [Float32] * 2,
        lo,
        hi,
        cos,
        sin,
    )


def scaled(value, factor, weight):
    """(value factor) weight, two roundings."""
    return ptx_read(
        "{ .reg .f32 p; mul.rn.f32 p, {$r0}, {$r1}; mul.rn.f32 {$w0}, p, {$r2}; }",
        [Float32],
        value,
        factor,
        weight,
    )


def head_weights(k, at):
    """This lane's weights of a head's RMSNorm, fp32 [head_dim] at an address, as (lo, hi) per word.
    Loads: ask early."""
    d, out = k.c.shape.head_dim, []
    at = at + Int64((k.lane & 3) * 8)
    for eight in range(d // 16):
        code = "ld.global.nc.v2.f32 {{$w0},{$w1}}, [{$r0}];"
        low = ptx_read(code, [Float32] * 2, at + eight * 32)
        high = ptx_read(code, [Float32] * 2, at + eight * 32 + d * 2)
        out += zip(low, high, strict=True)
    return out


def norm_weights(k, layer, which, table=Arg.QK_NORM, normed=None):
    """`head_weights` of q (which = 0) or k (1) in a layer; None where the model has none. normed:
    whether it has; None: as the shape says."""
    s = k.c.shape
    if not (s.qk_norm if normed is None else normed):
        return None
    return head_weights(k, arg(k, table) + Int64((layer * 2 + which) * (s.head_dim * 4)))


def head_factor(pairs, d, eps):
    """1 / RMS of a head row. The quad's lanes add their squares in one order."""
    sums = [Float32(0.0)] * 4
    for i, (lo, hi) in enumerate(pairs):
        sums[i % 4] = ptx_read(
            "{ .reg .f32 p; fma.rn.f32 p, {$r0}, {$r0}, {$r2};"
            " fma.rn.f32 {$w0}, {$r1}, {$r1}, p; }",
            [Float32],
            lo,
            hi,
            sums[i % 4],
        )
    total = (sums[0] + sums[1]) + (sums[2] + sums[3])
    total = total + cute.arch.shuffle_sync_bfly(total, offset=1)
    total = total + cute.arch.shuffle_sync_bfly(total, offset=2)
    mean = ptx_read(
        f"fma.rn.f32 {{$w0}}, {{$r0}}, {1.0 / d!r}, {{$r1}};", [Float32], total, Float32(eps)
    )
    return ptx_read("rsqrt.approx.ftz.f32 {$w0}, {$r0};", [Float32], mean)


def rotate_head(k, words, at, rope, weights):
    """Head row words[at ...] in place: RMSNorm where `weights` is not None, rotation, bf16.

    rope: shared address of the row's rotary factors, fp32 (cos, sin) of every pair."""
    d = k.c.shape.head_dim
    pairs = [tuple(unpack_pair(words[at + i])) for i in range(d // 8)]
    if weights is not None:
        f = head_factor(pairs, d, k.c.shape.rms_eps)
        pairs = [
            (scaled(lo, f, a), scaled(hi, f, b))
            for (lo, hi), (a, b) in zip(pairs, weights, strict=True)
        ]
    rope = rope + (k.lane & 3) * 16
    for eight in range(d // 16):
        factors = sync.lds_quad(rope + eight * 64)
        for e in range(2):
            i = eight * 2 + e
            words[at + i] = bf16_pair(*turn(*pairs[i], factors[2 * e], factors[2 * e + 1]))


@cute.jit
def load_rope(k: cutlass.Constexpr, p: cutlass.Constexpr, position: Int32, to: Int32, lane: Int32,
              lanes: cutlass.Constexpr):  # fmt: skip
    """`lanes` threads copy the rotary factors of a position to shared address `to`. p.rope_table:
    the entry of the argument table."""
    n_bytes = k.c.shape.head_dim * 4
    src = arg(k, p.rope_table) + Int64(position) * n_bytes
    i = lane * 16
    while i < n_bytes:
        words = ptx_read(
            "ld.global.nc.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];",
            [cutlass.Uint32] * 4,
            src + Int64(i),
        )
        sync.sts_words(to + i, words)
        i = i + lanes * 16
