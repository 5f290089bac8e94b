"""The model's shape from GGUF metadata, with every key of its architecture accounted for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megadecode.config import ModelConfig
from megadecode.errors import ModelError
from megadecode.models.gguf_header import GgufHeader

ARCHITECTURES = ("llama",)


def read_config(header: GgufHeader) -> ModelConfig:
    """Raises ModelError for an architecture that is not supported, a missing or mistyped key, and
    any key of the architecture that asks for something this project does not compute.
    """
    architecture = header.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{header.path}: architecture {architecture!r} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    keys = _Keys(header, f"{architecture}.")
    hidden, heads = keys.get("embedding_length", int), keys.get("attention.head_count", int)
    head_dim = keys.get("attention.key_length", int, hidden // max(heads, 1))
    keys.only("attention.value_length", head_dim)
    keys.only("rope.dimension_count", head_dim)
    keys.only("rope.scaling.type", "none")
    keys.only("rope.scaling.factor", 1.0, 0.0)
    keys.only("rope.scale_linear", 1.0)
    keys.only("rope.scaling.finetuned", False)
    keys.only("attention.causal", True)
    keys.only("use_parallel_residual", False)
    keys.only("expert_count", 0)
    keys.only("expert_used_count", 0)
    keys.only("tensor_data_layout", "Meta AI original pth")

    layers = keys.get("block_count", int)
    if layers > len(header.tensors):
        raise ModelError(
            f"{header.path}: {architecture}.block_count is {layers}, "
            f"but the file holds {len(header.tensors)} tensors"
        )
    embed = header.tensors.get("token_embd.weight")
    if embed is None or len(embed.shape) != 2:
        raise ModelError(f"{header.path}: tensor 'token_embd.weight' is missing or not a matrix")
    vocab = embed.shape[0]
    if (claimed := keys.get("vocab_size", int, vocab)) != vocab:
        raise ModelError(
            f"{header.path}: tensor 'token_embd.weight' has {vocab} rows, "
            f"but {architecture}.vocab_size is {claimed}"
        )
    bos, *stops = (_token_id(header, name) for name in ("bos", "eos", "eot", "eom"))
    shape = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": keys.get("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "ffn": keys.get("feed_forward_length", int),
        "context_tokens": keys.get("context_length", int),
        "rope_theta": keys.get("rope.freq_base", float, 10000.0),
        "rms_eps": keys.get("attention.layer_norm_rms_epsilon", float),
    }
    keys.finish()
    try:
        return ModelConfig(
            name=str(header.metadata.get("general.name") or header.path.stem),
            vocab=vocab,
            tied_embeddings="output.weight" not in header.tensors,
            bos_id=bos,
            stop_ids=tuple(dict.fromkeys(stop for stop in stops if stop is not None)),
            **shape,
        )
    except ValueError as error:
        raise ModelError(f"{header.path}: {error}") from None


def _token_id(header: GgufHeader, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = header.metadata.get(key)
    if value is not None and type(value) is not int:
        raise ModelError(f"{header.path}: {key!r} is {value!r}, but should be of type int")
    return value


@dataclass
class _Keys:
    """Typed access to `<architecture>.*` metadata, which remembers what has been understood."""

    header: GgufHeader
    prefix: str

    def __post_init__(self) -> None:
        self.left = {key for key in self.header.metadata if key.startswith(self.prefix)}

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        key = self.prefix + key
        self.left.discard(key)
        value = self.header.metadata.get(key, default)
        if value is None:
            raise ModelError(f"{self.header.path}: metadata key {key!r} is missing")
        if isinstance(value, np.ndarray):
            # Per-layer values: the same everywhere, or a model of another kind.
            if value.size == 0 or (value != value[0]).any():
                raise ModelError(
                    f"{self.header.path}: {key!r} differs from layer to layer: not supported"
                )
            value = value[0].item()
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
            raise ModelError(
                f"{self.header.path}: {key!r} is {value!r}, but should be of type {kind.__name__}"
            )
        return value

    def only(self, key: str, *neutral: Any) -> None:
        """Accept an optional key only with a value that asks for nothing special."""
        key = self.prefix + key
        value = self.header.metadata.get(key, neutral[0])
        if not any(type(value) is type(ok) and value == ok for ok in neutral):
            raise ModelError(
                f"{self.header.path}: {key!r} = {value!r} is not supported (only {neutral[0]!r} is)"
            )
        self.left.discard(key)

    def finish(self) -> None:
        if self.left:
            key = min(self.left)
            raise ModelError(
                f"{self.header.path}: {key!r} = {self.header.metadata[key]!r} is not supported"
            )
