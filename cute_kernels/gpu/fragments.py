"""MMA operands in registers, and words of activations in memory in the same order."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.config import CHUNK_BYTES
from cute_kernels.gpu.sync import ptx_read


def mma(d, a, b):
    return ptx_read(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{{$w0},{$w1},{$w2},{$w3}}, {{$r0},{$r1},{$r2},{$r3}}, {{$r4},{$r5}},"
        " {{$r6},{$r7},{$r8},{$r9}};",
        [Float32] * 4,
        *a,
        *b,
        *d,
    )


def bf16_pair(lo, hi):
    return ptx_read("cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};", [Uint32], hi, lo)


def unpack_pair(word):
    return ptx_read(
        "{ shl.b32 {$w0}, {$r0}, 16; and.b32 {$w1}, {$r0}, 0xffff0000; }", [Float32] * 2, word
    )


def exp2(x):
    """One instruction; `cute.math.exp2` scales denormals around it."""
    return ptx_read("ex2.approx.ftz.f32 {$w0}, {$r0};", [Float32], x)


def constant(v):  # mma takes no immediates
    return ptx_read(f"mov.b32 {{$w0}}, {v};", [Uint32])


def bf16_product(a, b):
    """Pairs of bf16, each product rounded once."""
    return ptx_read("mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", [Uint32], a, b)


def word_at(row, col, chunk_bytes=CHUNK_BYTES):
    """Byte offset of columns col, col + 1 (col even) of a row in a buffer of activations; see
    pack.py. chunk_bytes: 512 a block of 8 rows."""
    lane = (row & 7) * 4 + ((col >> 2) & 3)
    word = ((col >> 4) & 1) * 2 + ((col >> 1) & 1)
    return (col >> 5) * chunk_bytes + (row >> 3) * 512 + lane * 16 + word * 4


@cute.jit
def put_word(ok, base: Int64, row: Int32, col: Int32, value: Uint32,
             chunk_bytes: cutlass.Constexpr = CHUNK_BYTES):  # fmt: skip
    """Publish columns col, col + 1 of a row of a buffer of activations."""
    if ok:
        sync.st_word(base + Int64(word_at(row, col, chunk_bytes)), value)
