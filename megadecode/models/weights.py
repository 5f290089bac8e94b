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

    With tied embeddings `head` is listed too; it is the same matrix as `embed`. Norms and biases
    are the tensors of one dimension.
    """
    hidden, ffn = config.hidden, config.ffn
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab, hidden)}
    layer_shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "q": (q_rows, hidden),
        "k": (kv_rows, hidden),
        "v": (kv_rows, hidden),
    }
    if config.qkv_bias:
        layer_shapes |= {"q_bias": (q_rows,), "k_bias": (kv_rows,), "v_bias": (kv_rows,)}
    if config.qk_norm:
        layer_shapes |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    layer_shapes |= {
        "o": (hidden, q_rows),
        "ffn_norm": (hidden,),
        "gate": (ffn, hidden),
        "up": (ffn, hidden),
        "down": (hidden, ffn),
    }
    for layer in range(config.layers):
        shapes |= {f"layers.{layer}.{part}": shape for part, shape in layer_shapes.items()}
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
