"""The configuration of published DFlash checkpoints: `config.json` to `DrafterConfig` and back.

The layout is the one the z-lab checkpoints have and SGLang and vLLM read: a Qwen3-like
configuration with a `dflash_config` table. Some keys are found in either; two that disagree are
refused, as is every key that asks for something this project does not compute.
"""

from __future__ import annotations

from typing import Any

from megadecode.drafter.config import FULL, DrafterConfig
from megadecode.errors import ModelError
from megadecode.rope import Yarn

ARCHITECTURE = "DFlashDraftModel"

_TABLE = "dflash_config"
# Keys of `dflash_config` that are understood, or that change nothing here.
_UNDERSTOOD = {
    "target_layer_ids", "mask_token_id", "mask_token", "block_size", "num_target_layers",
    "is_causal", "causal", "sample_from_anchor", "query_zero_predicts_next", "layer_types",
    "sliding_window", "input_embedding_scale", "output_multiplier", "final_logit_softcapping",
    "target_fingerprint", "draft_tokens",
}  # fmt: skip
# Keys that are understood only with this value, in either table.
_ONLY: dict[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1, 1.0),
    "is_neox_style": (True,),
    "add_swa_attention_sink_bias": (False,),
    "quantization_config": (),
    "use_swa": (False,),
    "attention_sink_bias": (False,),
    "attention_value_scale": (1, 1.0),
    "fc_layernorm": (False,),
}
_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "attention_factor": "attention_factor",
    "truncate": "truncate",
}


class _Keys:
    """A published configuration; every error names the drafter and the key."""

    def __init__(self, name: str, values: dict[str, Any]) -> None:
        table = values.get(_TABLE) or {}
        if not isinstance(table, dict):
            raise ModelError(f"drafter {name!r}: {_TABLE} is {table!r}; expected a table")
        self.name, self.values, self.table = name, values, table

    def find(self, *keys: str, default: Any = None) -> Any:
        """The value of the first of `keys` that is set, at the top or in the table."""
        found: tuple[str, Any] | None = None
        for key in keys:
            for where, place in ((self.table, f"{_TABLE}.{key}"), (self.values, key)):
                value = where.get(key)
                if value is None:
                    continue
                if found is not None and found[1] != value:
                    raise ModelError(
                        f"drafter {self.name!r}: {place} is {value!r}, "
                        f"but {found[0]} is {found[1]!r}; expected one value"
                    )
                found = found or (place, value)
        return default if found is None else found[1]

    def need(self, key: str, why: str = "") -> Any:
        value = self.find(key)
        if value is None:
            raise ModelError(f"drafter {self.name!r}: {key} is missing from config.json{why}")
        return value


def read_published(name: str, values: dict[str, Any], target_layers: int | None) -> DrafterConfig:
    """The drafter `values`, a parsed config.json, describes.

    `target_layers` is taken where the file does not say it. Raises ModelError, naming the key.
    """
    keys = _Keys(name, values)
    _refuse_others(keys)
    taps = keys.need("target_layer_ids", "; which layers are tapped is never guessed")
    theta, yarn = _rope(keys)
    layers = keys.need("num_hidden_layers")
    kinds = keys.find("layer_types", default=())
    for key, value in (("target_layer_ids", taps), ("layer_types", kinds)):
        if not isinstance(value, list | tuple):
            raise ModelError(f"drafter {name!r}: {key} is {value!r}; expected a list")
    hidden, heads = keys.need("hidden_size"), keys.need("num_attention_heads")
    anchor_predicts = keys.find("sample_from_anchor", "query_zero_predicts_next", default=False)
    if not isinstance(anchor_predicts, bool):
        raise ModelError(
            f"drafter {name!r}: sample_from_anchor is {anchor_predicts!r}; expected true or false"
        )
    head_dim = keys.find("head_dim")
    if head_dim is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        head_dim = hidden // heads
    target_layers = keys.find("num_target_layers", default=target_layers)
    if target_layers is None:
        raise ModelError(
            f"drafter {name!r}: num_target_layers is missing from config.json; name the target"
        )
    return DrafterConfig(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=keys.find("num_key_value_heads", default=heads),
        head_dim=head_dim,
        ffn=keys.need("intermediate_size"),
        vocab=keys.need("vocab_size"),
        block_size=keys.need("block_size"),
        taps=tuple(taps),
        target_layers=target_layers,
        mask_token_id=keys.need("mask_token_id"),
        rms_eps=keys.need("rms_norm_eps"),
        rope_theta=theta,
        yarn=yarn,
        layer_types=tuple(kinds),
        window=keys.find("sliding_window"),
        is_causal=_causal(keys),
        prediction="next" if anchor_predicts else "same",
        input_embedding_scale=keys.find("input_embedding_scale", default=1.0),
        output_multiplier=keys.find("output_multiplier", default=1.0),
        # Published checkpoints write 0 for none.
        final_logit_softcapping=keys.find("final_logit_softcapping") or None,
        target_fingerprint=keys.find("target_fingerprint"),
        draft_tokens=tuple(keys.find("draft_tokens", default=())),
    )


