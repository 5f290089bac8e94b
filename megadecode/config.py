"""The shape of a target model: everything the engine needs to know that is not a weight."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only transformer of the Llama family.

    Sizes are in elements, `rope_theta` in radians' base, `rms_eps` added to the mean square before the root.
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
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"model {self.name!r}: {name} is {value!r}; it must be a positive integer")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model {self.name!r}: {self.heads} heads do not divide into {self.kv_heads} key/value heads"
            )

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of fp32 key and value one token position holds over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 4
