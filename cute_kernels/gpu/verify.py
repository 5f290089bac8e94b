"""What a ROWS step has beside the row form's matrices: the attention of a tree, the head's results.

The rows are those of Arg.ROW_TABLE, up to 128: row 0 the root, row i's key and value at position
POSITION + i (= COMMITTED + i) of the pages, rotated for the root's position plus its depth. Their
attention is attention.py's to the last bit, by the same functions, a row tile of 16 rows at a time:

- blocks below c(p), which are committed whatever the tree, by tasks (kv head, split, row tile);
  their parts go to a buffer (PromptBuffers.tree), not to words that somebody polls;
- behind a grid barrier, tails and merging by tasks (kv head, row tile, some of its rows). The keys
  of a tail, the rows' own among them, come through the ring: blocks from the root's c(p) on, held
  together.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.gpu import attention, head, sync
from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.attention_blocks import NEG_INF, filled
from cute_kernels.gpu.attention_plan import TAIL_GROUPS, halves, stages_per_block, tail_slots
from cute_kernels.gpu.attention_stream import Places, row_position
from cute_kernels.gpu.attention_tail import wait_for_tail
from cute_kernels.gpu.board import MAX_ROWS, ROW_WORDS, WORD, RowWord, Stamp
from cute_kernels.gpu.config import KV_COPY, TILE
from cute_kernels.gpu.core import arg, note_time
from cute_kernels.gpu.gemm import plan_entry
from cute_kernels.gpu.keys import block_at, page_of
from cute_kernels.gpu.prompt_attention import keys_barrier, keys_written, load_head
from cute_kernels.gpu.prompt_plan import (
    COLUMNS_BYTES,
    ROW_TILE,
    PromptBuffers,
    tree_part_bytes,
)
from cute_kernels.gpu.ring import advance, issue
from cute_kernels.gpu.sync import ptx_read

LOGITS_AT_ONCE = 8  # pairs of logits that a thread has in flight


# -- the tree ------------------------------------------------------------------------------------
def tree_places(k, kv_head, split, row_tile):
    """Attention's places for a row tile. The step's own keys do not come to p.new: positions and
    paths of all rows lie there."""
    t = Places(k)
    t.kv_head, t.split = kv_head, split
    t.positions = t.new + row_tile * (ROW_TILE * 4)
    t.paths = t.new + MAX_ROWS * 4 + row_tile * (ROW_TILE * 16)
    t.path_bytes, t.chunk_bytes, t.new, t.polled = 16, COLUMNS_BYTES, None, False
    return t


class Span:
    """Trace-time: of a tree, first: the first block of a tail; blocks: from there to the last row's
    key; main: blocks below the largest c(p)."""

    def __init__(self, first, blocks, main):
        self.first, self.blocks, self.main = first, blocks, main


def find_span(k, p):
    """From the table. Whole warps."""
    deepest = p.position
    for i in range(MAX_ROWS // 32):
        row = cutlass.min(k.lane + 32 * i, p.rows - 1)
        at = arg(k, Arg.ROW_TABLE) + Int64((row * ROW_WORDS + int(RowWord.POSITION)) * WORD)
        deepest = cutlass.max(deepest, Int32(sync.ld_word(at)))
    for shift in range(5):
        other = cute.arch.shuffle_sync_bfly(deepest, offset=1 << shift)
        deepest = cutlass.max(deepest, other)
    first = cutlass.max(p.position - 15, 0) >> 6
    blocks = ((p.position + p.rows - 1) >> 6) - first + 1
    return Span(first, blocks, cutlass.max(deepest - 15, 0) >> 6)


def span(k):
    """Consumer warps: what `begin_rows` has found."""
    first, blocks, main, _ = sync.lds_ints(Places(k).step)
    return Span(first, blocks, main)


@cute.jit
def begin_rows(k: cutlass.Constexpr, p: cutlass.Constexpr):
    """Consumer warps, at the start of a step: positions and paths of a tree's rows and its blocks
    into shared memory."""
    if p.tree != 0:
        if k.wid == 0:
            found = find_span(k, p)
            if k.lane == 0:
                numbers = [found.first, found.blocks, found.main, Int32(0)]
                sync.sts_words(Places(k).step, numbers)
        t = tree_places(k, Int32(0), Int32(0), Int32(0))
        row = k.tid
        while row < p.rows:
            at = arg(k, Arg.ROW_TABLE) + Int64(row * (ROW_WORDS * WORD))
            position = Int32(sync.ld_word(at + int(RowWord.POSITION) * WORD))
            sync.sts_int(t.positions + row * 4, position)
            sync.sts_words(t.paths + row * 16, sync.ld_words(at + int(RowWord.PATH) * WORD))
            row = row + k.c.warps * 32
        sync.consumer_sync(k.c.warps * 32)


# -- tasks ---------------------------------------------------------------------------------------
def block_tasks(k, p, s):
    """(tasks, splits that have a block): index = (row tile, split, kv head)."""
    splits = cutlass.min(s.main, Int32(k.c.splits))
    return p.row_tiles * splits * k.c.shape.kv_heads, splits


def tail_tasks(k, p):
    """(tasks, shares of a row tile): index = (share, row tile, kv head); one a CTA if they can."""
    shares = k.c.ctas // (p.row_tiles * k.c.shape.kv_heads)
    shares = cutlass.max(cutlass.min(shares, Int32(ROW_TILE)), Int32(1))
    return p.row_tiles * shares * k.c.shape.kv_heads, shares


def heads_and_halves(k):
    """(query head of the kv head, half of the keys, whether the warp has any)."""
    c = k.c
    return k.wid % c.group_heads, k.wid // c.group_heads, k.wid < c.group_heads * halves(c)


def load_queries(k, p, t, q, layer, row_tile):
    """Q of the row tile's rows of this warp's query head, as attention.take_inputs leaves it."""
    row = row_tile * ROW_TILE + (k.lane >> 2)
    own = [cutlass.min(row + 8 * h, p.rows - 1) - row_tile * ROW_TILE for h in range(2)]
    column = (t.kv_head * k.c.group_heads + k.wid % k.c.group_heads) * k.c.shape.head_dim
    load_head(k, p, q, column, layer, row_tile, [row_position(k, t, r) for r in own])


def parts_at(k, p, row_tile):
    base = p.act + Int64(PromptBuffers.of(k.c).tree)
    return base + Int64(row_tile * tree_part_bytes(k.c))


# -- blocks below c(p) ---------------------------------------------------------------------------
@cute.jit
def block_task(
    k: cutlass.Constexpr, p: cutlass.Constexpr, layer: Int32, kv_head: Int32, split: Int32,
    row_tile: Int32, stage: Int32, parity: Int32,
):  # fmt: skip
    t = tree_places(k, kv_head, split, row_tile)
    which, half, busy = heads_and_halves(k)
    rows, s = cutlass.min(p.rows - row_tile * ROW_TILE, ROW_TILE), span(k)
    q = cute.make_rmem_tensor(cute.make_layout(k.c.shape.head_dim // 4), Uint32)
    m, den = filled(2, NEG_INF), filled(2, 0.0)
    o = filled(k.c.shape.head_dim // 2, 0.0)
    if busy:
        load_queries(k, p, t, q, layer, row_tile)
    stage, parity = attention.run_blocks(k, t, q, m, den, o, half, rows, s.main, stage, parity)
    attention.share_part(k, t, which, half, rows, busy, m, den, o, parts_at(k, p, row_tile))
    return stage, parity


@cute.jit
def run_blocks(k: cutlass.Constexpr, p: cutlass.Constexpr, layer: Int32, stage: Int32,
               parity: Int32):  # fmt: skip
    """Consumer warps, behind qkv: this CTA's splits' parts. Returns the place in the ring."""
    heads = k.c.shape.kv_heads
    count, splits = block_tasks(k, p, span(k))
    index = k.bid
    while index < count:
        rest = index // heads
        stage, parity = block_task(
            k, p, layer, index % heads, rest % splits, rest // splits, stage, parity
        )
        index = index + k.c.ctas
    return stage, parity


# -- tails ---------------------------------------------------------------------------------------
@cute.jit
def tail_task(
    k: cutlass.Constexpr, p: cutlass.Constexpr, layer: Int32, kv_head: Int32, share: Int32,
    shares: Int32, row_tile: Int32, stage: Int32, parity: Int32,
):  # fmt: skip
    """Rows share, share + shares, ... of a row tile."""
    c, t, s = k.c, tree_places(k, kv_head, Int32(0), row_tile), span(k)
    t.queries = k.red  # of all these rows: Config.smem_plan
    rows = cutlass.min(p.rows - row_tile * ROW_TILE, ROW_TILE)
    if k.wid < c.group_heads:
        q = cute.make_rmem_tensor(cute.make_layout(c.shape.head_dim // 4), Uint32)
        load_queries(k, p, t, q, layer, row_tile)
        row, slot = share, Int32(0)
        while row < rows:
            attention.stage_query(k, t, q, k.wid, row, slot)
            row, slot = row + shares, slot + 1
    if k.wid >= c.warps - TAIL_GROUPS:
        wait_for_tail(k, s.blocks, stage, parity)
    sync.consumer_sync(c.warps * 32)
    parts, out = parts_at(k, p, row_tile), p.act + Int64(PromptBuffers.of(c).a + row_tile * 1024)
    row, slot, seen = share, Int32(0), Uint32(0)
    while row < rows:
        seen = seen | attention.merge_row(k, t, row, slot, parts, out, stage, s.first, s.main)
        if cutlass.const_expr(tail_slots(c) == 1):
            sync.consumer_sync(c.warps * 32)
        row, slot = row + shares, slot + 1
    stages = s.blocks * stages_per_block(c)
    attention.release_tail(k, stages, stage, seen)
    for _ in cutlass.range(stages, unroll=1):
        stage, parity = advance(k.ring, stage, parity)
    # a warp that reads no tail gives stages back at once: not before all have given back the last
    sync.consumer_sync(c.warps * 32)
    return stage, parity


@cute.jit
def run_tails(k: cutlass.Constexpr, p: cutlass.Constexpr, layer: Int32, stage: Int32,
              parity: Int32):  # fmt: skip
    """Consumer warps, behind the barrier that follows `run_blocks` and the step's keys: outputs of
    all rows into a. Returns the place in the ring."""
    c, heads = k.c, k.c.shape.kv_heads
    count, shares = tail_tasks(k, p)
    keys_written(k, k.bid < count)
    index = k.bid
    while index < count:
        rest = index // heads
        stage, parity = tail_task(
            k, p, layer, index % heads, rest // p.row_tiles, shares, rest % p.row_tiles, stage,
            parity,
        )  # fmt: skip
        index = index + c.ctas
    return stage, parity


# -- the producer --------------------------------------------------------------------------------
@cute.jit
def produce_tree(
    k: cutlass.Constexpr, p: cutlass.Constexpr, layer: Int32,
    stage: Int32, parity: Int32, issued: Int32, landed: Int32, landed_parity: Int32,
):  # fmt: skip
    """The producer warp: the KV blocks of this CTA's tasks in a layer, those of tails once consumer
    warp 0 says that the step's keys are in the pages."""
    c, heads = k.c, k.c.shape.kv_heads
    s = find_span(k, p)
    count, splits = block_tasks(k, p, s)
    tails, _ = tail_tasks(k, p)
    for tail in cutlass.range(2, unroll=1):
        end, step = s.main, Int32(c.splits)
        if tail != 0:
            count, end, step = tails, s.first + s.blocks, Int32(1)
            if k.bid < count:
                keys_barrier(False)
                sync.fence_async()
        index = k.bid
        while index < count:
            block = s.first
            if tail == 0:
                block = index // heads % splits
            while block < end:
                at = block_at(k, k.kv_pool, k.layers, page_of(k, block), layer, index % heads)
                for _ in cutlass.range(stages_per_block(c), unroll=1):
                    stage, parity, issued, landed, landed_parity = issue(
                        k.ring, at, Int32(KV_COPY), stage, parity, issued, landed, landed_parity
                    )
                    at = at + KV_COPY
                block = block + step
            index = index + c.ctas
    return stage, parity, issued, landed, landed_parity


