"""The row form of a step: a chunk of a prompt (PROMPT) or a tree of more than 16 rows (ROWS).

Per layer, with a grid barrier behind each: qkv | keys and values into pages | attention | o |
gate/up | down (where its K is split: parts, barrier, their sum). Activations lie in plain buffers
(prompt_plan.PromptBuffers); the residual of a column belongs to its CTA. Phases are numbered as in
a decode step, 4 a layer; the embedding belongs to phase 0, keys and attention to their `o`.

PROMPT: up to 256 rows into the KV pages, the first at a position that is a multiple of 64; tokens
come from Arg.TOKENS by absolute position. Keys of all positions before the chunk must be in the
pages. No head; but with a drafter, behind the last layer, its context: fc by taps over the features
that the tapped layers have left, ckv, and the keys and values of all its layers.

ROWS: up to 128 rows of Arg.ROW_TABLE, whose outputs are a DECODE step's to the last bit; their
attention is that of a tree and the head follows: verify.py.

Each matrix has one body: ckv goes through qkv's, fc through o's where its K is as long.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.gpu import verify
from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.board import ROW_WORDS, WORD, Desc, RowWord, Segment
from cute_kernels.gpu.config import LAYER_KINDS
from cute_kernels.gpu.context import feature_address, tap_bytes, tap_of
from cute_kernels.gpu.core import arg, desc_word, draft_phase, note_phase
from cute_kernels.gpu.gemm import plan_entry
from cute_kernels.gpu.grid_barrier import barrier_side, grid_barrier
from cute_kernels.gpu.keys import Keys, write_keys
from cute_kernels.gpu.prompt_attention import attend, produce_keys
from cute_kernels.gpu.prompt_plan import COLUMNS_BYTES, PARTS, ROW_TILE, PromptBuffers
from cute_kernels.gpu.rows_embed import embed_residual, embed_rows
from cute_kernels.gpu.rows_ends import Ends, Rows, add_parts
from cute_kernels.gpu.rows_gemm import produce_rows, rows_gemm
from cute_kernels.gpu.sync import ptx_read, select_int

QKV, O, GU, DOWN, LM, FC, CKV, KEYS = range(8)  # KEYS: the drafter's, behind ckv


def pick(flag, a, b):
    """a where flag is 1, b where it is 0; 64 bits."""
    return b + Int64(flag) * (a - b)


# -- the step ------------------------------------------------------------------------------------
def chunk(k, rows, position):
    """A chunk of a prompt as the device functions want it."""
    p = Rows()
    p.rows, p.position = rows, position
    p.row_tiles = (rows + (ROW_TILE - 1)) // ROW_TILE
    p.act, p.draft, p.tree = arg(k, Arg.PROMPT_ACT), False, None
    return p


def step_rows(k, kind):
    """The rows of the descriptor's step."""
    p = chunk(k, desc_word(k, Desc.ROWS), desc_word(k, Desc.POSITION))
    if k.c.draft:
        p.draft, p.tree = True, Int32(kind == int(Segment.ROWS))
    return p


def shares_o(c):
    """Does fc go through o's body?"""
    return c.gemm("fc").k == c.gemm("o").k


@cute.jit
def last_place(k: cutlass.Constexpr, p: cutlass.Constexpr, last: Int32):
    """Where the step's places end: a place is a phase below `last`, then fc's taps, ckv, KEYS."""
    if cutlass.const_expr(p.draft):
        if (last == k.layers * 4) & (k.draft_layers > 0) & (p.tree == 0):
            last = last + k.taps + 2
    return last


@cute.jit
def place_at(k: cutlass.Constexpr, p: cutlass.Constexpr, i: Int32, last: Int32):
    """(kind, phase) of a place."""
    kind, phase = i & 3, i
    if cutlass.const_expr(p.draft):
        if i == k.layers * 4:
            kind = Int32(LM)
        if i >= last:
            phase, kind = draft_phase(k) + (i - last), Int32(FC)
            if i - last >= k.taps:
                kind = CKV + (i - last - k.taps)
    return kind, phase


def tokens_of(k, p):
    """(address of the first row's token, bytes to the next)."""
    prompt = arg(k, Arg.TOKENS) + Int64(p.position) * 4
    if not p.draft:
        return prompt, Int32(4)
    tree = arg(k, Arg.ROW_TABLE) + int(RowWord.TOKEN) * WORD
    return pick(p.tree, tree, prompt), 4 + p.tree * (ROW_WORDS * WORD - 4)


