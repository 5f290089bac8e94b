"""What attention needs at the start of a step, and its KV blocks on their way into the ring.

A CTA's stages of a layer: its share of the blocks below the largest c(p), ascending, then, where it
merges rows, the blocks of their tails. A block is one stage, or K and V a stage each.

Prefetch rule. A step's bulk copies read pages that a step before it wrote with generic stores:
the producer asks for KV only behind the step's tag, with a proxy fence between that acquire and the
copies (producer.run_producer; the writers' side: attention.write_back). Rows of a page at or
behind the committed length may be written while a copy reads them; nobody looks at them.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.gpu import sync
from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.attention_plan import AttentionSmem
from cute_kernels.gpu.board import Desc
from cute_kernels.gpu.config import CHUNK_BYTES
from cute_kernels.gpu.pages import block_at, issue_block, page_of
from cute_kernels.gpu.rotary import load_rope


class Places:
    """Trace-time: where attention's parts lie in shared memory, which share is this CTA's, and
    what its rows are. A form of attention sets here what is its own, and uses the same functions.

    positions: shared address of int32 [rows], the absolute positions of the rows of the tile; None:
    they stand at Desc.POSITION and on, one by one.
    paths, path_bytes: shared address of the rows' paths, that many bytes each, root first: 8, rows
    as nibbles (Desc.PATH), or 16, a byte a row (board.RowWord.PATH).
    new: shared address of the step's own K and V rows, [2][16] as in a page; None: row i's lie in
    its page at position Desc.COMMITTED + i, and come with the ring like any other key.
    chunk_bytes: of 32 columns of the output (word_at).
    norms, normed, rope_table: where the RMSNorms of q and k are, whether there are any, and the
    rotary factors. tail: whether rows have keys beside those in blocks (attention_tail.py).
    polled: whether parts of splits are awaited word by word. split: whose blocks are this CTA's;
    turn: the first row that it merges.
    """

    norms, rope_table, tail, polled = Arg.QK_NORM, Arg.ROPE, True, True
    path_bytes, chunk_bytes = 8, CHUNK_BYTES

    def __init__(self, k):
        self.smem = s = AttentionSmem.of(k.c)
        base = k.attention
        self.new, self.rope, self.queries = base + s.new, base + s.rope, base + s.queries
        self.tails, self.stats = base + s.tails, base + s.stats
        self.places, self.step = base + s.places, base + s.step
        self.positions = k.desc + 4 * int(Desc.ROW_POSITION)
        self.paths = k.desc + 4 * int(Desc.PATH)
        self.normed = k.c.shape.qk_norm
        shift = k.c.splits.bit_length() - 1
        self.kv_head, self.split = k.bid >> shift, k.bid & (k.c.splits - 1)
        self.turn = k.c.splits - 1 - self.split


def row_position(k, p, row):
    if p.positions is None:
        return desc_int(k, Desc.POSITION) + row
    return sync.lds_int(p.positions + row * 4)


def path_row(p, row, depth):
    """The row at that depth of a row's path."""
    if p.path_bytes == 16:
        return sync.lds_byte(p.paths + row * 16 + depth)
    both = sync.lds_byte(p.paths + row * 8 + (depth >> 1))
    return (both >> ((depth & 1) * 4)) & 15


def desc_int(k, field):
    """A word of the descriptor."""
    return sync.lds_int(k.desc + int(field) * 4)


def block_range(k, p, rows):
    """(first block in a tail, blocks of tails, blocks below the largest c(p)); all lanes."""
    position = row_position(k, p, cutlass.min(k.lane, rows - 1))
    low = high = cutlass.max(position - 15, 0) >> 6
    for shift in range(5):
        low = cutlass.min(low, cute.arch.shuffle_sync_bfly(low, offset=1 << shift))
        high = cutlass.max(high, cute.arch.shuffle_sync_bfly(high, offset=1 << shift))
    pages = (desc_int(k, Desc.COMMITTED) + 63) >> 6
    return low, cutlass.max(pages - low, 0), high