# -- the head's results --------------------------------------------------------------------------
def load_logits(at):
    return ptx_read("ld.global.v2.f32 {{$w0},{$w1}}, [{$r0}];", [Float32] * 2, at)


@cute.jit
def note_row_tile(k: cutlass.Constexpr, p: cutlass.Constexpr, tile0: Int32, n: Int32,
                  row_tile: Int32, stats: cute.Tensor):  # fmt: skip
    """This CTA's logits of 16 rows, by the threads and in the order of the decode form."""
    c = k.c
    row = cutlass.min(row_tile * ROW_TILE + k.row, p.rows - 1)
    logits = arg(k, Arg.LOGITS) + Int64(row) * (c.logit_stride * 4)
    i = k.j
    while i < n:
        places = [cutlass.min(i + u * c.group, n - 1) for u in range(LOGITS_AT_ONCE)]
        cols = [(tile0 + place) * TILE + 2 * k.t for place in places]
        pairs = [load_logits(logits + Int64(col) * 4) for col in cols]
        for u in cutlass.range_constexpr(LOGITS_AT_ONCE):
            if i + u * c.group < n:
                head.add_logits(k, stats, cols[u], *pairs[u])
        i = i + LOGITS_AT_ONCE * c.group


@cute.jit
def publish_rows(k: cutlass.Constexpr, p: cutlass.Constexpr, phase: Int32):
    """Consumer warps, behind the head: this CTA's results of every row."""
    tile0, n, _, _ = plan_entry(k, phase)
    sync.consumer_sync(k.c.warps * 32)  # the logits of all warps are there
    note_time(k, Stamp.HEAD)
    for row_tile in cutlass.range(p.row_tiles, unroll=1):
        stats = head.new_stats()
        note_row_tile(k, p, tile0, n, row_tile, stats)
        first = row_tile * ROW_TILE
        head.publish_results(k, cutlass.min(p.rows - first, ROW_TILE), stats, first)
        sync.consumer_sync(k.c.warps * 32)
