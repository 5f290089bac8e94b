"""The PROMPT segment: a chunk of a prompt through all layers, into the KV pages. No head.

Per layer, with a grid barrier behind each: qkv | keys and values into pages | attention | o |
gate/up | down (where its K is split: parts, barrier, their sum). Activations lie in plain buffers
(prompt_plan.PromptBuffers); the residual of a column belongs to its CTA. Phases are numbered as in
a decode step, 4 a layer; the embedding belongs to phase 0, keys and attention to their `o`.

Rows: 1 to 256, the first at a position that is a multiple of 64; tokens come from Arg.TOKENS by
absolute position. Keys of all positions before the chunk must be in the pages.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.board import Desc
from cute_kernels.gpu.config import LAYER_KINDS
from cute_kernels.gpu.core import arg, desc_word, note_phase
from cute_kernels.gpu.gemm import plan_entry
from cute_kernels.gpu.grid_barrier import barrier_side, grid_barrier
from cute_kernels.gpu.keys import Keys, write_keys
from cute_kernels.gpu.prompt_attention import attend, keys_written, produce_keys
from cute_kernels.gpu.prompt_plan import COLUMNS_BYTES, PARTS, ROW_TILE, PromptBuffers
from cute_kernels.gpu.rows_gemm import (
    Rows,
    add_parts,
    embed_residual,
    embed_rows,
    produce_rows,
    rows_gemm,
)
from cute_kernels.gpu.sync import ptx_read

QKV, O, GU, DOWN = range(4)


def chunk(k, rows, position):
    """The chunk as the device functions want it."""
    p = Rows()
    p.rows, p.position = rows, position
    p.row_tiles = (rows + (ROW_TILE - 1)) // ROW_TILE
    p.act, p.tokens, p.rope = arg(k, Arg.PROMPT_ACT), arg(k, Arg.TOKENS), arg(k, Arg.ROPE)
    p.embed_base, p.embed_table = arg(k, Arg.EMBED_BASE), arg(k, Arg.EMBED_TABLE)
    return p


def target_keys(k, p):
    """Of a layer of the target, from the columns of qkv."""
    s, shape = Keys(), k.c.shape
    s.source, s.chunk_bytes = p.act + Int64(PromptBuffers.of(k.c).q), COLUMNS_BYTES
    s.column, s.position = shape.heads * shape.head_dim, p.position
    s.pool, s.pool_layers, s.rope = k.kv_pool, k.layers, p.rope
    if shape.qk_norm:
        s.norms = arg(k, Arg.QK_NORM)
    return s


# -- consumers -----------------------------------------------------------------------------------
def has(only, name):
    return only in ("", name)


@cute.jit
def run_layers(
    k: cutlass.Constexpr, p: cutlass.Constexpr, first: Int32, last: Int32,
    stage: Int32, parity: Int32, only: cutlass.Constexpr = "",
):  # fmt: skip
    """Consumer warps: phases [first, last) of a chunk. only: one of PARTS, to run nothing else.
    Returns the place in the ring."""
    c, side = k.c, barrier_side(k)
    assert only in ("", *PARTS)
    if cutlass.const_expr(has(only, "embed")):
        if first == 0:
            embed_rows(k, p)
            embed_residual(k, p, Int32(O))
            side = grid_barrier(k, side)
    for phase in cutlass.range(first, last, unroll=1):
        kind, layer = phase & 3, phase >> 2
        note_phase(k, phase + 1)
        if cutlass.const_expr(has(only, "qkv")):
            if kind == QKV:
                stage, parity = rows_gemm(k, p, c.gemm("qkv"), phase, stage, parity)
        if kind == O:
            if cutlass.const_expr(has(only, "keys")):
                write_keys(k, target_keys(k, p), p.rows, layer, Int32(1))
                side = grid_barrier(k, side)
            if cutlass.const_expr(has(only, "attention")):
                keys_written(k, p)
                stage, parity = attend(k, p, layer, stage, parity)
                side = grid_barrier(k, side)
            if cutlass.const_expr(has(only, "o")):
                stage, parity = rows_gemm(k, p, c.gemm("o"), phase, stage, parity)
        if cutlass.const_expr(has(only, "gu")):
            if kind == GU:
                stage, parity = rows_gemm(k, p, c.gemm("gu"), phase, stage, parity)
        if cutlass.const_expr(has(only, "down")):
            if kind == DOWN:
                stage, parity = rows_gemm(k, p, c.gemm("down"), phase, stage, parity)
                if cutlass.const_expr(c.team > 1):
                    side = grid_barrier(k, side)
                    add_parts(k, p, phase)
        side = grid_barrier(k, side)
    return stage, parity


def step_chunk(k):
    return chunk(k, desc_word(k, Desc.ROWS), desc_word(k, Desc.POSITION))


@cute.jit
def run_prompt(k: cutlass.Constexpr, kind: Int32, stage: Int32, parity: Int32):
    """Consumer warps: the PROMPT step of the descriptor. Returns the place in the ring."""
    first, last = desc_word(k, Desc.FIRST_PHASE), desc_word(k, Desc.LAST_PHASE)
    return run_layers(k, step_chunk(k), first, last, stage, parity)


# -- the producer --------------------------------------------------------------------------------
def stream_at(k, phase):
    """Where this CTA's weights of a phase begin."""
    offset = ptx_read("ld.global.nc.b64 {$w0}, [{$r0}];", [Int64], k.offsets + Int64(phase) * 8)
    return arg(k, Arg.STREAM) + offset


@cute.jit
def produce_layers(
    k: cutlass.Constexpr, p: cutlass.Constexpr, first: Int32, last: Int32, stage: Int32,
    parity: Int32, issued: Int32, landed: Int32, landed_parity: Int32,
    only: cutlass.Constexpr = "",
):  # fmt: skip
    """The producer warp: the KV blocks and weights of phases [first, last), in the order in which
    the consumers take them. Returns the state of `ring.issue`."""
    for phase in cutlass.range(first, last, unroll=1):
        if cutlass.const_expr(has(only, "attention")):
            if (phase & 3) == O:
                stage, parity, issued, landed, landed_parity = produce_keys(
                    k, p, phase >> 2, stage, parity, issued, landed, landed_parity
                )
        _, n, _, _ = plan_entry(k, phase)
        at = stream_at(k, phase)
        for kind in cutlass.range_constexpr(4):
            if cutlass.const_expr(has(only, LAYER_KINDS[kind])):
                if (phase & 3) == kind:
                    stage, parity, issued, landed, landed_parity = produce_rows(
                        k, k.c.gemms[kind], n, at, stage, parity, issued, landed, landed_parity
                    )
    return stage, parity, issued, landed, landed_parity


@cute.jit
def produce_prompt(
    k: cutlass.Constexpr, kind: Int32, stage: Int32, parity: Int32, issued: Int32, landed: Int32,
    landed_parity: Int32,
):  # fmt: skip
    """The producer warp: the PROMPT step of the descriptor."""
    first, last = desc_word(k, Desc.FIRST_PHASE), desc_word(k, Desc.LAST_PHASE)
    return produce_layers(
        k, step_chunk(k), first, last, stage, parity, issued, landed, landed_parity
    )
