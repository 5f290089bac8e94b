"""The board: the words in device memory through which the CTAs of the kernel agree on a step.

The service warp of CTA 0 writes the *descriptor* of the next step and, last, its tag; every other
warp waits for the tag it expects (one more than the last). A descriptor is overwritten only when
every CTA has delivered its *results* of the step, and to do that it has read the descriptor. Byte
layout here, free of cutlass, so that host, device and tests share it.

A CTA delivers its results of a DECODE step through RESULT, of PROMPT and LEAVE by adding 1 to DONE
(red.release.gpu). On LEAVE that is its last access to the board: only then may the service warp
write FIRST_TAG, since a CTA that starts late would otherwise begin with the tag it should wait for.

A PROMPT step reads its tokens, int32 by absolute position, from the array TOKENS of the kernel's
arguments; the service warp has copied them there, and a DECODE step's token comes in TOKEN.
"""

from enum import IntEnum

import numpy as np

MAX_CTAS = 256
MAX_ROWS = 16  # rows of a decode step in this form
WORD = 4


class Segment(IntEnum):
    """What a step does."""

    DECODE = 1  # target and head over up to 16 rows
    PROMPT = 2  # target over a chunk of a prompt, no head
    LEAVE = 3  # all CTAs leave the kernel


class Desc(IntEnum):
    """Words of the descriptor. TAG is written last, with release."""

    TAG = 0
    KIND = 1
    ROWS = 2
    POSITION = 3  # absolute position of the first row (of a tree: its root)
    COMMITTED = 4  # keys below this position are in the pages
    FIRST_PHASE = 5  # phases [FIRST_PHASE, LAST_PHASE) of the step run; 4 per layer and the head
    LAST_PHASE = 6
    TOKEN = 16  # 16 words: the rows' token ids
    ROW_POSITION = 32  # 16 words: the rows' absolute positions
    PATH = 48  # 16 x 2 words: the row's ancestors and itself, 4 bits each, root first


class Board(IntEnum):
    """First words of the parts; counters have 128-byte lines of their own."""

    DESC = 0
    FIRST_TAG = 96  # the last tag of the launch before: read at the start, written on leaving
    DONE = 128  # CTAs that have finished a PROMPT step or are about to leave, monotone
    BARRIER = 160  # the grid barrier of prompt phases: prompt.grid_barrier; starts at 0
    PHASE = 192  # a word a CTA: 1 + the phase it is in, 0 between steps
    RESULT = 512  # [16 rows][MAX_CTAS][4]: see Result


class Result(IntEnum):
    """What a CTA says about its share of a row's logits; EMPTY until then, each word for itself.

    The largest logit, the smallest token id that has it, the sum of exp(logit - largest); FLAGS is
    1 where a logit is NaN or +inf.
    """

    LOGIT = 0
    TOKEN = 1
    SUM = 2
    FLAGS = 3


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
    board[Board.RESULT :] = -1
    board[Board.DESC + Desc.TAG] = board[Board.FIRST_TAG] = first_tag
    board[Board.DONE] = first_count
    return board
