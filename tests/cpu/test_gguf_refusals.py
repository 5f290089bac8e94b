"""GGUF files of models that are not supported, and values that are no numbers: refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from tiny_gguf import TINY, write_gguf

from megadecode.errors import ModelError
from megadecode.models.gguf_file import load
from megadecode.models.gguf_header import read_header
from megadecode.models.random_model import random_model

WRONG = {
    "architecture": (
        {"architecture": "qwen2moe"},
        "architecture 'qwen2moe' is not supported; supported: llama, qwen2, qwen3",
    ),
    "part": (
        {"keys": {"split.count": 3}},
        "it is one of 3 parts of a model; join them with `llama-gguf-split --merge` first",
    ),
    "rope scaling": (
        {"keys": {"llama.rope.scaling.type": "longrope"}},
        "'llama.rope.scaling.type' = 'longrope' is not supported; supported: none, linear, yarn",
    ),
    "rope scaling factor": (
        {"keys": {"llama.rope.scaling.factor": -4.0}},
        "linear factor is -4.0; it must be positive",
    ),
    "yarn factor": (
        {"keys": {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 0.0}},
        "yarn factor is 0.0; it must be positive",
    ),
    "yarn variant": (
        {"keys": {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_ext_factor": 0.5}},
        "'llama.rope.scaling.yarn_ext_factor' = 0.5 is not supported (only 1.0 is)",
    ),
    "yarn without yarn": (
        {"keys": {"llama.rope.scaling.yarn_beta_fast": 8.0}},
        "'llama.rope.scaling.yarn_beta_fast' = 8.0 is not supported",
    ),
    "partial rotary": (
        {"keys": {"llama.rope.dimension_count": 4}},
        "'llama.rope.dimension_count' = 4 is not supported (only 8 is)",
    ),
    "sliding window": (
        {"keys": {"llama.attention.sliding_window": 64}},
        "'llama.attention.sliding_window' = 64 is not supported",
    ),
    "experts": (
        {"keys": {"llama.expert_count": 8}},
        "'llama.expert_count' = 8 is not supported (only 0 is)",
    ),
    "unknown key": (
        {"keys": {"llama.logit_scale": 2.0}},
        "'llama.logit_scale' = 2.0 is not supported",
    ),
    "layers differ": (
        {"keys": {"llama.feed_forward_length": [64, 32]}},
        "'llama.feed_forward_length' differs from layer to layer: not supported",
    ),
    "key missing": (
        {"keys": {"llama.block_count": None}},
        "metadata key 'llama.block_count' is missing",
    ),
    "key of another type": (
        {"keys": {"llama.block_count": "two"}},
        "'llama.block_count' is 'two', but should be of type int",
    ),
    "too many layers": (
        {"keys": {"llama.block_count": 4_000_000_000}},
        "llama.block_count is 4000000000, but the file holds 20 tensors",
    ),
    "no layers": (
        {"keys": {"llama.block_count": 0}},
        "model 'tiny': layers is 0; it must be a positive integer",
    ),
    "no heads": (
        {"keys": {"llama.attention.head_count": 0}},
        "model 'tiny': heads is 0; it must be a positive integer",
    ),
    "heads": (
        {"keys": {"llama.attention.head_count_kv": 3}},
        "model 'tiny': 4 heads do not divide into 3 key/value heads",
    ),
    "theta": (
        {"keys": {"llama.rope.freq_base": float("nan")}},
        "model 'tiny': rope_theta is nan; it must be positive",
    ),
    "vocabulary": (
        {"keys": {"llama.vocab_size": 299}},
        "tensor 'token_embd.weight' has 300 rows, but llama.vocab_size is 299",
    ),
    "stop token": (
        {"keys": {"tokenizer.ggml.eos_token_id": 300}},
        "model 'tiny': token id 300 lies outside its vocabulary of 300",
    ),
    "stop token type": (
        {"keys": {"tokenizer.ggml.eos_token_id": "2"}},
        "'tokenizer.ggml.eos_token_id' is '2', but should be of type int",
    ),
    "tensor missing": (
        {"tensors": {"blk.1.ffn_up.weight": None}},
        "tensor 'blk.1.ffn_up.weight' is missing; expected [64, 32]",
    ),
    "embedding missing": (
        {"tensors": {"token_embd.weight": None}},
        "tensor 'token_embd.weight' is missing or not a matrix",
    ),
    "shape": (
        {"tensors": {"blk.0.attn_k.weight": np.zeros((32, 16), np.float32)}},
        "tensor 'blk.0.attn_k.weight' has shape [32, 16]; its configuration asks for [16, 32]",
    ),
    "bias": (
        {"tensors": {"blk.0.attn_q.bias": np.zeros(32, np.float32)}},
        "tensor 'blk.0.attn_q.bias' belongs to a variant of the model that is not "
        "supported (it would change the result)",
    ),
    "rope factors of another head": (
        {"tensors": {"rope_freqs.weight": np.ones(3, np.float32)}},
        "model 'tiny': 3 rope factors; head_dim 8 needs 4",
    ),
    "rope factors in bits": (
        {"tensors": {"rope_freqs.weight": np.ones(4, np.float16)}},
        "tensor 'rope_freqs.weight' is F16 of shape [4]; expected F32 in one dimension",
    ),
    "rope factor": (
        {"tensors": {"rope_freqs.weight": np.array([1, 0, 1, 1], np.float32)}},
        "rope factor 1 is 0.0; it must be positive",
    ),
    "rope factors and scaling": (
        {
            "tensors": {"rope_freqs.weight": np.ones(4, np.float32)},
            "keys": {"llama.rope.scaling.factor": 2.0},
        },
        "tensor 'rope_freqs.weight' beside rope scaling 'linear': not supported",
    ),
    "rope factors of another family": (
        {
            "tensors": {"rope_freqs.weight": np.ones(4, np.float32)},
            "architecture": "qwen3",
            "config": replace(TINY, qk_norm=True),
        },
        "tensor 'rope_freqs.weight' belongs to a variant of the model that is not "
        "supported (it would change the result)",
    ),
    "bias of another shape": (
        {
            "tensors": {"blk.1.attn_k.bias": np.ones(15, np.float32)},
            "architecture": "qwen2",
            "config": replace(TINY, qkv_bias=True),
        },
        "tensor 'blk.1.attn_k.bias' has shape [15]; its configuration asks for [16]",
    ),
    "norm missing": (
        {
            "tensors": {"blk.0.attn_q_norm.weight": None},
            "architecture": "qwen3",
            "config": replace(TINY, qk_norm=True),
        },
        "tensor 'blk.0.attn_q_norm.weight' is missing; expected [8]",
    ),
    "dtype": (
        {"tensors": {"output_norm.weight": np.ones(32, np.float64)}},
        "tensor 'output_norm.weight' has dtype F64, which cannot be converted to fp32",
    ),
}


@pytest.mark.parametrize("change", WRONG)
def test_refused_by_name(tmp_path: Path, change: str) -> None:
    arguments, message = WRONG[change]
    path = write_gguf(tmp_path / "wrong.gguf", **arguments)
    with pytest.raises(ModelError) as caught:
        load(path)
    assert str(caught.value) == f"{path}: {message}"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["blk.1.ffn_norm.weight", "token_embd.weight"])
def test_values_that_are_no_numbers(tmp_path: Path, name: str, value: float) -> None:
    canonical = {"blk.1.ffn_norm.weight": "layers.1.ffn_norm", "token_embd.weight": "embed"}[name]
    values = random_model(TINY, 7).tensor(canonical).copy()
    values.flat[17] = value
    path = write_gguf(tmp_path / "nan.gguf", tensors={name: values})
    model = load(path)
    with pytest.raises(ModelError) as caught:
        model.tensor(canonical)
    assert str(caught.value) == (
        f"{path}: tensor {name!r} holds {value} at element 17; the file is damaged"
    )


def test_block_scale_that_is_infinite(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "inf.gguf", dtype=GGMLQuantizationType.Q8_0)
    info = read_header(path).tensors["blk.0.ffn_gate.weight"]
    with path.open("r+b") as file:
        file.seek(info.offset)
        file.write(np.float16(np.inf).tobytes())
    with pytest.raises(ModelError, match=r"tensor 'blk\.0\.ffn_gate\.weight' holds"):
        load(path).tensor("layers.0.gate")
