"""Scripts for scripted.py and what it writes, as numpy arrays. Free of cutlass."""

import numpy as np

from cute_kernels.gpu.board import Desc, Segment

SCRIPT_WORDS = 96
FREE = 1  # the first token is the result of the step before

RECORD = np.dtype(
    [("token", "i4"), ("logit", "f4"), ("logprob", "f4"), ("flags", "i4"), ("ns", "i8"), ("", "i8")]
)


def decode_step(
    tokens, position: int, layers: int, *, parents=None, free=False, first=0, last=None
) -> np.ndarray:
    """The descriptor of a DECODE step, int32 [SCRIPT_WORDS].

    tokens: 1 to 16. position: keys below it are in the pages, and it is the first row's. parents:
    of the rows, earlier ones, -1 for the root (default: a chain).
    """
    d = np.zeros(SCRIPT_WORDS, np.uint32)
    n = len(tokens)
    parents = list(range(-1, n - 1)) if parents is None else parents
    d[Desc.TAG] = FREE if free else 0
    d[Desc.KIND], d[Desc.ROWS] = Segment.DECODE, n
    d[Desc.POSITION] = d[Desc.COMMITTED] = position
    d[Desc.FIRST_PHASE] = first
    d[Desc.LAST_PHASE] = 4 * layers + 1 if last is None else last
    d[Desc.TOKEN : Desc.TOKEN + n] = tokens
    for row, parent in enumerate(parents):
        path = [row]
        while parent >= 0:
            path.append(parent)
            parent = parents[parent]
        path.reverse()
        d[Desc.ROW_POSITION + row] = position + len(path) - 1
        for depth, r in enumerate(path):
            d[Desc.PATH + 2 * row + depth // 8] |= r << (depth % 8 * 4)
    return d.view(np.int32)


def prompt_step(rows: int, position: int, layers: int) -> np.ndarray:
    """The descriptor of a PROMPT step: `rows` tokens from `position` (a multiple of 64) on."""
    d = np.zeros(SCRIPT_WORDS, np.int32)
    d[Desc.KIND], d[Desc.ROWS] = Segment.PROMPT, rows
    d[Desc.POSITION] = d[Desc.COMMITTED] = position
    d[Desc.LAST_PHASE] = 4 * layers
    return d
