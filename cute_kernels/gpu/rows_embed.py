"""The row form's first activations: the tokens' embeddings."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.config import CHUNK, TILE
from cute_kernels.gpu.embed import column_offset, token_address
from cute_kernels.gpu.fragments import unpack_pair
from cute_kernels.gpu.gemm import plan_entry
from cute_kernels.gpu.prompt_plan import COLUMNS_BYTES, ROW_TILE, ROW_TILES, PromptBuffers
from cute_kernels.gpu.rows_ends import store_quad
from cute_kernels.gpu.sync import ptx_read
from cute_kernels.gpu.tiles import tile_stride


def row_token(k, p, tokens, row):
    """Address of a row's embedding (embed.py); rows beyond the step get the last one's. tokens:
    (address of the first row's token, bytes to the next)."""
    first, stride = tokens
    at = first + Int64(cutlass.min(row, p.rows - 1) * stride)
    return token_address(k, ptx_read("ld.global.b32 {$w0}, [{$r0}];", [Int32], at))


@cute.jit
def embed_rows(k: cutlass.Constexpr, p: cutlass.Constexpr, tokens: cutlass.Constexpr):
    """x = the tokens' embeddings: copies of 16-byte vectors, (32 columns, 8 rows) a warp at a
    time over all warps of the grid."""
    c, x = k.c, p.act + Int64(PromptBuffers.of(k.c).x)
    chunks = c.shape.hidden // CHUNK
    i = k.wid * c.ctas + k.bid
    while i < (p.rows + 7) // 8 * chunks:
        chunk, block = i % chunks, i // chunks
        row = block * 8 + (k.lane >> 2)
        col = chunk * CHUNK + (k.lane & 3) * 4
        words = sync.ld_constant_words(row_token(k, p, tokens, row) + column_offset(k, col))
        if row < p.rows:
            to = x + Int64(chunk * COLUMNS_BYTES + block * 512 + k.lane * 16)
            sync.ptx_do("st.global.v4.b32 [{$r0}], {{$r1},{$r2},{$r3},{$r4}};", to, *words)
        i = i + c.warps * c.ctas


@cute.jit
def embed_residual(k: cutlass.Constexpr, p: cutlass.Constexpr, tokens: cutlass.Constexpr,
                   phase: Int32):  # fmt: skip
    """The same as fp32 for this CTA's own columns; phase: of some `o`, whose tiles they are."""
    c, residual = k.c, p.act + Int64(PromptBuffers.of(k.c).residual)
    tile0, n, _, _ = plan_entry(k, phase)
    i = k.wid
    while i < n * p.row_tiles:
        tile, row_tile = tile0 + (i // p.row_tiles) * tile_stride(c, "o"), i % p.row_tiles
        row = row_tile * ROW_TILE + (k.lane >> 2)
        at = column_offset(k, tile * TILE + 2 * (k.lane & 3))
        lo = ptx_read(
            "ld.global.nc.b32 {$w0}, [{$r0}];", [Uint32], row_token(k, p, tokens, row) + at
        )
        hi = ptx_read(
            "ld.global.nc.b32 {$w0}, [{$r0}];", [Uint32], row_token(k, p, tokens, row + 8) + at
        )
        to = residual + Int64((tile * ROW_TILES + row_tile) * 512 + k.lane * 16)
        store_quad(to, [*unpack_pair(lo), *unpack_pair(hi)])
        i = i + c.warps
