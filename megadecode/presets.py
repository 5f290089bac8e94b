"""Models of known shapes with random weights: for measuring, and for tests of every shape.

Token ids in, token ids out: there is no tokenizer. The weights are drawn by torch where the device
is, one generator a tensor, seeded by the tensor's name: the same on every run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from cute_kernels.gpu.config import SHAPES
from megadecode.config import ModelConfig
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


class Preset:
    """Implements `Weights` for a preset; `where` is a torch device.

    Matrices are normal with variance 1 / inputs, norm weights near 1. On a device other than the
    CPU, tensors are torch tensors that stay there.
    """

    def __init__(self, name: str, seed: int = 0, where: str = "cpu") -> None:
        self.config = preset_config(name)
        self._seed, self._where = seed, where
        self._shapes = tensor_shapes(self.config)

    def tensor(self, name: str) -> Any:
        """fp32, `tensor_shapes` of the configuration; KeyError for an unknown name."""
        import torch

        shape = self._shapes[name]
        if name == "head" and self.config.tied_embeddings:
            name = "embed"
        text = f"{self._seed} {name}".encode()
        seed = int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1
        generator = torch.Generator(self._where).manual_seed(seed)
        values = torch.randn(shape, generator=generator, device=self._where)
        if len(shape) == 1:
            values.mul_(0.1).add_(1.0)
        else:
            values.mul_(shape[1] ** -0.5)
        return values.numpy() if self._where == "cpu" else values

    def tensors(self) -> Iterator[tuple[str, Any]]:
        for name in self._shapes:
            yield name, self.tensor(name)
