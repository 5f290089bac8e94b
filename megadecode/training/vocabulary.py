"""Which tokens a drafter drafts at all: the ones its target writes most.

For a small drafter the head over the whole vocabulary is half the work. The tokens that are left
out are rare, and were seldom drafted right: speculation loses less than it saves.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike

MULTIPLE = 32


def frequent_tokens(
    written: ArrayLike, vocab: int, count: int, always: Iterable[int] = ()
) -> tuple[tuple[int, ...], float]:
    """The `count` most frequent of the tokens `written` by the target, ascending, and their share
    of it. `always` are among them, whatever their number; ties go to lower ids.

    ValueError unless count is a positive multiple of 32 within the vocabulary.
    """
    if not 0 < count <= vocab or count % MULTIPLE:
        raise ValueError(
            f"count is {count}; expected a multiple of {MULTIPLE} up to the vocabulary's {vocab}"
        )
    counts = np.bincount(np.asarray(written, np.int64), minlength=vocab).astype(np.int64)
    weights = counts.copy()
    weights[list(always)] = np.iinfo(np.int64).max
    chosen = np.sort(np.argsort(-weights, kind="stable")[:count])
    share = counts[chosen].sum() / max(counts.sum(), 1)
    return tuple(int(token) for token in chosen), float(share)
