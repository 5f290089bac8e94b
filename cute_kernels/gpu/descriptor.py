"""What service.py and scripted.py have in common: parts of a descriptor, waits for a step's end."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.board import (
    FEW_ROWS,
    ROW_WORDS,
    Board,
    Decision,
    Desc,
    RowWord,
    desc_at,
)
from cute_kernels.gpu.tree_rows import nibbles


def row_at(table, row):
    """Address of a row of ROW_TABLE."""
    return table + Int64(row) * (ROW_WORDS * 4)


@cute.jit
def put_rows(board: Int64, table: Int64, rows: Int32, lane: Int32):
    """The first rows of ROW_TABLE into the descriptor; a warp, a lane a row. Rows beyond the 16
    that a descriptor has are read from the table by the step itself."""
    if lane < cutlass.min(rows, Int32(FEW_ROWS)):
        at = row_at(table, lane)
        first, path = sync.ld_words(at), sync.ld_words(at + 4 * int(RowWord.PATH))
        desc = board + desc_at(0)
        one, two = desc + 4 * Int64(lane), desc + 8 * Int64(lane)
        sync.st_word(one + 4 * int(Desc.TOKEN), first[int(RowWord.TOKEN)])
        sync.st_word(one + 4 * int(Desc.ROW_POSITION), first[int(RowWord.POSITION)])
        bits = [nibbles(w) for w in path]
        sync.st_word(two + 4 * int(Desc.PATH), bits[0] | (bits[1] << 16))
        sync.st_word(two + 4 * (int(Desc.PATH) + 1), bits[2] | (bits[3] << 16))


@cute.jit
def put_tag(board: Int64, tag: Int32, lane: Int32):
    """Open the step: behind everything that any lane has written before. A warp."""
    sync.fence_gpu()
    cute.arch.sync_warp()
    if lane == 0:
        sync.st_release(board + desc_at(int(Desc.TAG)), tag)
    cute.arch.sync_warp()


def decision_at(board, row):
    return board + int(Board.DECISION) * 4 + Int64(row) * 16


def ask_decision(board, row):
    """A row's decision as four words, and the largest of those that are waited for."""
    words = sync.ld_words(decision_at(board, row))
    return words, sync.largest(words[: int(Decision.FLAGS) + 1])


def clear_decision(board, row):
    """Back to EMPTY; a fence follows before the next step."""
    sync.st_words(decision_at(board, row), [Uint32(sync.EMPTY)] * 4)
