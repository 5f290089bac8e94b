"""What a drafter is made of and how it is trained: every choice, as one value in the records."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megadecode.config import ModelConfig
from megadecode.drafter import DrafterConfig
from megadecode.drafter.config import FULL, SLIDING

TAPS = 5
DECAY = {16: 7.0, 10: 5.0, 8: 4.0}


@dataclass(frozen=True)
class Recipe:
    """Sizes not given are the target's own.

    layers, block_size, taps: of the drafter; taps () are spread over the target's layers.
    sliding: how many of the layers, the first ones, see `window` positions only.
    is_causal: see `DrafterConfig`.
    start: `random`, or `target`: the layers start as copies of the target's last ones, reading the
    last tap. decay: weight of slot k in the loss is exp(-(k - 1) / decay); None: by block size.
    steps: optimiser steps; warm_up: the first of them, at a rising rate; then a cosine down to
    `last_rate` of `rate`. tokens, blocks: of a step. clip: of the gradient's norm.
    shortest, long_weight: see `Batches`.
    """

    layers: int = 2
    block_size: int = 8
    taps: tuple[int, ...] = ()
    sliding: int = 0
    window: int = 1024
    is_causal: bool | None = None
    ffn: int | None = None
    start: str = "random"
    decay: float | None = None
    steps: int = 20_000
    warm_up: int = 400
    rate: float = 1e-3
    last_rate: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    clip: float = 1.0
    tokens: int = 16_384
    blocks: int = 2048
    shortest: int = 128
    long_weight: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.start not in ("random", "target"):
            raise ValueError(f"start is {self.start!r}; expected 'random' or 'target'")
        if not 0 <= self.sliding <= self.layers:
            raise ValueError(f"sliding is {self.sliding}; expected 0 to {self.layers} layers")

    def config(self, target: ModelConfig, mask_token_id: int, fingerprint: str) -> DrafterConfig:
        """The drafter's shape. Raises ModelError for one that no engine runs."""
        kinds = (SLIDING,) * self.sliding + (FULL,) * (self.layers - self.sliding)
        return DrafterConfig(
            name=f"{target.name} drafter",
            layers=self.layers, hidden=target.hidden, heads=target.heads,
            kv_heads=target.kv_heads, head_dim=target.head_dim, ffn=self.ffn or target.ffn,
            vocab=target.vocab, block_size=self.block_size,
            taps=self.taps or spread_taps(target.layers), target_layers=target.layers,
            mask_token_id=mask_token_id, rope_theta=target.rope_theta,
            layer_types=kinds if self.sliding else (), window=self.window if self.sliding else None,
            is_causal=self.is_causal, target_fingerprint=fingerprint,
        )  # fmt: skip

    def rate_at(self, step: int, done: float | None = None) -> float:
        """The learning rate of a step, counted from 0. done: share of the time that has passed,
        where a clock ends the run and not `steps`."""
        if step < self.warm_up:
            return self.rate * (step + 1) / self.warm_up
        if done is None:
            done = (step - self.warm_up) / max(self.steps - self.warm_up, 1)
        cosine = 0.5 + 0.5 * math.cos(math.pi * min(done, 1.0))
        return self.rate * (self.last_rate + (1 - self.last_rate) * cosine)

    @property
    def slot_decay(self) -> float:
        return self.decay or DECAY.get(self.block_size, self.block_size / 2)

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self)


def spread_taps(layers: int) -> tuple[int, ...]:
    """Five layers from the second to the third last, evenly (DFlash, arXiv 2602.06036); fewer
    where the target has not so many."""
    places = np.linspace(1, max(layers - 3, 1), TAPS)
    return tuple(sorted({min(math.floor(place + 0.5), layers - 1) for place in places}))
