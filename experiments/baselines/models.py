"""Models and drafters for the comparisons: real weights, or random ones of known shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from cute_kernels.gpu.config import SHAPES
from megadecode.config import ModelConfig
from megadecode.drafter.config import SLIDING, DrafterConfig
from megadecode.drafter.find import choose_drafter
from megadecode.drafter.io import Drafter, tensor_shapes
from megadecode.models.load import load_model
from megadecode.models.store import DEFAULT_MODEL
from megadecode.models.weights import Weights
from megadecode.presets import Preset


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
            values = torch.as_tensor(np.array(self._weights.tensor(name)) if self._device == "cpu"
                                     else self._weights.tensor(name))  # fmt: skip
            self._made[name] = values.to(self._device, self._dtype)
        return self._made[name]


def random_drafter(config: ModelConfig, layers: int = 3, block: int = 8) -> Drafter:
    """A drafter with random weights in the shape of the shipped one: the target's own widths, five
    taps, a window of 1,024, a head of 16,384 tokens. Its times are a real drafter's."""
    n, columns = config.layers, min(16384, config.vocab // 32 * 32)
    made = DrafterConfig(
        name=f"random for {config.name}", layers=layers, hidden=config.hidden, heads=config.heads,
        kv_heads=config.kv_heads, head_dim=config.head_dim, ffn=config.ffn, vocab=config.vocab,
        block_size=block, taps=tuple(round(1 + i * (n - 4) / 4) for i in range(5)),
        target_layers=n, mask_token_id=0, rope_theta=config.rope_theta,
        layer_types=(SLIDING,) * layers, window=1024, is_causal=False,
        draft_tokens=tuple(range(columns)),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
        if len(shape) == 2
        else np.ones(shape, np.float32)
        for name, shape in tensor_shapes(made).items()
    }
    return Drafter(made, tensors)


def open_model(name: str, device: str) -> tuple[Weights, Drafter]:
    """A known model or a file with the drafter that belongs to it (a random one of the shipped
    one's shape where none does), or a preset's shape with random weights."""
    if name in SHAPES and name != DEFAULT_MODEL:
        weights: Weights = Preset(name, where=device)
        return weights, random_drafter(weights.config)
    weights = load_model(name)
    return weights, choose_drafter("auto", weights) or random_drafter(weights.config)


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