def _refuse_others(keys: _Keys) -> None:
    kinds = keys.values.get("architectures")
    if kinds != [ARCHITECTURE]:
        raise ModelError(
            f"drafter {keys.name!r}: architectures is {kinds!r}; expected {[ARCHITECTURE]!r}"
        )
    for key, allowed in _ONLY.items():
        value = keys.find(key)
        if value is not None and value not in allowed:
            expected = f"{allowed[0]!r}" if allowed else "none"
            raise ModelError(
                f"drafter {keys.name!r}: {key} is {value!r}, which is not supported; "
                f"expected {expected}"
            )
    for key, value in keys.table.items():
        if key not in _UNDERSTOOD and key not in _ONLY and value:
            raise ModelError(
                f"drafter {keys.name!r}: {_TABLE}.{key} is {value!r}; this key is not supported"
            )
    for key, own in (("target_hidden_size", "hidden_size"), ("draft_vocab_size", "vocab_size")):
        value = keys.find(key)
        if value is not None and value != keys.need(own):
            raise ModelError(
                f"drafter {keys.name!r}: {key} is {value!r}; expected {own}, {keys.need(own)!r}"
            )


def _causal(keys: _Keys) -> bool | None:
    causal = keys.find("is_causal", "causal")
    if causal is not None and not isinstance(causal, bool):
        raise ModelError(f"drafter {keys.name!r}: is_causal is {causal!r}; expected true or false")
    return causal


def _rope(keys: _Keys) -> tuple[float, Yarn | None]:
    """Base and scaling, from `rope_parameters` or the older `rope_theta` with `rope_scaling`."""
    name, values = keys.name, keys.values
    both = [key for key in ("rope_parameters", "rope_scaling") if values.get(key) is not None]
    parameters: dict[str, Any] = {}
    for key in both:
        if not isinstance(values[key], dict):
            raise ModelError(f"drafter {name!r}: {key} is {values[key]!r}; expected a table")
        parameters |= values[key]
    where = " and ".join(both)
    theta = parameters.pop("rope_theta", values.get("rope_theta"))
    if theta is None:
        raise ModelError(f"drafter {name!r}: rope_theta is missing from config.json")
    old, kind = parameters.pop("type", None), parameters.pop("rope_type", None)
    kind = kind or old or "default"
    if kind == "default":
        extra = [key for key, value in parameters.items() if value not in (None, 1, 1.0)]
        if extra:
            raise ModelError(f"drafter {name!r}: {where}.{extra[0]} needs rope_type 'yarn'")
        return theta, None
    if kind != "yarn":
        raise ModelError(
            f"drafter {name!r}: {where}.rope_type is {kind!r}; expected 'default' or 'yarn'"
        )
    given: dict[str, Any] = {}
    for key, value in parameters.items():
        if key == "partial_rotary_factor" and value == 1:
            continue
        if key not in _YARN:
            raise ModelError(f"drafter {name!r}: {where}.{key} is {value!r}; not supported")
        if value is not None:
            given[_YARN[key]] = value
    try:
        return theta, Yarn(**given)
    except (TypeError, ValueError) as error:
        raise ModelError(f"drafter {name!r}: {where}: {error}") from None


def published_values(config: DrafterConfig) -> dict[str, Any]:
    """The `config.json` of a drafter; `read_published` reads it back."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.yarn is not None:
        rope["rope_type"] = "yarn"
        for key, ours in _YARN.items():
            if (value := getattr(config.yarn, ours)) is not None:
                rope[key] = value
    table: dict[str, Any] = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.taps),
        "sample_from_anchor": config.prediction == "next",
    }
    optional: dict[str, tuple[Any, Any]] = {
        "input_embedding_scale": (config.input_embedding_scale, 1.0),
        "output_multiplier": (config.output_multiplier, 1.0),
        "final_logit_softcapping": (config.final_logit_softcapping, None),
        "target_fingerprint": (config.target_fingerprint, None),
        "draft_tokens": (list(config.draft_tokens), []),
    }
    table |= {key: value for key, (value, default) in optional.items() if value != default}
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": "float32",
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn,
        "vocab_size": config.vocab,
        "num_target_layers": config.target_layers,
        "block_size": config.block_size,
        "rms_norm_eps": config.rms_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        # Both spellings: older readers know the second one only.
        "rope_parameters": rope,
        "rope_theta": config.rope_theta,
        "layer_types": list(config.layer_types or (FULL,) * config.layers),
        "sliding_window": config.window,
        _TABLE: table,
    }
    if config.yarn is not None:
        values["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    if config.is_causal is not None:
        values["is_causal"] = config.is_causal
    return values
