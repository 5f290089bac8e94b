"""tau of the chain on held-out samples, quickly: the figure to watch while training.

The full evaluation, with trees and by domain, is `megadecode.training.evaluate`.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from megadecode.training.corpus import Corpus
from megadecode.training.head_loss import head_loss
from megadecode.training.trainer import CHUNK_ROWS, SIZE, Trainer

MOST_ANCHORS = 384


class HeldOutChain:
    """Some greedy held-out answers of short texts, drafted at every anchor they have."""

    def __init__(self, trainer: Trainer, corpus: Corpus, samples: int, held_out: bool = True):
        fits = corpus.lengths <= SIZE
        mine = np.flatnonzero((corpus.held_out == held_out) & (corpus.temperature == 0) & fits)
        answers = corpus.lengths - corpus.prompt_tokens
        self.samples = mine[answers[mine] >= 2][:samples]
        self.trainer = trainer

    @torch.no_grad()
    def tau(self) -> float | None:
        """Tokens committed per verify step of the chain, along its own walk; None: no samples."""
        trainer, tokens, steps = self.trainer, 0, 0
        size = SIZE
        rows = max(1, trainer.recipe.tokens // size)
        for first in range(0, len(self.samples), rows):
            chosen = self.samples[first : first + rows]
            batch = trainer.batches.blocks_of(chosen, size, seed=0, count=MOST_ANCHORS)
            _, features = trainer.target.forward(batch.sequences, trainer.config.taps)
            hidden = trainer.draft(features, batch.tokens, batch.anchors)
            weights = batch.weights.flatten()
            _, right = head_loss(
                hidden.flatten(0, 2), trainer.target.head, batch.labels.flatten(), weights,
                trainer.gradient, CHUNK_ROWS,
            )  # fmt: skip
            right = right.view_as(batch.labels) & (batch.weights > 0)
            accepted = right.long().cumprod(-1).sum(-1).cpu().numpy()
            usable = (batch.weights[..., 0] > 0).cpu().numpy()
            for anchors, row, real in zip(batch.anchors.cpu().numpy(), accepted, usable):
                committed, taken = walk(anchors[real], row[real])
                tokens, steps = tokens + committed, steps + taken
        return tokens / steps if steps else None


def walk(anchors: NDArray[np.int64], accepted: NDArray[np.int64]) -> tuple[int, int]:
    """Tokens and steps of the walk over anchors (any order), each with its accepted drafts."""
    at = dict(zip(anchors.tolist(), accepted.tolist()))
    tokens = steps = 0
    position = min(at, default=0)
    while position in at:
        tokens, steps = tokens + at[position] + 1, steps + 1
        position += at[position] + 1
    return tokens, steps
