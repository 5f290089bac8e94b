"""Compaction: the target's keys and values of the accepted rows move to where they are committed.

Row ACCEPTED[i] of the step before stands at position base + ACCEPTED[i], base = POSITION - CONTEXT;
it becomes base + i. ACCEPTED ascends and ACCEPTED[i] >= i, so rows that stand where they belong are
the first ones, and a chain moves nothing. Keys keep their rotation: a row's position was base plus
its depth, and its depth is i.

A thread owns one logical 16-byte piece of one (layer, kv head, K or V), in all rows: it reads every
row that moves, then writes them. Sources and destinations overlap in rows, never in pieces: what a
thread overwrites nobody but itself reads, so no barrier stands between reading and writing, and the
one hand-off that leads from here to the next step's attention (the context's grid barrier, then the
gate) is all there is. The rows were written before the last step's results, and every CTA has read
them when this step begins.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.board import Desc
from cute_kernels.gpu.config import ROWS
from cute_kernels.gpu.core import desc_word, note_phase
from cute_kernels.gpu.kv_layout import PAGE


def place_of(k, position):
    """Page and place in it of a position, as page * 64 + place."""
    page = Int32(sync.ld_word(k.pages + Int64(position >> 6) * 4))
    return page * PAGE + (position & (PAGE - 1))


def piece_at(k, block, place, piece):
    """Address of a logical piece in the row at `place`. block: of (layer, kv head, K or V) in a
    page, in bytes."""
    s = k.c.shape
    page = Int64(place >> 6) * (s.layers * s.kv_heads * k.c.kv_block_bytes)
    row = (place & (PAGE - 1)) * (2 * s.head_dim) + (piece ^ (place & 7)) * 16
    return k.kv_pool + (page + block + Int64(row))


@cute.jit
def move_piece(k: cutlass.Constexpr, item: Int32, ok: Int32, first: Int32, n: Int32, place: Int32):
    """Piece `item` of all (layer, kv head, K or V, piece), in rows first .. n - 1. place: in lane i
    where row i comes from, in lane ROWS + i where it goes. Whole warps; ok: this lane has one."""
    s = k.c.shape
    pieces = s.head_dim // 8
    piece, half = item % pieces, item // pieces
    block = Int64(half >> 1) * k.c.kv_block_bytes + Int64((half & 1) * (2 * PAGE * s.head_dim))
    words = cute.make_rmem_tensor(cute.make_layout(ROWS * 4), Uint32)
    for i in cutlass.range_constexpr(ROWS):
        here = ok & Int32(i >= first) & Int32(i < n)
        at = piece_at(k, block, cute.arch.shuffle_sync(place, i), piece)
        for e, w in enumerate(sync.ld_fresh_words_if(here, at)):
            words[4 * i + e] = w
    for i in cutlass.range_constexpr(ROWS):
        at = piece_at(k, block, cute.arch.shuffle_sync(place, ROWS + i), piece)
        if (ok != 0) & (i >= first) & (i < n):
            values = [words[4 * i + e] for e in range(4)]
            sync.ptx_do("st.global.v4.b32 [{$r0}], {{$r1},{$r2},{$r3},{$r4}};", at, *values)


@cute.jit
def compact(k: cutlass.Constexpr):
    """Consumer warps of all CTAs, first in a DRAFT step."""
    note_phase(k, k.phases + 4)
    n = desc_word(k, Desc.CONTEXT)
    base = desc_word(k, Desc.POSITION) - n
    i = k.lane & (ROWS - 1)
    accepted = sync.lds_int(k.desc + (i + int(Desc.ACCEPTED)) * 4)
    moves = sync.lanes_where((accepted != i) & (k.lane < n))
    if moves != 0:
        place = Int32(0)
        if i < n:
            place = place_of(k, base + sync.select_int(k.lane < ROWS, accepted, i))
        items = k.layers * (k.c.shape.kv_heads * 2 * (k.c.shape.head_dim // 8))
        item = (k.wid * k.c.ctas + k.bid) * 32 + k.lane
        first = sync.lowest_bit(moves)
        while item - k.lane < items:
            move_piece(k, item, Int32(item < items), first, n, place)
            item = item + k.c.warps * k.c.ctas * 32
        sync.fence_async()
