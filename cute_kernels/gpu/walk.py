"""The walk through a verified tree, on the service warp: which tokens a step gives, and whether the
request ends with them.

Lane l has rows l, l + 32, l + 64, l + 96: their decisions (four words each), and of the tree a word
each that holds parent and token (`edge`). What the walk finds lies over the lanes too: lane i has
the i-th token.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.gpu import mapped, sync
from cute_kernels.gpu.board import MAX_ROWS, ROW_WORDS, Decision, RowWord
from cute_kernels.gpu.config import MAX_VOCAB
from cute_kernels.gpu.descriptor import ask_decision, clear_decision
from host.wire import FinishReason

TURNS = MAX_ROWS // 32  # rows of a lane
NOBODY = 254  # parent of a row that the tree does not have
TOKEN_BITS = 24
assert MAX_VOCAB <= 1 << TOKEN_BITS


def edge(parent, token):
    """A row's place in the tree as one word: the registers of this warp are few."""
    return (parent << TOKEN_BITS) | token


def tree_words():
    """The edges of a lane's rows."""
    return cute.make_rmem_tensor(cute.make_layout(TURNS), Int32)


@cute.jit
def read_tree(table: Int64, rows: Int32, lane: Int32, tree: cute.Tensor):
    """The lanes' rows of ROW_TABLE. A step of no or one row has no tree, and its table may be stale
    or not be there."""
    for i in cutlass.range_constexpr(TURNS):
        row = lane + 32 * i
        ok = Int32((row < rows) & (rows > 1))
        words = sync.ld_words_if(ok, table + Int64(row) * (ROW_WORDS * 4))
        found = edge(
            sync.as_int(words[int(RowWord.PARENT)]), sync.as_int(words[int(RowWord.TOKEN)])
        )
        tree[i] = sync.select_int(ok, found, Int32(edge(NOBODY, 0) - 2**32))


def ask_decisions(board, rows, lane, words):
    """One round of loads of the decisions of all rows into `words`, 4 a row of the lane. Returns
    the largest word: EMPTY until all are there."""
    worst = Uint32(0)
    for i in range(TURNS):
        row = lane + 32 * i
        found, largest = ask_decision(board, row, Int32(row < rows))
        worst = sync.larger(worst, largest)
        for e, w in enumerate(found):
            words[4 * i + e] = w
    return worst


@cute.jit
def clear_decisions(board: Int64, rows: Int32, lane: Int32):
    for i in cutlass.range_constexpr(TURNS):
        if lane + 32 * i < rows:
            clear_decision(board, lane + 32 * i)


def _of_row(words, field: Decision, row):
    """A word of a row's decision, for all lanes."""
    turn, mine = row >> 5, words[int(field)]
    for i in range(1, TURNS):
        mine = sync.select(turn == i, words[4 * i + int(field)], mine)
    return sync.as_int(cute.arch.shuffle_sync(mine, row & 31))


@cute.jit
def child_of(tree: cute.Tensor, rows: Int32, row: Int32, token: Int32):
    """The child with that token, -1 if the tree has none."""
    found, wanted = Int32(-1), edge(row, token)
    if rows > 32:
        for i in cutlass.range_constexpr(TURNS - 1, 0, -1):
            lanes = mapped.ballot(tree[i] == wanted)
            if lanes != Uint32(0):
                found = mapped.first_lane(lanes) + 32 * i
    lanes = mapped.ballot(tree[0] == wanted)
    if lanes != Uint32(0):
        found = mapped.first_lane(lanes)
    return found


@cute.jit
def walk(
    lane: Int32, rows: Int32, words: cute.Tensor, tree: cute.Tensor, stop: Int32, least: Int32,
    most: Int32,
):  # fmt: skip
    """From the root down as long as the tree has the decided token.

    stop: of the lane a stop id, or -1. least: tokens of this step from which on stops count. most:
    tokens of this step that the request may still have, at least 1. The rules are those of
    cpu.commit: the earliest end wins, a stop on the last allowed token is a stop, and tokens before
    a row with NaN count.

    Returns (tokens, reason or 0, and of a lane below `tokens` its token, the bits of its
    log-probability, its row). The rows are there for the next step's compaction.
    """
    count, reason, row, running = Int32(0), Int32(0), Int32(0), Int32(1)
    my_token, my_logprob, my_row = Int32(0), Int32(0), Int32(0)
    while running != 0:
        token = _of_row(words, Decision.TOKEN, row)
        logprob = _of_row(words, Decision.LOGPROB, row)
        flags = _of_row(words, Decision.FLAGS, row)
        following = Int32(-1)
        if flags != 0:
            reason = Int32(int(FinishReason.ERROR))
        else:
            is_mine = Int32(lane == count)
            my_token = sync.select_int(is_mine, token, my_token)
            my_logprob = sync.select_int(is_mine, logprob, my_logprob)
            my_row = sync.select_int(is_mine, row, my_row)
            count = count + 1
            stops = mapped.ballot(stop == token)
            if count == most:
                reason = Int32(int(FinishReason.LENGTH))
            if (stops != Uint32(0)) & (count >= least):
                reason = Int32(int(FinishReason.STOP))
            following = child_of(tree, rows, row, token)
        row = following
        running = Int32((reason == 0) & (following >= 0))
    return count, reason, my_token, my_logprob, my_row
