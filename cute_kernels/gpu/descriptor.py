"""What service.py and scripted.py have in common: rows of a tree into a descriptor, its tag, and
the decisions about rows."""

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


def ask_rows(table, lane):
    """Of a lane the row of ROW_TABLE that goes into a descriptor, eight words; lanes beyond 15 have
    none. To be asked for before it is known how many rows the tree has."""
    ok = Int32(lane < FEW_ROWS)
    at = table + Int64(lane) * (ROW_WORDS * 4)
    return [*sync.ld_words_if(ok, at), *sync.ld_words_if(ok, at + 16)]


@cute.jit
def put_rows(board: Int64, words: cute.Tensor, rows: Int32, lane: Int32):
    """The lanes' rows, `rows` of them, into the descriptor; words: of `ask_rows`. Rows beyond
    the 16 that a descriptor has are read from the table by the step itself."""
    if lane < cutlass.min(rows, Int32(FEW_ROWS)):
        desc = board + desc_at(0)
        one, two = desc + 4 * Int64(lane), desc + 8 * Int64(lane)
        sync.st_word(one + 4 * int(Desc.TOKEN), words[int(RowWord.TOKEN)])
        sync.st_word(one + 4 * int(Desc.ROW_POSITION), words[int(RowWord.POSITION)])
        bits = [nibbles(words[int(RowWord.PATH) + i]) for i in range(4)]
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


def ask_decision(board, row, ok):
    """A row's decision as four words (zeros and no access where ok is 0), and the largest of those
    that are waited for."""
    words = sync.ld_words_if(ok, decision_at(board, row))
    return words, sync.largest(words[: int(Decision.FLAGS) + 1])


def clear_decision(board, row):
    """Back to EMPTY; a fence follows before the next step."""
    sync.st_words(decision_at(board, row), [Uint32(sync.EMPTY)] * 4)
