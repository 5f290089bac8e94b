"""Models of known shapes with random weights: for measuring, and for tests of every shape.

Token ids in, token ids out: there is no tokenizer. The weights are drawn by torch where the device
is, one generator a tensor, seeded by the tensor's name: the same on every run. A preset's drafter
is random too (`draft="random"`): what it costs is what a trained one of its size costs, what it
proposes is worth nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from cute_kernels.gpu.config import SHAPES
from megadecode.config import ModelConfig
from megadecode.drafter.config import DrafterConfig
from megadecode.drafter.io import Drafter, published_name
from megadecode.drafter.io import tensor_shapes as drafter_shapes
from megadecode.models.weights import tensor_shapes

CONTEXT_TOKENS = {"llama-3.2-1b": 131072, "llama-3.1-8b": 131072, "qwen3-8b": 40960}
THETA = {"qwen3-8b": 1_000_000.0}
NAMES = tuple(name for name in SHAPES if name != "smollm2-135m")  # that one has its own weights


def preset_config(name: str) -> ModelConfig:
    """The configuration of a shape of `cute_kernels.gpu.config.SHAPES`."""
    s = SHAPES[name]
    return ModelConfig(
        name=name, layers=s.layers, hidden=s.hidden, heads=s.heads, kv_heads=s.kv_heads,
        head_dim=s.head_dim, ffn=s.ffn, vocab=s.vocab,
        context_tokens=CONTEXT_TOKENS.get(name, 8192), rope_theta=THETA.get(name, 500_000.0),
        rms_eps=s.rms_eps, tied_embeddings=s.tied, qk_norm=s.qk_norm,
    )  # fmt: skip


def drafter_config(model: ModelConfig, layers: int = 2, block_size: int = 16) -> DrafterConfig:
    """A drafter of the target's own widths that reads up to five layers, spread over all."""
    last = max(model.layers - 2, 0)
    taps = sorted({round(last * (i + 0.5) / 5) for i in range(5)})
    return DrafterConfig(
        name=f"random drafter of {model.name}", layers=layers, hidden=model.hidden,
        heads=model.heads, kv_heads=model.kv_heads, head_dim=model.head_dim, ffn=model.ffn,
        vocab=model.vocab, block_size=block_size, taps=tuple(taps), target_layers=model.layers,
        mask_token_id=model.vocab - 1, rms_eps=model.rms_eps, rope_theta=model.rope_theta,
    )  # fmt: skip


def _draw(name: str, shape: tuple[int, ...], seed: int, where: str) -> Any:
    """Normal with variance 1 / inputs; what has one dimension is a norm, near 1."""
    import torch

    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    number = int.from_bytes(digest[:8], "little") >> 1
    generator = torch.Generator(where).manual_seed(number)
    values = torch.randn(shape, generator=generator, device=where)
    if len(shape) == 1:
        values.mul_(0.1).add_(1.0)
    else:
        values.mul_(shape[1] ** -0.5)
    return values.numpy() if where == "cpu" else values


class RandomDrafter(Drafter):
    """A drafter with random weights, drawn where its target's are."""

    def __init__(self, config: DrafterConfig, seed: int = 0, where: str = "cpu") -> None:
        self.config = config
        self._seed, self._where = seed, where
        self._shapes = drafter_shapes(config)

    def tensor(self, name: str) -> Any:
        return _draw(f"drafter {name}", self._shapes[name], self._seed, self._where)

    def get(self, canonical: str) -> Any:
        return self.tensor(published_name(canonical))


class Preset:
    """Implements `Weights` for a preset; `where` is a torch device.

    On a device other than the CPU, tensors are torch tensors that stay there.
    """

    def __init__(self, name: str, seed: int = 0, where: str = "cpu") -> None:
        self.config = preset_config(name)
        self._seed, self._where = seed, where
        self._shapes = tensor_shapes(self.config)

    def tensor(self, name: str) -> Any:
        """fp32, `tensor_shapes` of the configuration; KeyError for an unknown name."""
        shape = self._shapes[name]
        if name == "head" and self.config.tied_embeddings:
            name = "embed"
        return _draw(name, shape, self._seed, self._where)

    def drafter(self) -> Drafter:
        """Its random drafter."""
        return RandomDrafter(drafter_config(self.config), self._seed, self._where)

    def tensors(self) -> Iterator[tuple[str, Any]]:
        for name in self._shapes:
            yield name, self.tensor(name)
