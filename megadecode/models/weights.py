"""Canonical tensor names and shapes: the one list that loaders produce and devices consume.

Every linear weight is [outputs, inputs], row-major; rotary weights are in the half-split form
(element j of a head is paired with element j + head_dim / 2).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megadecode.config import ModelConfig

FloatArray = NDArray[np.float32]


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model in order of use: canonical name -> shape in elements.

    With tied embeddings `head` is listed too; it is the same matrix as `embed`.
    """
    hidden, ffn = config.hidden, config.ffn
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab, hidden)}
    for layer in range(config.layers):
        shapes |= {
            f"layers.{layer}.attn_norm": (hidden,),
            f"layers.{layer}.q": (q_rows, hidden),
            f"layers.{layer}.k": (kv_rows, hidden),
            f"layers.{layer}.v": (kv_rows, hidden),
            f"layers.{layer}.o": (hidden, q_rows),
            f"layers.{layer}.ffn_norm": (hidden,),
            f"layers.{layer}.gate": (ffn, hidden),
            f"layers.{layer}.up": (ffn, hidden),
            f"layers.{layer}.down": (hidden, ffn),
        }
    shapes |= {"final_norm": (hidden,), "head": (config.vocab, hidden)}
    return shapes


class Weights(Protocol):
    """A model's shape and its fp32 weights, made one at a time so that peak memory stays small."""

    @property
    def config(self) -> ModelConfig: ...

    def tensor(self, name: str) -> FloatArray:
        """The tensor of that canonical name, fp32, C-contiguous; KeyError for any other name.

        With tied embeddings `tensor("head") is tensor("embed")` while either is alive.
        """
        ...

    def tensors(self) -> Iterator[tuple[str, FloatArray]]:
        """All tensors in order of use. Keeps no reference to what it has yielded."""
        ...
