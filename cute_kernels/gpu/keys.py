"""Raw columns of keys and values -> normalised, rotated, in the KV pages. The row form's part.

Whoever makes a key makes the same bits: the arithmetic is that of rotary.py.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels.gpu import sync
from cute_kernels.gpu.config import CHUNK
from cute_kernels.gpu.fragments import bf16_pair, unpack_pair
from cute_kernels.gpu.kv_layout import PAGE
from cute_kernels.gpu.pages import block_at, page_of
from cute_kernels.gpu.rotary import head_factor, head_weights, scaled, turn
from cute_kernels.gpu.sync import ptx_read


class Keys:
    """Trace-time: where raw columns of some layers lie, and where their keys and values go.

    source: Int64, bf16 columns in the order of pack.py; chunk_bytes: of 32 of them, 512 a block of
    8 rows; column: the first K head's of the first layer. A layer's K heads, then its V heads.
    position: Int32. Row i is stored at position + i; its K is rotated for the int32 at turned +
    turned_stride i, or for position + i where turned is 0 (None: always).
    pool: Int64, [pages, pool_layers, kv heads] blocks. rope: Int64.
    norms: Int64, fp32 [layer, 2 (q, k), head_dim], or None where the model has no such norm;
    with `optional` it may be 0 at run time, which says the same.
    """

    source: Int64
    chunk_bytes: int
    column: int
    position: Int32
    turned: Int64 | None = None
    turned_stride: int = 4
    pool: Int64
    pool_layers: Int32
    rope: Int64
    norms: Int64 | None = None
    optional: bool = False


# -- heads: from raw columns to normalised and rotated ones --------------------------------------
def load_words(at):
    """Of activations, behind a grid barrier."""
    code = "ld.global.L1::no_allocate.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];"
    return ptx_read(code, [cutlass.Uint32] * 4, at)


def load_floats(at):
    code = "ld.global.nc.v4.f32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];"
    return ptx_read(code, [Float32] * 4, at)


def head_vectors(k, base, col, block, chunk_bytes):
    """This lane's words of row 8 block + g of a head whose first column is `col` (a multiple of
    32): [32 columns][4]."""
    first = base + Int64((col >> 5) * chunk_bytes + block * 512 + k.lane * 16)
    return [load_words(first + i * chunk_bytes) for i in range(k.c.shape.head_dim // CHUNK)]


def rotated(k, rope, vectors, position, weights, normed=None):
    """The head normalised (weights: rotary.norm_weights; normed: only where true) and rotated, as
    bf16 words in the same places."""
    d, t = k.c.shape.head_dim, k.lane & 3
    pairs = [tuple(unpack_pair(word)) for vector in vectors for word in vector]
    if weights is not None:
        f = head_factor(pairs, d, k.c.shape.rms_eps)
        if normed is not None:  # x 1 1 is x
            f = sync.choose(normed, f, 1.0)
            weights = [[sync.choose(normed, w, 1.0) for w in pair] for pair in weights]
        pairs = [
            (scaled(lo, f, a), scaled(hi, f, b))
            for (lo, hi), (a, b) in zip(pairs, weights, strict=True)
        ]
    angles = rope + Int64(position) * (d * 4) + Int64(t * 16)
    words = []
    for eight in range(d // 16):
        cos_sin = load_floats(angles + eight * 64)
        for e in range(2):
            turned = turn(*pairs[2 * eight + e], cos_sin[2 * e], cos_sin[2 * e + 1])
            words.append(bf16_pair(*turned))
    return [words[4 * i : 4 * i + 4] for i in range(len(vectors))]


# -- pages ---------------------------------------------------------------------------------------
def store_key(k, to, place, words):
    """A head's words into its K row (`key_order`): the four lanes of a row fill 16-byte pieces."""
    t = k.lane & 3
    for i, vector in enumerate(words):
        for w in range(4):
            piece = 2 * (2 * i + w // 2) + w % 2
            at = to + Int64(((piece ^ (place & 7)) << 4) + t * 4)
            sync.ptx_do("st.global.b32 [{$r0}], {$r1};", at, vector[w])


def store_value(k, to, place, words):
    t = k.lane & 3
    for i, vector in enumerate(words):
        for step in range(2):
            piece = 2 * (2 * i + step) + (t >> 1)
            at = to + Int64(((piece ^ (place & 7)) << 4) + (t & 1) * 8)
            code = "st.global.v2.b32 [{$r0}], {{$r1},{$r2}};"
            sync.ptx_do(code, at, vector[2 * step], vector[2 * step + 1])


# -- the rows' keys and values -------------------------------------------------------------------
@cute.jit
def turned_for(turned: Int64, stride: cutlass.Constexpr, row: Int32, at: Int32):
    """The position that a row's K is rotated for."""
    if turned != 0:
        at = Int32(sync.ld_word(turned + Int64(row * stride)))
    return at


@cute.jit
def weights_at(k: cutlass.Constexpr, s: cutlass.Constexpr, layer: Int32):
    """Of the norm of a layer's K; where there is none, some floats that exist."""
    at = s.norms + Int64((layer * 2 + 1) * (k.c.shape.head_dim * 4))
    if cutlass.const_expr(s.optional):
        if s.norms == 0:
            at = s.rope
    return at


def key_words(k, s, vectors, layer, at, row):
    """A head's K as it is stored."""
    position, weights, normed = at, None, None
    if s.turned is not None:
        position = turned_for(s.turned, s.turned_stride, row, at)
    if s.norms is not None:
        weights = head_weights(k, weights_at(k, s, layer))
        normed = s.norms != 0 if s.optional else None
    return rotated(k, s.rope, vectors, position, weights, normed)


@cute.jit
def write_keys(k: cutlass.Constexpr, s: cutlass.Constexpr, rows: Int32, layer: Int32,
               layers: Int32):  # fmt: skip
    """K and V of `rows` rows and of pool layers layer .. layer + layers - 1 into their pages; a
    warp takes 8 rows of one head's K or V, over all warps of the grid. The caller's barrier orders
    the copies that read them: writers fence towards the copy engine here, readers after it."""
    c, heads = k.c, 2 * k.c.shape.kv_heads
    dim = c.shape.head_dim
    width, count = dim * 2, heads * layers
    i = k.wid * c.ctas + k.bid
    while i < (rows + 7) // 8 * count:
        block, column = i // count, i % count
        here, head = layer + column // heads, column % heads  # all K heads, then V heads
        row = cutlass.min(block * 8 + (k.lane >> 2), rows - 1)
        at = s.position + row
        ok = block * 8 + (k.lane >> 2) < rows
        vectors = head_vectors(k, s.source, s.column + column * dim, block, s.chunk_bytes)
        kv_head = head % c.shape.kv_heads
        to = block_at(k, s.pool, s.pool_layers, page_of(k, at >> 6), here, kv_head)
        to = to + Int64((at & 63) * width)
        if head < c.shape.kv_heads:
            words = key_words(k, s, vectors, here, at, row)
            if ok:
                store_key(k, to, at, words)
        else:
            if ok:
                store_value(k, to + PAGE * width, at, vectors)
        i = i + c.warps * c.ctas
    sync.fence_async()