# -- consumers ---------------------------------------------------------------------------------
@cute.jit
def load_factors(k: cutlass.Constexpr, p: cutlass.Constexpr, rows: Int32):
    """Consumer warps: the rows' rotary factors."""
    per_row = min(k.c.shape.head_dim // 4, 32)  # lanes
    row = (k.wid * 32 + k.lane) // per_row
    while row < rows:
        to = p.rope + row * p.smem.rope_stride
        load_rope(k, p, row_position(k, p, row), to, k.lane % per_row, per_row)
        row = row + k.c.warps * 32 // per_row


@cute.jit
def begin_step(k: cutlass.Constexpr, rows: Int32):
    """Consumer warps, once a DECODE step behind the gate: the rows' rotary factors, where their K
    and V go, and the range of blocks. A barrier of the consumers must follow."""
    c, p = k.c, Places(k)
    if p.kv_head < c.shape.kv_heads:
        load_factors(k, p, rows)
        if k.wid == 0:
            tail_first, tail_count, main_blocks = block_range(k, p, rows)
            if k.lane == 0:
                sync.sts_words(p.step, [tail_first, tail_count, main_blocks, rows])
        if (k.wid == 1) & (k.lane < rows):
            at = desc_int(k, Desc.POSITION) + k.lane
            page = sync.ld_word(k.pages + Int64(at >> 6) * 4)
            sync.sts_int(p.places + k.lane * 4, Int32(page) * 64 + (at & 63))


# -- the producer ------------------------------------------------------------------------------
@cute.jit
def begin_produce(k: cutlass.Constexpr):
    """The producer warp, once a DECODE step behind its tag. Returns what `produce_kv` needs: blocks
    of this CTA below c(p), all its blocks, the first block of a tail, the last block, and the pages
    of its first two blocks."""
    c, p = k.c, Places(k)
    rows = desc_int(k, Desc.ROWS)
    tail_first, tail_count, main_blocks = block_range(k, p, rows)
    n_main = cutlass.max(main_blocks - p.split + c.splits - 1, 0) // c.splits
    total = n_main
    if p.turn < rows:
        total = total + tail_count
    if p.kv_head >= c.shape.kv_heads:
        total = Int32(0)
    last = cutlass.max(tail_first + tail_count - 1, 0)
    page0 = page_of(k, nth_block(k, p, n_main, tail_first, last, Int32(0)))
    page1 = page_of(k, nth_block(k, p, n_main, tail_first, last, Int32(1)))
    return n_main, total, tail_first, last, page0, page1


@cute.jit
def nth_block(k: cutlass.Constexpr, p: cutlass.Constexpr, n_main: Int32, tail_first: Int32,
             last: Int32, i: Int32):  # fmt: skip
    """The i-th block this CTA reads; beyond its last, some block of the slot."""
    block = p.split + i * k.c.splits
    if i >= n_main:
        block = tail_first + (i - n_main)
    return cutlass.min(block, last)


@cute.jit
def produce_kv(
    k: cutlass.Constexpr,
    step: cutlass.Constexpr,
    layer: Int32,
    stage: Int32,
    parity: Int32,
    issued: Int32,
    landed: Int32,
    landed_parity: Int32,
):
    """The producer warp, behind the layer's qkv weights: this CTA's committed KV of the layer.
    Pages are looked up two blocks ahead, out of the stream's way."""
    layers, p = k.c.shape.layers, Places(k)
    n_main, total, tail_first, last, page0, page1 = step
    for i in cutlass.range(total, unroll=1):
        now, page0 = page0, page1
        page1 = page_of(k, nth_block(k, p, n_main, tail_first, last, i + 2))
        stage, parity, issued, landed, landed_parity = issue_block(
            k, block_at(k, k.kv_pool, layers, now, layer, p.kv_head),
            stage, parity, issued, landed, landed_parity,
        )  # fmt: skip
    return stage, parity, issued, landed, landed_parity
