"""Scripted acceptance: candidates that are right as often as they are told to be.

For measuring what a step costs at a given acceptance where no trained drafter is at hand. The text
is decoded plainly first; a script then proposes it, position by position, with planned mistakes.
What comes of it says nothing about a drafter: figures made so are labelled `scripted`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SCRIPTED = "scripted"


class Candidates(NamedTuple):
    """Proposals by absolute position, in the place of a drafter's. K: how many a position has."""

    ids: np.ndarray  # [positions, K] int32
    logprobs: np.ndarray  # [positions, K] float32, descending
    widths: np.ndarray  # [positions] int32: how many of them count


def propose(
    tokens: Sequence[int],
    first: int,
    *,
    vocab: int,
    acceptance: float = 0.7,
    second: float = 0.5,
    width: int = 16,
    seed: int = 0,
) -> Candidates:
    """Candidates for a text whose first token stands at position `first`.

    The likeliest candidate of a position is the text's token with probability `acceptance`; in
    `second` of the other cases that token is the runner-up, else it is not among the candidates.
    """
    if not 0 <= acceptance <= 1 or not 0 <= second <= 1:
        raise ValueError(f"acceptance {acceptance} and second {second} are probabilities")
    if not 2 <= width < vocab:
        raise ValueError(f"width is {width}; it must be 2 to {vocab - 1}")
    rng = np.random.default_rng(seed)
    n = first + len(tokens)
    truth = np.zeros(n, np.int64)
    truth[first:] = tokens
    # others: `width` tokens that follow the truth at distinct distances, so that none is the truth
    step = 1 + rng.integers(0, (vocab - 1) // width, n)
    ids = (truth[:, None] + step[:, None] * np.arange(1, width + 1)) % vocab
    draw, other = rng.random(n), rng.random(n)
    hit = draw < acceptance
    near = ~hit & (other < second)
    ids[hit, 0], ids[near, 1] = truth[hit], truth[near]
    share = np.full(width, 0.1 / max(width - 2, 1))
    share[:2] = max(acceptance, 0.5), (1 - max(acceptance, 0.5)) * second + 1e-3
    logprobs = np.sort(np.log(share / share.sum()))[::-1]
    widths = np.where(np.arange(n) < first, 0, width)
    return Candidates(
        ids.astype(np.int32), np.tile(logprobs.astype(np.float32), (n, 1)), widths.astype(np.int32)
    )


def expected_tau(acceptance: float, drafted: int) -> float:
    """Tokens a step of a chain of `drafted` proposals commits, on average."""
    return float(sum(acceptance**i for i in range(drafted + 1)))
