"""Token embeddings, read from the packed head (or from an embedding that is packed the same way).

A token's 16-byte vectors in its tile's unit are activations already: the first matrix of a step
takes them straight into registers, and every CTA reads its own columns of the residual from there.
Tokens are those of the descriptor in shared memory. Nothing is published and nothing polled.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.board import Desc
from cute_kernels.gpu.config import CHUNK, TILE
from cute_kernels.gpu.core import arg
from cute_kernels.gpu.fragments import unpack_pair
from cute_kernels.gpu.sync import ptx_read


def token_address(k, token):
    """Of the token's column in its unit: byte 64 * (token & 7) of every 512."""
    entry = arg(k, Arg.EMBED_TABLE) + Int64(token >> 3) * 8
    offset = ptx_read("ld.global.nc.b64 {$w0}, [{$r0}];", [Int64], entry)
    return arg(k, Arg.EMBED_BASE) + offset + Int64((token & 7) * 64)


def token_of(k, row):
    """Of a row of the step."""
    return sync.lds_int(k.desc + (int(Desc.TOKEN) + row) * 4)


def tokens_if(k, rows, row):
    """The row's token; 0, which always exists, for a row that the step does not have."""
    return Int32(sync.select(Int32(row < rows), Uint32(token_of(k, row)), Uint32(0)))


def column_offset(k, col):
    """Byte offset from a token's address of its columns col, col + 1 (col even)."""
    g, warps = k.c.gemm("lm"), k.c.warps
    run = g.k // CHUNK // warps  # chunks of a warp
    chunk = Uint32(col) >> 5
    warp, i = chunk // run, chunk % run
    place = (col >> 2) & 3
    inside = place * 16 + ((col >> 4) & 1) * 8 + (col & 3) * 2
    return Int64(Int32(i * warps + warp) * 512 + inside)


@cute.jit
def gather(k: cutlass.Constexpr, g: cutlass.Constexpr, slab: cute.Tensor, oks: cutlass.Constexpr):
    """The rows' embeddings as A fragments of a matrix over the hidden size."""
    inside = Int64(k.wid * 512 + (k.lane & 3) * 16)
    for b in cutlass.range_constexpr(2):
        row = b * 8 + (k.lane >> 2)
        token = sync.select(oks[b], Uint32(token_of(k, row)), Uint32(0))
        at = token_address(k, Int32(token)) + inside
        for i in cutlass.range_constexpr(g.slab // CHUNK // k.c.warps):
            words = sync.ld_constant_words_if(oks[b], at + Int64(i * k.c.warps * 512))
            for e in cutlass.range_constexpr(4):
                slab[i * 8 + b * 4 + e] = words[e]


@cute.jit
def load_residual(k: cutlass.Constexpr, rows: Int32, tile0: Int32, n: Int32):
    """The CTA's own columns of the residual, fp32. tile0, n: its tiles of `o`."""
    c = k.c
    at = token_address(k, tokens_if(k, rows, k.row))
    own = k.j
    while own < n:
        col = (tile0 + own * c.team) * TILE + 2 * k.t
        word = ptx_read("ld.global.nc.b32 {$w0}, [{$r0}];", [Uint32], at + column_offset(k, col))
        lo, hi = unpack_pair(sync.select(Int32(k.row < rows), word, Uint32(0)))
        sync.sts_pair(k.residual + own * 512 + k.pair, Float32(lo), Float32(hi))
        own = own + c.group
