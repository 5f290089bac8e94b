"""Where the results of qkv go with attention: rotated q and k, and v. Layouts: attention.py."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels.gpu import sync
from cute_kernels.gpu.fragments import bf16_pair, put_word
from cute_kernels.gpu.tiles import Buffers


def kv_word(row, word):
    """Byte offset of 32-bit word `word` in a swizzled 128-byte row."""
    return row * 128 + (((word >> 2) ^ (row & 7)) << 4) + (word & 3) * 4


def key_word(word):
    """Where a rotary pair (word of Q's column order) lies in a K row: see `key_order`."""
    return (word & ~7) + (word & 1) * 4 + ((word >> 1) & 3)


@cute.jit
def put_qkv(k: cutlass.Constexpr, dst: Int64, row: Int32, col: Int32, v0: Float32, v1: Float32):
    """Columns col, col + 1: a rotary pair of q or k, or two dimensions of v."""
    s, b = k.c.shape, Buffers.of(k.c)
    q_cols, kv_cols = s.heads * s.head_dim, s.kv_heads * s.head_dim
    kv = dst + (b.kv - b.q)
    word = (col >> 1) & 31
    if col < q_cols + kv_cols:
        cos, sin = sync.lds_pair(k.attn_rope + (row * 32 + word) * 8)
        w0 = v0 * cos - v1 * sin
        w1 = v1 * cos + v0 * sin
        if col < q_cols:
            put_word(k, row >= 0, dst, row, col, bf16_pair(w0, w1))
        else:
            at = ((col - q_cols) >> 6) * (16 * 256) + kv_word(row, key_word(word))
            sync.st_word(kv + Int64(at), bf16_pair(w0, w1))
    else:
        at = ((col - q_cols - kv_cols) >> 6) * (16 * 256) + 16 * 128 + kv_word(row, word)
        sync.st_word(kv + Int64(at), bf16_pair(v0, v1))
