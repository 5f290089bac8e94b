"""The model's shape from GGUF metadata, with every key of its architecture accounted for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megadecode.config import ModelConfig
from megadecode.errors import ModelError
from megadecode.models.files import read_bytes
from megadecode.models.gguf_header import GgufHeader
from megadecode.rope import FrequencyFactors, Linear, RopeScaling, Yarn


@dataclass(frozen=True)
class Architecture:
    """What is fixed by the name.

    `interleaved`: rotary pairs are neighbouring rows (2j, 2j + 1), not half a head apart, and
    frequency factors may come as a tensor.
    """

    interleaved: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False


ARCHITECTURES = {
    "llama": Architecture(interleaved=True),
    "qwen2": Architecture(qkv_bias=True),
    "qwen3": Architecture(qk_norm=True),
}
ROPE_FACTORS = "rope_freqs.weight"
"""What the scaling of Llama 3 becomes in a GGUF file: each frequency's divisor."""


def is_interleaved(header: GgufHeader) -> bool:
    return ARCHITECTURES[header.metadata["general.architecture"]].interleaved


def read_config(header: GgufHeader) -> ModelConfig:
    """Raises ModelError for an architecture that is not supported, a missing or mistyped key, and
    any key of the architecture that asks for something this project does not compute.
    """
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise ModelError(
            f"{header.path}: architecture {architecture!r} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    if (parts := header.metadata.get("split.count", 1)) != 1:
        raise ModelError(
            f"{header.path}: it is one of {parts} parts of a model; "
            "join them with `llama-gguf-split --merge` first"
        )
    keys = _Keys(header, f"{architecture}.")
    hidden, heads = keys.get("embedding_length", int), keys.get("attention.head_count", int)
    head_dim = keys.get("attention.key_length", int, hidden // max(heads, 1))
    keys.only("attention.value_length", head_dim)
    keys.only("rope.dimension_count", head_dim)
    positions = keys.get("context_length", int)
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
        "rope_theta": keys.get("rope.freq_base", float, 10000.0),
        "rms_eps": keys.get("attention.layer_norm_rms_epsilon", float),
    }
    kind = ARCHITECTURES[architecture]
    try:
        scaling = _rope_scaling(header, keys, positions, kind.interleaved)
        keys.finish()
        return ModelConfig(
            name=str(header.metadata.get("general.name") or header.path.stem),
            vocab=vocab,
            tied_embeddings="output.weight" not in header.tensors,
            qkv_bias=kind.qkv_bias,
            qk_norm=kind.qk_norm,
            context_tokens=scaling.length(positions) if scaling else positions,
            rope_scaling=scaling,
            bos_id=bos,
            stop_ids=tuple(dict.fromkeys(stop for stop in stops if stop is not None)),
            **shape,
        )
    except ModelError:
        raise
    except ValueError as error:
        raise ModelError(f"{header.path}: {error}") from None


def _rope_scaling(
    header: GgufHeader, keys: _Keys, positions: int, factors_allowed: bool
) -> RopeScaling | None:
    """A factor without a type is linear; a factor of 0 is none. ValueError for a wrong value."""
    keys.get("rope.scaling.finetuned", bool, False)  # only says how the factor came about
    factor = keys.get("rope.scaling.factor", float, keys.get("rope.scale_linear", float, 1.0))
    kind = keys.get("rope.scaling.type", str, "linear")
    original = keys.get("rope.scaling.original_context_length", int, positions)
    scaling: RopeScaling | None = None
    if kind == "yarn":
        keys.only("rope.scaling.yarn_ext_factor", 1.0)
        keys.only("rope.scaling.yarn_attn_factor", 1.0)
        share = keys.get("rope.scaling.attn_factor", float, 1.0)
        scaling = Yarn(
            factor,
            original,
            beta_fast=keys.get("rope.scaling.yarn_beta_fast", float, 32.0),
            beta_slow=keys.get("rope.scaling.yarn_beta_slow", float, 1.0),
        )
        if share != 1.0:
            scaling = replace(scaling, attention_factor=share * scaling.multiplier)
    elif kind == "linear":
        scaling = None if factor in (0.0, 1.0) else Linear(factor)
    elif kind != "none":
        raise ModelError(
            f"{header.path}: {keys.prefix + 'rope.scaling.type'!r} = {kind!r} is not supported; "
            "supported: none, linear, yarn"
        )
    if factors_allowed and (info := header.tensors.get(ROPE_FACTORS)) is not None:
        if scaling is not None:
            raise ModelError(
                f"{header.path}: tensor {ROPE_FACTORS!r} beside rope scaling {kind!r}: "
                "not supported"
            )
        if info.dtype.name != "F32" or len(info.shape) != 1:
            raise ModelError(
                f"{header.path}: tensor {ROPE_FACTORS!r} is {info.dtype.name} of shape "
                f"{list(info.shape)}; expected F32 in one dimension"
            )
        divisors = read_bytes(header.path, info.name, "<f4", info.shape[0], info.offset)
        scaling = FrequencyFactors(tuple(divisors.astype(float).tolist()))
    return scaling


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
