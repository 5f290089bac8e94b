"""From a corpus to training blocks: length buckets, anchors, labels, weights.

A step's batch is a function of (seed, step) alone, so that a run that is resumed goes on exactly as
if it had never stopped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megadecode.training.corpus import Corpus

LONG = 1024


@dataclass(frozen=True)
class Blocks:
    """Blocks over several sequences.

    sequences: [S, T] ids, padded behind the end (causal attention never looks there).
    places: [S, T] where in the corpus these tokens stand; anywhere behind a sequence's end.
    tokens: [S, A, b]: the anchor's token, then MASK. anchors: [S, A] positions.
    labels: [S, A, b - 1]: slot k predicts the token at anchor + k; slot 0 predicts nothing.
    weights: [S, A, b - 1] fp32, summing to 1; 0 where the target wrote no such token.
    """

    sequences: torch.Tensor
    places: torch.Tensor
    tokens: torch.Tensor
    anchors: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor


def padded_length(lengths: NDArray[np.int64], shortest: int) -> NDArray[np.int64]:
    """To what samples are padded: multiples of `shortest` up to four times that, then powers of
    two times `shortest`."""
    powers = shortest << np.ceil(np.log2(np.maximum(lengths / shortest, 1))).astype(np.int64)
    return np.where(powers <= 4 * shortest, -(-lengths // shortest) * shortest, powers)


class Batches:
    """Draws training batches of about `tokens` tokens and `blocks` blocks from a corpus.

    Samples are sorted into buckets by length (see `padded_length`); a step takes one bucket, as
    often as its samples fill batches, times `long_weight` for those of more than 1,024 tokens.
    samples: only these, if given; held-out ones are left out in any case.
    decay: weight of slot k is exp(-(k - 1) / decay).
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        seed: int,
        block_size: int,
        mask_id: int,
        decay: float,
        tokens: int,
        blocks: int,
        device: torch.device,
        shortest: int = 128,
        long_weight: float = 1.0,
        samples: NDArray[np.int64] | None = None,
    ) -> None:
        self.seed, self.block_size, self.mask_id, self.device = seed, block_size, mask_id, device
        self.decay, self.tokens, self.blocks = decay, tokens, blocks
        self._ids = torch.from_numpy(corpus.tokens.astype(np.int32)).to(device)
        self._written = torch.from_numpy(corpus.written).to(device)
        self.starts, lengths = corpus.starts[:-1], corpus.lengths
        mine = np.flatnonzero(~corpus.held_out & (self._answers(corpus) >= 2))
        if samples is not None:
            mine = np.intersect1d(mine, samples)
        if not len(mine):
            raise ValueError("the corpus holds no answers of two tokens or more to train on")
        capacity = padded_length(lengths, shortest)
        self.lengths = lengths
        self.buckets: dict[int, NDArray[np.int64]] = {
            int(size): mine[capacity[mine] == size] for size in np.unique(capacity[mine])
        }
        share = np.array(
            [
                len(i) / self.rows(size) * (long_weight if size > LONG else 1.0)
                for size, i in self.buckets.items()
            ]
        )
        self._share = share / share.sum()

    @staticmethod
    def _answers(corpus: Corpus) -> NDArray[np.int64]:
        return corpus.starts[1:] - corpus.starts[:-1] - corpus.prompt_tokens

    @property
    def corpus_tokens(self) -> int:
        return len(self._ids)

    def inside(self, samples: NDArray[np.int64], size: int) -> torch.Tensor:
        """[S, size] bool: which places of these samples, padded to `size`, hold their tokens."""
        lengths = torch.from_numpy(self.lengths[samples]).to(self.device)
        return torch.arange(size, device=self.device) < lengths[:, None]

    def rows(self, size: int) -> int:
        """Sequences of `size` tokens in a batch."""
        return max(1, self.tokens // size)

    def at(self, step: int) -> Blocks:
        """The batch of a step."""
        rng = np.random.default_rng([self.seed, step])
        size = list(self.buckets)[rng.choice(len(self.buckets), p=self._share)]
        chosen = rng.choice(self.buckets[size], self.rows(size))
        return self.blocks_of(chosen, size, int(rng.integers(1 << 62)))

    def blocks_of(
        self, samples: NDArray[np.int64], size: int, seed: int, count: int | None = None
    ) -> Blocks:
        """Blocks at random anchors of some samples, padded to `size`; count: of each sample.

        An anchor is a token the target wrote and that another one follows: what an engine has as
        its newest token. Samples with fewer anchors than their share leave blocks of weight 0.
        """
        device, b = self.device, self.block_size
        starts = torch.from_numpy(self.starts[samples]).to(device)
        flat = starts[:, None] + torch.arange(size, device=device)
        flat = flat.clamp_(max=len(self._ids) - 1)
        inside = self.inside(samples, size)
        sequences = torch.where(inside, self._ids[flat], 0).long()
        written = self._written[flat] & inside
        ahead = torch.nn.functional.pad(written, (0, b))
        usable = written & ahead[:, 1 : size + 1]
        generator = torch.Generator(device).manual_seed(seed)
        drawn = torch.rand(usable.shape, generator=generator, device=device)
        count = count or min(size, max(1, self.blocks // len(samples)))
        score, anchors = torch.where(usable, drawn, -1.0).topk(count)
        slots = anchors[..., None] + torch.arange(b, device=device)
        flat_slots = slots.flatten(1)
        known = ahead.gather(1, flat_slots).view_as(slots).long().cumprod(-1)[..., 1:]
        labels = torch.nn.functional.pad(sequences, (0, b)).gather(1, flat_slots).view_as(slots)
        tokens = torch.full_like(slots, self.mask_id)
        tokens[..., 0] = labels[..., 0]
        decay = torch.exp(-torch.arange(b - 1, device=device) / self.decay)
        weights = known * (score >= 0)[..., None] * decay
        weights = weights / weights.sum().clamp_min(1e-9)
        return Blocks(sequences, flat, tokens, anchors, labels[..., 1:], weights)