# -- what a matrix reads and writes --------------------------------------------------------------
def ends_of(k, p, name, kind, phase):
    """Of a matrix's body, which may serve two kinds."""
    b = PromptBuffers.of(k.c)
    x, q, a, h = (p.act + Int64(at) for at in (b.x, b.q, b.a, b.h))
    if name == "qkv":
        return Ends(x, pick(kind == CKV, arg(k, Arg.CONTEXT_KV), q) if p.draft else q)
    if name == "gu":
        return Ends(x, h)
    if name == "lm":
        return Ends(x, arg(k, Arg.LOGITS))
    if name == "down":
        if not p.draft:
            return Ends(h, x)
        tap = tap_of(k, phase >> 2, arg(k, Arg.TAP_OF))
        return Ends(h, x, tap=feature_address(k, arg(k, Arg.FEATURES), tap))
    if not p.draft:
        return Ends(a, x)
    features = arg(k, Arg.FEATURES) + Int64(phase - draft_phase(k)) * tap_bytes(k.c)
    fresh = Int32(phase == draft_phase(k))
    if name == "fc":
        return Ends(features, x, fresh)
    return Ends(pick(kind == FC, features, a), x, fresh)


def keys_of(k, p, kind, layer):
    """(Keys, first layer, layers): a layer of the target from the columns of qkv, or all of the
    drafter's from those of ckv."""
    s, shape = Keys(), k.c.shape
    s.source, s.chunk_bytes = p.act + Int64(PromptBuffers.of(k.c).q), COLUMNS_BYTES
    s.column, s.position = shape.heads * shape.head_dim, p.position
    s.pool, s.pool_layers, s.rope = k.kv_pool, k.layers, arg(k, Arg.ROPE)
    if shape.qk_norm:
        s.norms = arg(k, Arg.QK_NORM)
    if not p.draft:
        return s, layer, Int32(1)
    own = Int32(kind == KEYS)
    s.source, s.column = pick(own, arg(k, Arg.CONTEXT_KV), s.source), (1 - own) * s.column
    s.pool = pick(own, arg(k, Arg.DRAFT_KV), s.pool)
    s.pool_layers = select_int(own, k.draft_layers, k.layers)
    s.rope = pick(own, arg(k, Arg.DRAFT_ROPE), s.rope)
    s.optional = s.norms is None
    s.norms = pick(own, arg(k, Arg.DRAFT_QK_NORM), Int64(0) if s.optional else s.norms)
    s.turned = Int64(p.tree) * (arg(k, Arg.ROW_TABLE) + int(RowWord.POSITION) * WORD)
    s.turned_stride = ROW_WORDS * WORD
    return s, (1 - own) * layer, select_int(own, k.draft_layers, Int32(1))


# -- consumers -----------------------------------------------------------------------------------
def has(only, name):
    return only in ("", name)


@cute.jit
def run_layers(
    k: cutlass.Constexpr, p: cutlass.Constexpr, first: Int32, last: Int32,
    stage: Int32, parity: Int32, only: cutlass.Constexpr = "",
):  # fmt: skip
    """Consumer warps: phases [first, last) of a step. only: one of PARTS, to run nothing else.
    Returns the place in the ring."""
    c, side = k.c, barrier_side(k)
    assert only in ("", *PARTS)
    if cutlass.const_expr(p.draft):
        verify.begin_rows(k, p)
    if cutlass.const_expr(has(only, "embed")):
        if first == 0:
            tokens = tokens_of(k, p)
            embed_rows(k, p, tokens)
            embed_residual(k, p, tokens, Int32(O))
            side = grid_barrier(k, side)
    for i in cutlass.range(first, last_place(k, p, last), unroll=1):
        kind, phase = place_at(k, p, i, last)
        layer = phase >> 2
        note_phase(k, phase + 1)
        if cutlass.const_expr(has(only, "qkv")):
            if (kind == QKV) | (kind == CKV):
                ends = ends_of(k, p, "qkv", kind, phase)
                stage, parity = rows_gemm(k, p, c.gemm("qkv"), ends, phase, stage, parity)
        if cutlass.const_expr(has(only, "keys")):
            if (kind == O) | (kind == KEYS):
                keys, first_layer, layers = keys_of(k, p, kind, layer)
                write_keys(k, keys, p.rows, first_layer, layers)
        if kind == O:
            if cutlass.const_expr(p.draft):
                if p.tree != 0:
                    stage, parity = verify.run_blocks(k, p, layer, stage, parity)
            if cutlass.const_expr(has(only, "keys")):
                side = grid_barrier(k, side)
            if cutlass.const_expr(has(only, "attention")):
                if cutlass.const_expr(p.draft):
                    if p.tree != 0:
                        stage, parity = verify.run_tails(k, p, layer, stage, parity)
                    else:
                        stage, parity = attend(k, p, layer, stage, parity)
                else:
                    stage, parity = attend(k, p, layer, stage, parity)
                side = grid_barrier(k, side)
        if cutlass.const_expr(has(only, "o")):
            of_o = kind == O
            if cutlass.const_expr(p.draft and shares_o(c)):
                of_o = (kind == O) | (kind == FC)
            if of_o:
                ends = ends_of(k, p, "o", kind, phase)
                stage, parity = rows_gemm(k, p, c.gemm("o"), ends, phase, stage, parity)
        if cutlass.const_expr(p.draft and not shares_o(c)):
            if kind == FC:
                ends = ends_of(k, p, "fc", kind, phase)
                stage, parity = rows_gemm(k, p, c.gemm("fc"), ends, phase, stage, parity)
        if cutlass.const_expr(has(only, "gu")):
            if kind == GU:
                ends = ends_of(k, p, "gu", kind, phase)
                stage, parity = rows_gemm(k, p, c.gemm("gu"), ends, phase, stage, parity)
        if cutlass.const_expr(has(only, "down")):
            if kind == DOWN:
                ends = ends_of(k, p, "down", kind, phase)
                stage, parity = rows_gemm(k, p, c.gemm("down"), ends, phase, stage, parity)
                if cutlass.const_expr(c.team > 1):
                    side = grid_barrier(k, side)
                    add_parts(k, p, ends, phase)
        if cutlass.const_expr(p.draft):
            if kind == LM:
                ends = ends_of(k, p, "lm", kind, phase)
                stage, parity = rows_gemm(k, p, c.gemm("lm"), ends, phase, stage, parity)
                verify.publish_rows(k, p, phase)
        if kind != LM:
            side = grid_barrier(k, side)
    return stage, parity


