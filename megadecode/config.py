"""The shape of a target model: everything the engine needs to know that is not a weight."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from megadecode.rope import DynamicNtk, FrequencyFactors, RopeScaling, rotation_table


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only transformer of the Llama or Qwen family.

    Sizes are in elements; `rope_theta` is the base of the rotary frequencies and `rope_scaling` how
    they are changed for longer contexts; `rms_eps` is added to the mean square before the root.
    `context_tokens` is the length the model is meant for (positions), its scaling included; not a
    limit of the engine.
    `qkv_bias`: the query, key and value projections have a bias (Qwen2). `qk_norm`: every query and
    key head goes through an RMSNorm over `head_dim` elements before its rotation (Qwen3).
    `stop_ids` are the token ids at which generation ends unless the request says otherwise.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context_tokens: int
    rope_theta: float = 10000.0
    rms_eps: float = 1e-5
    tied_embeddings: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None
    bos_id: int | None = None
    stop_ids: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        self._check_types()
        if self.heads % self.kv_heads:
            raise ValueError(
                self._wrong(
                    f"{self.heads} heads do not divide into {self.kv_heads} key/value heads"
                )
            )
        if self.head_dim % 2:
            raise ValueError(
                self._wrong(f"head_dim is {self.head_dim}; rotary positions need an even one")
            )
        if not (math.isfinite(self.rope_theta) and self.rope_theta > 0):
            raise ValueError(self._wrong(f"rope_theta is {self.rope_theta}; it must be positive"))
        if not (math.isfinite(self.rms_eps) and self.rms_eps >= 0):
            raise ValueError(self._wrong(f"rms_eps is {self.rms_eps}; it must not be negative"))
        scaling = self.rope_scaling
        if scaling is not None and not isinstance(scaling, RopeScaling):
            raise ValueError(self._wrong(f"rope_scaling is {scaling!r}; it must be a RopeScaling"))
        if isinstance(scaling, FrequencyFactors) and len(scaling.divisors) * 2 != self.head_dim:
            raise ValueError(
                self._wrong(
                    f"{len(scaling.divisors)} rope factors; head_dim {self.head_dim} needs "
                    f"{self.head_dim // 2}"
                )
            )
        for token in self.stop_ids if self.bos_id is None else (self.bos_id, *self.stop_ids):
            if not 0 <= token < self.vocab:
                raise ValueError(
                    self._wrong(f"token id {token} lies outside its vocabulary of {self.vocab}")
                )

    def _check_types(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError(f"a model's name is {self.name!r}; it must be text")
        sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")
        for name in (*sizes, "context_tokens"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(self._wrong(f"{name} is {value!r}; it must be a positive integer"))
        for name in ("rope_theta", "rms_eps"):
            value = getattr(self, name)
            if type(value) not in (int, float):
                raise ValueError(self._wrong(f"{name} is {value!r}; it must be a number"))
        for name in ("tied_embeddings", "qkv_bias", "qk_norm"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(self._wrong(f"{name} is {value!r}; it must be True or False"))
        if self.bos_id is not None and type(self.bos_id) is not int:
            raise ValueError(self._wrong(f"bos_id is {self.bos_id!r}; it must be a token id"))
        if not isinstance(self.stop_ids, tuple) or any(type(i) is not int for i in self.stop_ids):
            raise ValueError(
                self._wrong(f"stop_ids is {self.stop_ids!r}; it must be a tuple of token ids")
            )

    def _wrong(self, what: str) -> str:
        return f"model {self.name!r}: {what}"

    def for_context(self, ctx: int) -> ModelConfig:
        """This model in an engine of `ctx` positions: dynamic NTK scaling becomes a fixed base.

        Decoded text then keeps one arithmetic at any length, where other engines change the base
        under keys that are already cached.
        """
        scaling = self.rope_scaling
        if not isinstance(scaling, DynamicNtk):
            return self
        return replace(
            self,
            rope_theta=scaling.base(self.rope_theta, self.head_dim, ctx),
            rope_scaling=None,
            context_tokens=max(ctx, self.context_tokens),
        )

    def rotations(self, positions: int) -> NDArray[np.float64]:
        """[positions, 2, head_dim / 2]: cosines, then sines, the scaling's multiplier in them."""
        return rotation_table(self.head_dim, self.rope_theta, self.rope_scaling, positions)

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of fp32 key and value one token position holds over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 4
