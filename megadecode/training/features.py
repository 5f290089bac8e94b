"""The target's features of training sequences: kept where they fit, else computed on the fly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from megadecode.training.batches import Batches, Blocks
from megadecode.training.target import TorchTarget

FREE_SHARE = 0.65
FILL_TOKENS = 65_536


class Features:
    """Features of a corpus's samples on the target's device.

    keep: whether to compute all of them once, before training. A target's forward then costs
    nothing in a step; a corpus of 10 million tokens takes 58 GB for five taps of 576.
    """

    def __init__(
        self, target: TorchTarget, batches: Batches, taps: Sequence[int], keep: bool
    ) -> None:
        self.target, self.taps = target, tuple(taps)
        self._kept: torch.Tensor | None = None
        if keep:
            self._kept = self._all(batches)

    @staticmethod
    def fit(target: TorchTarget, batches: Batches, taps: Sequence[int]) -> bool:
        """Whether keeping them leaves enough of a GPU's memory to train in."""
        if target.device.type != "cuda":
            return False
        size = batches.corpus_tokens * len(taps) * target.config.hidden * target.dtype.itemsize
        free, _ = torch.cuda.mem_get_info(target.device)
        return size < FREE_SHARE * free

    def of(self, blocks: Blocks) -> torch.Tensor:
        """[S, T, taps, hidden] of the sequences of some blocks."""
        if self._kept is not None:
            # An embedding: its kernel counts in 64 bits where a table is as large as this one.
            found = F.embedding(blocks.places, self._kept)
            return found.unflatten(2, (len(self.taps), -1))
        return self.target.forward(blocks.sequences, self.taps)[1]

    def _all(self, batches: Batches) -> torch.Tensor:
        width = len(self.taps) * self.target.config.hidden
        shape = (batches.corpus_tokens, width)
        kept = torch.empty(shape, dtype=self.target.dtype, device=self.target.device)
        for size, samples in batches.buckets.items():
            rows = max(1, FILL_TOKENS // size)
            for first in range(0, len(samples), rows):
                some = samples[first : first + rows]
                blocks = batches.blocks_of(np.asarray(some), size, seed=0, count=1)
                made = self.target.forward(blocks.sequences, self.taps)[1].flatten(2)
                for sample, row in zip(some, made):
                    start, length = batches.starts[sample], batches.lengths[sample]
                    kept[start : start + length] = row[:length]
        return kept
