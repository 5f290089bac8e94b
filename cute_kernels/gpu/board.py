"""The board: the words in device memory through which the CTAs of the kernel agree on a step.

The service warp of CTA 0 writes the *descriptor* of the next step and, last, its tag; every other
warp waits for the tag it expects (one more than the last). A descriptor is overwritten only when
every CTA has delivered its *results* of the step, and to do that it has read the descriptor. Byte
layout here, free of cutlass, so that host, device and tests share it.

A CTA delivers its results of DECODE, ROWS and DRAFT through RESULT, of PROMPT, LEAVE and a DRAFT
without rows by adding 1 to DONE (red.release.gpu). On LEAVE that is its last access to the board:
only then may the service warp write FIRST_TAG, since a CTA that starts late would otherwise begin
with the tag it should wait for.

CTA r takes the results of row r: in a DRAFT step it ranks the row's logits (rank.py), else it
decides its token (decide.py) if Desc.DECIDE asks for it; whoever takes a row's results sets them
back to EMPTY. CTA 0 then makes the tree of the ranks (tree.py), in ROW_TABLE, and the service warp
the descriptor of the step that verifies it.

A PROMPT step reads its tokens, int32 by absolute position, from the array TOKENS of the kernel's
arguments; the service warp has copied them there, and a DECODE step's token comes in TOKEN.
"""

from enum import IntEnum

import numpy as np

MAX_CTAS = 256
MAX_ROWS = 128  # rows of a step that have logits
FEW_ROWS = 16  # rows of a DECODE or DRAFT step: one row tile
RANKS = 128  # candidates of a drafted position, at most
PATH_BYTES = 16  # of a row's path: rows from the root to itself, a byte each
WORD = 4


class Segment(IntEnum):
    """What a step does."""

    DECODE = 1  # target and head over up to 16 rows, decode form
    PROMPT = 2  # target over a chunk of a prompt, no head; with a drafter, its context too
    LEAVE = 3  # all CTAs leave the kernel
    DRAFT = 4  # compaction, the drafter's context, its block, ranks, the tree
    ROWS = 5  # target and head over 17 to 128 rows of a tree, row form


class Desc(IntEnum):
    """Words of the descriptor. TAG is written last, with release."""

    TAG = 0
    KIND = 1
    ROWS = 2
    POSITION = 3  # absolute position of the first row (of a tree: its root)
    COMMITTED = 4  # keys below this position are in the pages
    FIRST_PHASE = 5  # phases [FIRST_PHASE, LAST_PHASE) of the step run; 4 per layer and the head
    LAST_PHASE = 6
    NEXT = (
        7  # the Segment whose first weights the producer may ask for before the next tag; a guess
    )
    DECIDE = 8  # 1: the CTAs decide the rows (decide.py); 0: the service warp merges row 0 itself
    CONTEXT = 9  # of DRAFT: positions POSITION - CONTEXT .. POSITION - 1 are new to the drafter
    BUDGET = 10  # of DRAFT: nodes of the tree at most
    DEPTH = 11  # of DRAFT: its deepest level
    CHAIN = 12  # of DRAFT: 1 for a chain
    FIRST_DRAFTED = 13  # of DRAFT: first row that predicts; 1, or 0 where the anchor does too
    TOKEN = 16  # 16 words: the rows' token ids
    ROW_POSITION = 32  # 16 words: the rows' absolute positions
    PATH = 48  # 16 x 2 words: the row's ancestors and itself, 4 bits each, root first
    ACCEPTED = 80  # of DRAFT, 16 words: row of the last step that new position i was, ascending


class Board(IntEnum):
    """First words of the parts; counters have 128-byte lines of their own."""

    DESC = 0
    FIRST_TAG = 96  # the last tag of the launch before: read at the start, written on leaving
    DONE = 128  # CTAs done with PROMPT, a DRAFT step without rows, or LEAVE: monotone
    BARRIER = 160  # see grid_barrier.py; starts at 0
    PHASE = 192  # a word a CTA: 1 + the phase it is in, 0 between steps
    RANK_TAG = 448  # [16]: the tag of the DRAFT step whose ranks of that row are complete
    TREE_TAG = 480  # the tag of the DRAFT step whose tree is complete in ROW_TABLE
    TREE_ROWS = 481  # its rows, the root counted
    STAMP = 512  # [16] int64, of CTA 0: see Stamp
    DECISION = 576  # [MAX_ROWS][4]: see Decision; EMPTY until a row is decided
    RESULT = 576 + MAX_ROWS * 4  # [MAX_ROWS][MAX_CTAS][4]: see Result


class Result(IntEnum):
    """What a CTA says about its share of a row's logits; EMPTY until then, each word for itself.

    The largest logit, the smallest token id that has it, the sum of exp(logit - largest); FLAGS is
    1 where a logit is NaN or +inf.
    """

    LOGIT = 0
    TOKEN = 1
    SUM = 2
    FLAGS = 3


class Decision(IntEnum):
    """What the CTA that decides a row says; EMPTY until then, each word for itself.

    FLAGS is 1 where the row's logits hold NaN or +inf or nothing is left to choose from.
    """

    TOKEN = 0
    LOGPROB = 1
    FLAGS = 2


class Stamp(IntEnum):
    """Times of the step (globaltimer, ns) as CTA 0 passed them, for the split of a step's time."""

    GATE = 0  # of any step
    COMPACTED = 1  # of DRAFT
    CONTEXT = 2
    DRAFTED = 3  # the head's last sums
    RANKED = 4
    TREE = 5
    HEAD = 6  # of DECODE and ROWS: the head's last sums


class RowWord(IntEnum):
    """Words of a row in Arg.ROW_TABLE: the tree as the step after DRAFT verifies it."""

    TOKEN = 0
    POSITION = 1  # absolute: the root's plus the depth
    PARENT = 2  # row, -1 for the root
    DEPTH = 3
    PATH = 4  # 4 words, 16 bytes: rows from the root to the row itself


ROW_WORDS = 8
WORDS = Board.RESULT + MAX_ROWS * MAX_CTAS * 4


def desc_at(field: int) -> int:
    """Byte offset of a descriptor word."""
    return (Board.DESC + field) * WORD


def result_at(row: int, cta: int) -> int:
    """Byte offset of a CTA's four words about a row."""
    return (Board.RESULT + (row * MAX_CTAS + cta) * 4) * WORD


def make_board(first_tag: int = 0, first_count: int = 0) -> np.ndarray:
    """The board before the first launch, int32: no results; tag and DONE start anywhere."""
    board = np.zeros(WORDS, np.int32)
    board[Board.DECISION :] = -1
    board[Board.DESC + Desc.TAG] = board[Board.FIRST_TAG] = first_tag
    board[Board.DONE] = first_count
    return board
