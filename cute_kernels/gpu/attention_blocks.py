"""Blocks of keys against the 16 rows of a tile: scores, one online softmax, sums of values.

Everything is per warp: it holds a query head of the rows as MMA operands (q: [rows g, rows g + 8]
[d / 8] words), running maxima and denominators of the two row halves (m, den: [2] fp32) and sums
(o: [d / 8 tiles of dimensions][4] fp32). A block's K and V lie in shared memory as in a page
(kv_layout.py). Rows do not meet in an mma: what a row gets depends on its own keys alone.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.attention_plan import halves
from cute_kernels.gpu.attention_stream import row_position
from cute_kernels.gpu.fragments import bf16_pair, exp2, mma, unpack_pair
from cute_kernels.gpu.sync import ptx_read

NEG_INF = -float("inf")


def ldmatrix(addr, transposed):
    kind = "ldmatrix.sync.aligned.m8n8.x4" + (".trans" if transposed else "")
    return ptx_read(
        kind + ".shared.b16 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];",
        [Uint32] * 4,
        addr,
    )


def quad_max(v):
    v = sync.maximum([v, cute.arch.shuffle_sync_bfly(v, offset=1)])
    return sync.maximum([v, cute.arch.shuffle_sync_bfly(v, offset=2)])


def quad_sum(v):
    v = v + cute.arch.shuffle_sync_bfly(v, offset=1)
    return v + cute.arch.shuffle_sync_bfly(v, offset=2)


def block_scores(k, q, base):
    """S = Q K^T of 16 rows and 32 keys that lie one behind the other: 4 tiles of 8 keys."""
    i, d = k.lane, k.c.shape.head_dim
    at = base + (i & 7) * (2 * d)
    piece = ((i >> 3) ^ (i & 7)) << 4
    return scores(k, q, lambda j, chunk: at + (piece ^ (chunk * 64)) + j * (16 * d))


def scores(k, q, key_at):
    """S = Q K^T. key_at(j, chunk): this lane's address for 32 dimensions of the keys of tile j."""
    sums = [[Float32(0.0)] * 4 for _ in range(4)]
    for step in range(k.c.shape.head_dim // 16):
        if step % 2 == 0:
            keys = [ldmatrix(key_at(j, step // 2), False) for j in range(4)]
        sums = [mma(sums[j], query_part(k, q, step), key_part(keys[j], step)) for j in range(4)]
    return sums


def query_part(k, q, step):
    """The A operand of 16 dimensions."""
    upper, w = k.c.shape.head_dim // 8, 2 * step
    return [q[w], q[upper + w], q[w + 1], q[upper + w + 1]]


def key_part(words, step):
    """The B operand of 16 of the 32 dimensions of an ldmatrix."""
    return words[2 * (step % 2) : 2 * (step % 2) + 2]


def block_values(k, o, probabilities, base, masks=None, fine=False):
    """O += P V of 32 keys that lie one behind the other. masks: bits of V that count, [16 keys]
    [keys 2 t and 2 t + 1, and 8 further]; None: all. fine: see `add_values`."""
    i, d = k.lane, k.c.shape.head_dim
    at = base + (i & 15) * (2 * d)
    piece = ((i >> 4) ^ (i & 7)) << 4
    place = lambda u, n: at + (piece ^ (n << 4)) + u * (32 * d)  # noqa: E731
    add_values(k, o, probabilities, place, masks, fine)


def bf16_parts(p, fine):
    """A operands of 8 probabilities: rounded to bf16; with `fine`, then what that has left out."""
    words = [bf16_pair(p[2 * e], p[2 * e + 1]) for e in range(4)]
    if not fine:
        return [words]
    kept = [v for word in words for v in unpack_pair(word)]
    rest = [x - v for x, v in zip(p, kept, strict=True)]
    return [words, [bf16_pair(rest[2 * e], rest[2 * e + 1]) for e in range(4)]]


def add_values(k, o, probabilities, value_at, masks=None, fine=False):
    """O += P V; o: flat [tiles of 8 dimensions x 4]. value_at(u, n): this lane's address for tiles
    n and n + 1 of the dimensions of 16 keys. fine: P to 16 bits, as two products, not to 8."""
    d = k.c.shape.head_dim
    for u in range(2):
        parts = bf16_parts([probabilities[u * 8 + e] for e in range(8)], fine)
        for n in range(0, d // 8, 2):
            b = ldmatrix(value_at(u, n), True)
            if masks is not None:
                b = [x & masks[u][w & 1] for w, x in enumerate(b)]
            for e in range(2):
                to = (n + e) * 4
                sums = [o[to + w] for w in range(4)]
                for a in parts:
                    sums = mma(sums, a, b[2 * e : 2 * e + 2])
                for w in range(4):
                    o[to + w] = sums[w]


@cute.jit
def softmax_block(k: cutlass.Constexpr, tiles: cutlass.Constexpr, valid: cutlass.Constexpr,
                  rows: Int32, p: cute.Tensor, m: cute.Tensor, den: cute.Tensor,
                  o: cute.Tensor):  # fmt: skip
    """One online-softmax step; probabilities by tile into p, flat like the tiles. valid: of
    softmax_half, for both halves. Rows 8 to 15 are left out where a step has none; p is 0 there."""
    if rows > 8:
        softmax_halves(k, tiles, {0: valid[0], 1: valid[1]}, p, m, den, o)
    else:
        softmax_half(k, tiles, 0, valid[0], p, m, den, o)


def total(values):
    """Of a power of two of them, as a tree."""
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def score_scale(k):
    """Exponents are of 2."""
    return k.c.shape.head_dim**-0.5 * 1.4426950408889634


def softmax_half(k, tiles, h, valid, p, m, den, o):
    """For row half h. m is in units of scaled scores. valid: whether this lane's row sees any of
    the keys; one that does not gets probabilities 2^-inf = 0 and factor 1."""
    softmax_halves(k, tiles, {h: valid}, p, m, den, o)


def softmax_halves(k, tiles, valid, p, m, den, o):
    """The same for all halves in valid, step by step side by side: a half alone mostly waits."""
    scale, dims = score_scale(k), k.c.shape.head_dim // 8
    s = {h: [tiles[j][2 * h + e] for j in range(4) for e in range(2)] for h in valid}
    top = {h: sync.maximum(s[h]) for h in valid}
    for offset in (1, 2):
        other = {h: cute.arch.shuffle_sync_bfly(top[h], offset=offset) for h in valid}
        top = {h: sync.maximum([top[h], other[h]]) for h in valid}
    for h, ok in valid.items():
        new = sync.maximum([m[h], sync.choose(ok, top[h] * scale, NEG_INF)])
        alpha = exp2(sync.choose(new > NEG_INF, m[h] - new, 0.0))
        off = sync.choose(ok, new, -NEG_INF)
        sums = [exp2(v * scale - off) for v in s[h]]
        for i, v in enumerate(sums):
            p[i // 2 * 4 + 2 * h + i % 2] = v
        m[h] = new
        den[h] = den[h] * alpha + total(sums)
        for n in range(dims):
            for e in range(2):
                at = n * 4 + 2 * h + e
                o[at] = o[at] * alpha


def sums_seen(k, o):
    """A word that depends on every load of a block: each tile of O does on its part of V and,
    by way of the probabilities, on all of K."""
    seen = sync.as_bits(o[0])
    for n in range(2, k.c.shape.head_dim // 8, 2):  # two tiles a load
        seen = seen | sync.as_bits(o[n * 4])
    return seen


def filled(n, value):
    out = cute.make_rmem_tensor(cute.make_layout(n), Float32)
    for i in range(n):
        out[i] = Float32(value)
    return out


@cute.jit
def block_limit(k: cutlass.Constexpr, p: cutlass.Constexpr, rows: Int32, h: cutlass.Constexpr):
    """Blocks below c(p) of this lane's row in half h of an accumulator; none for an absent row."""
    row = (k.lane >> 2) + 8 * h
    blocks = cutlass.max(row_position(k, p, row) - 15, 0) >> 6
    return Int32(sync.select(row < rows, Uint32(blocks), Uint32(0)))


@cute.jit
def attend_block(k: cutlass.Constexpr, q: cute.Tensor, m: cute.Tensor, den: cute.Tensor,
                 o: cute.Tensor, half: Int32, keys: Int32, values: Int32, block: Int32,
                 limits: cutlass.Constexpr, rows: Int32):  # fmt: skip
    """This warp's keys of one block: half `half` of them, or all where a head has one warp.

    keys, values: shared addresses of the block's rows. block: its index. limits: of block_limit,
    for rows g and g + 8. Call it from one place: it is a phase's largest body."""
    row_bytes = 2 * k.c.shape.head_dim
    valid = [block < limits[0], block < limits[1]]
    lower = half * (32 * row_bytes)
    for _ in cutlass.range(2 // halves(k.c), unroll=1):
        tiles = block_scores(k, q, keys + lower)
        prob = filled(16, 0.0)
        softmax_block(k, tiles, valid, rows, prob, m, den, o)
        block_values(k, o, prob, values + lower)
        lower = lower + 32 * row_bytes
