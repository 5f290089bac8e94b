"""Models and drafters for the comparisons: real weights, or random ones of known shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from megadecode.drafter.find import choose_drafter
from megadecode.drafter.io import Drafter
from megadecode.models.load import load_model
from megadecode.models.weights import Weights
from megadecode.presets import NAMES, Preset


class OnDevice:
    """Weights that were read once and stay where they are used, for one rival after another."""

    def __init__(self, weights: Weights, device: str, dtype: torch.dtype) -> None:
        self.config, self._weights = weights.config, weights
        self._device, self._dtype = device, dtype
        self._made: dict[str, torch.Tensor] = {}

    def tensor(self, name: str) -> Any:
        if name == "head" and self.config.tied_embeddings:
            name = "embed"
        if name not in self._made:
            values = self._weights.tensor(name)
            if isinstance(values, np.ndarray):
                values = torch.from_numpy(np.array(values))  # a writable copy
            self._made[name] = values.to(self._device, self._dtype)
        return self._made[name]


def open_model(name: str, device: str) -> tuple[Weights, Drafter]:
    """A known model or a file with the drafter that belongs to it, or a preset's shape, both with
    random weights. SystemExit for a model without a drafter."""
    if name in NAMES:
        preset = Preset(name, where=device)
        return preset, preset.drafter()
    weights = load_model(name)
    drafter = choose_drafter("auto", weights)
    if drafter is None:
        raise SystemExit(f"no drafter belongs to {name}")
    return weights, drafter


def gaps(weights: Weights, device: str, prompt: list[int], tokens: list[int]) -> list[float]:
    """For each token, how far its fp32 logit lies below the largest at that place: 0 where fp32
    would have chosen it too."""
    from megadecode.training.target import TorchTarget

    target = TorchTarget(weights, device, torch.float32)
    ids = torch.tensor([[*prompt, *tokens[:-1]]], device=device)
    hidden, _ = target.forward(ids)
    logits = target.logits(hidden[0, len(prompt) - 1 :])
    chosen = logits.gather(1, torch.tensor(tokens, device=device)[:, None])[:, 0]
    return [float(v) for v in logits.amax(1) - chosen]
