"""The model's shape from a Hugging Face `config.json`.

Keys that would change the result and are not computed here are refused by name. Others are passed
over: what an architecture's published implementation does not read cannot change its result.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megadecode.config import ModelConfig
from megadecode.errors import ModelError
from megadecode.models.files import read_json
from megadecode.rope import DynamicNtk, Linear, Llama3, RopeScaling, Yarn


@dataclass(frozen=True)
class Architecture:
    """What is fixed by the name. `needed`: keys whose default is not that of Llama."""

    qkv_bias: bool = False
    qk_norm: bool = False
    needed: tuple[str, ...] = ()
    # Key -> values that ask for nothing special; the first is the usual one.
    only: tuple[tuple[str, tuple[Any, ...]], ...] = ()


_NO_BIAS = (("attention_bias", (False, None)), ("mlp_bias", (False, None)))
_NO_WINDOW = (("use_sliding_window", (False, None)),)

ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(only=_NO_BIAS),
    "MistralForCausalLM": Architecture(
        needed=("num_key_value_heads",), only=(("sliding_window", (None,)),)
    ),
    "Qwen2ForCausalLM": Architecture(
        qkv_bias=True, needed=("num_key_value_heads",), only=_NO_WINDOW
    ),
    "Qwen3ForCausalLM": Architecture(
        qk_norm=True,
        needed=("num_key_value_heads", "head_dim"),
        only=(_NO_BIAS[0], *_NO_WINDOW),
    ),
}
_ONLY = (
    ("hidden_act", ("silu",)),
    ("quantization_config", (None,)),
    ("partial_rotary_factor", (1.0, None)),
)


def read_config(folder: Path, name: str) -> ModelConfig:
    """The shape that `config.json` describes; stop tokens are those of `generation_config.json`.

    Raises ModelError for an architecture that is not supported, a missing or mistyped key, and any
    key that asks for something this project does not compute.
    """
    path = folder / "config.json"
    keys = _Keys(path, read_json(path))
    architecture = _architecture(keys)
    for key, neutral in (*_ONLY, *architecture.only):
        keys.only(key, *neutral)
    if keys.values.get("layer_types") is not None:
        kinds = keys.get("layer_types", list)
        if other := [kind for kind in kinds if kind != "full_attention"]:
            keys.refuse(f"'layer_types' holds {other[0]!r} (only 'full_attention' is supported)")
    for key in architecture.needed:
        keys.get(key, int)
    hidden, heads = keys.get("hidden_size", int), keys.get("num_attention_heads", int)
    positions = keys.get("max_position_embeddings", int)
    theta, scaling = _rope(keys, positions)
    stops = _stop_ids(keys, folder / "generation_config.json")
    try:
        return ModelConfig(
            name=name,
            layers=keys.get("num_hidden_layers", int),
            hidden=hidden,
            heads=heads,
            kv_heads=keys.get("num_key_value_heads", int, heads),
            head_dim=keys.get("head_dim", int, hidden // max(heads, 1)),
            ffn=keys.get("intermediate_size", int),
            vocab=keys.get("vocab_size", int),
            context_tokens=scaling.length(positions) if scaling else positions,
            rope_theta=theta,
            rope_scaling=scaling,
            rms_eps=keys.get("rms_norm_eps", float),
            tied_embeddings=keys.get("tie_word_embeddings", bool, False),
            qkv_bias=architecture.qkv_bias,
            qk_norm=architecture.qk_norm,
            bos_id=keys.get("bos_token_id", int, None),
            stop_ids=stops,
        )
    except ModelError:
        raise
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from None


def _architecture(keys: _Keys) -> Architecture:
    names = keys.values.get("architectures")
    if not (isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)):
        keys.refuse(f"'architectures' is {names!r}; expected a list of one name")
    if names[0] not in ARCHITECTURES:
        keys.refuse(
            f"architecture {names[0]!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[names[0]]


def _stop_ids(keys: _Keys, generation: Path) -> tuple[int, ...]:
    if generation.exists():
        defaults = _Keys(generation, read_json(generation))
        if defaults.values.get("eos_token_id") is not None:
            keys = defaults
    value = keys.values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if type(token) is not int:
            keys.refuse(f"'eos_token_id' is {value!r}; expected a token id or a list of them")
    return tuple(dict.fromkeys(ids))


# Rope type in the file -> our class, and its keys there -> our fields.
_ORIGINAL = {"original_max_position_embeddings": "original_context"}
_ROPE_TYPES: dict[str, tuple[type[RopeScaling] | None, dict[str, str]]] = {
    "default": (None, {}),
    "linear": (Linear, {"factor": "factor"}),
    "dynamic": (DynamicNtk, {"factor": "factor"}),
    "llama3": (
        Llama3,
        _ORIGINAL | {key: key for key in ("factor", "low_freq_factor", "high_freq_factor")},
    ),
    "yarn": (
        Yarn,
        _ORIGINAL
        | {
            key: key
            for key in (
                "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
                "attention_factor", "truncate",
            )
        },
    ),
}  # fmt: skip


def _rope(keys: _Keys, positions: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling: `rope_parameters`, or the older `rope_theta` with `rope_scaling`.

    Defaults are transformers': a base of 10,000; the trained length where no original one is given.
    """
    where = next(
        (key for key in ("rope_scaling", "rope_parameters") if keys.values.get(key) is not None), ""
    )
    table = dict(keys.get(where, dict)) if where else {}
    inner = _Keys(keys.path, table, f"{where}.")
    theta = inner.get("rope_theta", float, keys.get("rope_theta", float, 10000.0))
    inner.only("partial_rotary_factor", 1.0, None)
    kind = table.get("rope_type") or table.get("type") or "default"
    if not isinstance(kind, str) or kind not in _ROPE_TYPES:
        keys.refuse(f"rope type {kind!r} is not supported; supported: {', '.join(_ROPE_TYPES)}")
    scaling, names = _ROPE_TYPES[kind]
    given: dict[str, Any] = {}
    known = {"rope_theta", "partial_rotary_factor", "rope_type", "type", *names}
    if kind == "dynamic":
        known |= set(_ORIGINAL)  # not read: the base grows from the length in the configuration
    for key, value in table.items():
        if key in names and value is not None:
            given[names[key]] = value
        elif key not in known and value is not None:
            keys.refuse(f"'{where}.{key}' = {value!r} is not supported with rope type {kind!r}")
    if scaling is None:
        return theta, None
    if scaling is not Linear:
        given.setdefault("original_context", positions)
    if scaling is Yarn and "factor" not in given and isinstance(given["original_context"], int):
        given["factor"] = positions / max(given["original_context"], 1)
    for key in names:
        if key in ("factor", "low_freq_factor", "high_freq_factor") and key not in given:
            keys.refuse(f"'{where}.{key}' is missing")
    try:
        return theta, scaling(**given)
    except ValueError as error:
        keys.refuse(f"{where}: {error}")


class _Keys:
    """Typed access to a JSON table; errors name the file and the key."""

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = "") -> None:
        self.path, self.values, self.prefix = path, values, prefix

    def refuse(self, what: str) -> NoReturn:
        raise ModelError(f"{self.path}: {what}")

    def get(self, key: str, kind: type, *default: Any) -> Any:
        """The value of `key`; JSON's null counts as not given."""
        value = self.values.get(key)
        if value is None:
            return default[0] if default else self.refuse(f"key {self.prefix + key!r} is missing")
        if kind is float and type(value) is int and abs(value) <= sys.float_info.max:
            value = float(value)
        if type(value) is not kind:
            self.refuse(
                f"{self.prefix + key!r} is {value!r}, but should be of type {kind.__name__}"
            )
        return value

    def only(self, key: str, *neutral: Any) -> None:
        """Accept an optional key only with a value that asks for nothing special."""
        value = self.values.get(key, neutral[0])
        if value not in neutral:
            self.refuse(
                f"{self.prefix + key!r} = {value!r} is not supported (only {neutral[0]!r} is)"
            )
