"""config.json: what is understood, in every spelling, and what is refused, by key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_folders import edit, folder, refused, written

from megadecode.errors import ModelError
from megadecode.models.hf_folder import load_folder
from megadecode.models.safetensors_file import INDEX
from megadecode.rope import DynamicNtk, Linear, Llama3, RopeScaling, Yarn

__all__ = ["folder", "written"]  # fixtures

LLAMA, QWEN2, QWEN3, MISTRAL = (
    [f"{name}ForCausalLM"] for name in ("Llama", "Qwen2", "Qwen3", "Mistral")
)
SUPPORTED = "supported: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"
ESSENTIAL = (
    "hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size",
    "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    **{f"no {key}": ({key: None}, f"key {key!r} is missing") for key in ESSENTIAL},
    "null": ({"vocab_size": ...}, "key 'vocab_size' is missing"),
    "no kv heads": (
        {"architectures": QWEN2, "num_key_value_heads": None},
        "key 'num_key_value_heads' is missing",
    ),
    "no head_dim": ({"architectures": QWEN3, "head_dim": None}, "key 'head_dim' is missing"),
    "mistyped": (
        {"hidden_size": "32"}, "'hidden_size' is '32', but should be of type int",
    ),
    "true": ({"num_hidden_layers": True}, "'num_hidden_layers' is True, but should be of type int"),
    "tied": (
        {"tie_word_embeddings": "no"}, "'tie_word_embeddings' is 'no', but should be of type bool",
    ),
    "no architecture": (
        {"architectures": None}, "'architectures' is None; expected a list of one name",
    ),
    "experts": (
        {"architectures": ["Qwen3MoeForCausalLM"]},
        f"architecture 'Qwen3MoeForCausalLM' is not supported; {SUPPORTED}",
    ),
    "mixtral": (
        {"architectures": ["MixtralForCausalLM"]},
        f"architecture 'MixtralForCausalLM' is not supported; {SUPPORTED}",
    ),
    "bias everywhere": (
        {"attention_bias": True}, "'attention_bias' = True is not supported (only False is)",
    ),
    "mlp bias": ({"mlp_bias": True}, "'mlp_bias' = True is not supported (only False is)"),
    "activation": (
        {"hidden_act": "gelu"}, "'hidden_act' = 'gelu' is not supported (only 'silu' is)",
    ),
    "quantised": (
        {"quantization_config": {"bits": 4}},
        "'quantization_config' = {'bits': 4} is not supported (only None is)",
    ),
    "window": (
        {"architectures": MISTRAL, "sliding_window": 4096},
        "'sliding_window' = 4096 is not supported (only None is)",
    ),
    "used window": (
        {"architectures": QWEN2, "use_sliding_window": True},
        "'use_sliding_window' = True is not supported (only False is)",
    ),
    "window by layers": (
        {"layer_types": ["full_attention", "sliding_attention"]},
        "'layer_types' holds 'sliding_attention' (only 'full_attention' is supported)",
    ),
    "partial rotary": (
        {"partial_rotary_factor": 0.5},
        "'partial_rotary_factor' = 0.5 is not supported (only 1.0 is)",
    ),
    "heads": (
        {"num_key_value_heads": 3},
        "model 'llama': 4 heads do not divide into 3 key/value heads",
    ),
    "no heads": (
        {"num_attention_heads": 0}, "model 'llama': heads is 0; it must be a positive integer",
    ),
    "stop": (
        {"eos_token_id": 60}, "model 'llama': token id 60 lies outside its vocabulary of 60",
    ),
    "stops": (
        {"eos_token_id": [2, "x"]},
        "'eos_token_id' is [2, 'x']; expected a token id or a list of them",
    ),
    "rope table": (
        {"rope_parameters": "yarn"}, "'rope_parameters' is 'yarn', but should be of type dict",
    ),
    "rope type": (
        {"rope_parameters": {"rope_type": "longrope"}},
        "rope type 'longrope' is not supported; supported: default, linear, dynamic, llama3, yarn",
    ),
    "old rope type": (
        {"rope_parameters": None, "rope_scaling": {"type": "su"}},
        "rope type 'su' is not supported; supported: default, linear, dynamic, llama3, yarn",
    ),
    "rope factor": (
        {"rope_parameters": {"rope_type": "linear"}}, "'rope_parameters.factor' is missing",
    ),
    "llama3 factor": (
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
        "'rope_parameters.high_freq_factor' is missing",
    ),
    "llama3 order": (
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0,
                             "high_freq_factor": 1.0}},
        "rope_parameters: llama3 high_freq_factor is 1.0; it must be above low_freq_factor, 4.0",
    ),
    "rope value": (
        {"rope_parameters": {"rope_type": "yarn", "factor": "4"}},
        "rope_parameters: yarn factor is '4'; it must be positive",
    ),
    "rope key": (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mrope_section": [1, 2]}},
        "'rope_parameters.mrope_section' = [1, 2] is not supported with rope type 'linear'",
    ),
    "rope factor without a type": (
        {"rope_parameters": {"factor": 2.0}},
        "'rope_parameters.factor' = 2.0 is not supported with rope type 'default'",
    ),
    "partial rope": (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "'rope_parameters.partial_rotary_factor' = 0.5 is not supported (only 1.0 is)",
    ),
    "theta": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}},
        "model 'llama': rope_theta is 0.0; it must be positive",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations(folder: Callable[[str], Path], name: str) -> None:
    changes, message = CONFIGS[name]
    path = folder("llama")
    (path / "generation_config.json").unlink(missing_ok=True)
    edit(path / "config.json", changes)
    refused(path, message, path / "config.json")


ROPE: dict[str, tuple[dict[str, Any], RopeScaling | None, int]] = {
    "of old": ({"rope_scaling": {"type": "linear", "factor": 4}}, Linear(4), 256),
    "of no kind": ({"rope_scaling": ...}, None, 64),
    "dynamic": (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0,
                          "original_max_position_embeddings": 8}},
        DynamicNtk(2.0, 64), 64,
    ),
    "yarn, factor from lengths": (
        {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 16}},
        Yarn(4.0, 16), 64,
    ),
    "yarn beyond its lengths": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0,
                             "attention_factor": 1.0}},
        Yarn(4.0, 64, attention_factor=1.0), 256,
    ),
    "llama3": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                          "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
        Llama3(8.0, 32, 1.0, 4.0), 64,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROPE)
def test_rope_in_every_spelling(folder: Callable[[str], Path], name: str) -> None:
    changes, scaling, length = ROPE[name]
    path = folder("llama")
    edit(path / "config.json", {"rope_parameters": None, "rope_theta": 500.0} | changes)
    config = load_folder(path).config
    assert (config.rope_scaling, config.context_tokens, config.rope_theta) == (
        scaling, length, 500.0,
    )  # fmt: skip


def test_stop_tokens_of_generation_come_first(folder: Callable[[str], Path]) -> None:
    path = folder("llama")
    (path / "generation_config.json").write_text('{"eos_token_id": [5, 2, 5]}')
    assert load_folder(path).config.stop_ids == (5, 2)
    (path / "generation_config.json").write_text("{}")
    edit(path / "config.json", {"eos_token_id": 3})
    assert load_folder(path).config.stop_ids == (3,)
    edit(path / "config.json", {"eos_token_id": None})
    assert load_folder(path).config.stop_ids == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON: Expecting property name enclosed in double quotes"),
        ("[1]", "is not a JSON table"),
        ("[" * 100_000, "is not JSON: "),
        (b"\xff", "cannot be read: 'utf-8' codec can't decode"),
    ],
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", INDEX])
def test_json_that_is_none(
    folder: Callable[[str], Path], file: str, text: str | bytes, message: str
) -> None:
    path = folder("sharded")
    (path / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ModelError) as caught:
        load_folder(path)
    assert str(caught.value).startswith(f"{path / file}: {message}")


ANYTHING = ("x", -1, 0, 1.5, ..., True, [], [7], {}, {"a": 1}, 10**400, float("nan"), float("inf"))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_any_value_of_any_key_is_a_model_or_a_message(
    folder: Callable[[str], Path], family: str
) -> None:
    path = folder(family)
    whole = (path / "config.json").read_text()
    rope = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 500.0, "beta_fast": 32.0,
            "original_max_position_embeddings": 32, "truncate": True}  # fmt: skip
    changes: list[dict[str, Any]] = [
        {key: value} for key in json.loads(whole) for value in ANYTHING
    ] + [
        {"rope_parameters": rope | {key: None if value is ... else value}}
        for key in rope
        for value in ANYTHING
    ]
    messages = 0
    for change in changes:
        (path / "config.json").write_text(whole)
        edit(path / "config.json", change)
        try:
            load_folder(path).config.for_context(64).rotations(4)
        except ModelError as error:
            messages += 1
            assert str(error).startswith(str(path))
    assert messages > len(changes) // 4
