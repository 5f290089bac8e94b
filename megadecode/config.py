"""The shape of a target model: everything the engine needs to know that is not a weight."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only transformer of the Llama family.

    Sizes are in elements; `rope_theta` is the base of the rotary frequencies; `rms_eps` is added to
    the mean square before the root.
    `context_tokens` is the length the model was trained for (positions), not a limit of the engine.
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
    bos_id: int | None = None
    stop_ids: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")
        for name in (*sizes, "context_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(self._wrong(f"{name} is {value!r}; it must be a positive integer"))
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
        for token in self.stop_ids if self.bos_id is None else (self.bos_id, *self.stop_ids):
            if not 0 <= token < self.vocab:
                raise ValueError(
                    self._wrong(f"token id {token} lies outside its vocabulary of {self.vocab}")
                )

    def _wrong(self, what: str) -> str:
        return f"model {self.name!r}: {what}"

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of fp32 key and value one token position holds over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 4