@cute.jit
def run_prompt(k: cutlass.Constexpr, kind: Int32, stage: Int32, parity: Int32):
    """Consumer warps: the PROMPT or ROWS step of the descriptor; of ROWS up to and with publishing
    the results of all rows. Returns the place in the ring."""
    first, last = desc_word(k, Desc.FIRST_PHASE), desc_word(k, Desc.LAST_PHASE)
    return run_layers(k, step_rows(k, kind), first, last, stage, parity)


# -- the producer --------------------------------------------------------------------------------
def stream_at(k, phase):
    """Where this CTA's weights of a phase begin."""
    offset = ptx_read("ld.global.nc.b64 {$w0}, [{$r0}];", [Int64], k.offsets + Int64(phase) * 8)
    return arg(k, Arg.STREAM) + offset


def bodies(c, draft):
    """(matrix, kinds that stream it)."""
    out = [[c.gemm(name), [kind]] for kind, name in enumerate(LAYER_KINDS)]
    if draft:
        out[QKV][1].append(CKV)
        out.append([c.gemm("lm"), [LM]])
        if shares_o(c):
            out[O][1].append(FC)
        else:
            out.append([c.gemm("fc"), [FC]])
    return out


@cute.jit
def produce_layers(
    k: cutlass.Constexpr, p: cutlass.Constexpr, first: Int32, last: Int32, stage: Int32,
    parity: Int32, issued: Int32, landed: Int32, landed_parity: Int32,
    only: cutlass.Constexpr = "",
):  # fmt: skip
    """The producer warp: the KV blocks and weights of phases [first, last), in the order in which
    the consumers take them. Returns the state of `ring.issue`."""
    for i in cutlass.range(first, last_place(k, p, last), unroll=1):
        kind, phase = place_at(k, p, i, last)
        if cutlass.const_expr(has(only, "attention")):
            if kind == O:
                if cutlass.const_expr(p.draft):
                    if p.tree != 0:
                        stage, parity, issued, landed, landed_parity = verify.produce_tree(
                            k, p, phase >> 2, stage, parity, issued, landed, landed_parity
                        )
                    else:
                        stage, parity, issued, landed, landed_parity = produce_keys(
                            k, p, phase >> 2, stage, parity, issued, landed, landed_parity
                        )
                else:
                    stage, parity, issued, landed, landed_parity = produce_keys(
                        k, p, phase >> 2, stage, parity, issued, landed, landed_parity
                    )
        if kind != KEYS:
            _, n, _, _ = plan_entry(k, phase)
            at = stream_at(k, phase)
            for b in cutlass.range_constexpr(len(bodies(k.c, p.draft))):
                g, mine = bodies(k.c, p.draft)[b]
                if cutlass.const_expr(has(only, g.name)):
                    if (kind == mine[0]) | (kind == mine[-1]):
                        stage, parity, issued, landed, landed_parity = produce_rows(
                            k, p, g, n, at, stage, parity, issued, landed, landed_parity
                        )
    return stage, parity, issued, landed, landed_parity


@cute.jit
def produce_prompt(
    k: cutlass.Constexpr, kind: Int32, stage: Int32, parity: Int32, issued: Int32, landed: Int32,
    landed_parity: Int32,
):  # fmt: skip
    """The producer warp: the PROMPT or ROWS step of the descriptor."""
    first, last = desc_word(k, Desc.FIRST_PHASE), desc_word(k, Desc.LAST_PHASE)
    return produce_layers(
        k, step_rows(k, kind), first, last, stage, parity, issued, landed, landed_parity
    )
