"""Every family of models, from folders and from GGUF files: logits are those of transformers.

Checkpoints are random, tiny and written here, by transformers' `save_pretrained` and by the `gguf`
package. The bound is 1e-4 of the largest logit, in fp32.
"""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from hf_models import logits, transformers_model, write_folder
from tiny_drafter import TARGET, drafter
from tiny_gguf import quantized, write_gguf
from tiny_tokenizers import KINDS
from tiny_tokenizers import TEMPLATE as CHAT_TEMPLATE

from megadecode import Engine, ModelConfig, SamplingParams
from megadecode.models.gguf_file import load
from megadecode.models.hf_folder import load_folder
from megadecode.models.load import load_model
from megadecode.models.random_model import RandomModel, random_model
from megadecode.models.weights import FloatArray
from megadecode.reference import Reference
from megadecode.rope import DynamicNtk, FrequencyFactors, Linear, Llama3, Yarn

# Sizes that the CPU device has kernels for; head_dim is not hidden / heads.
LLAMA = ModelConfig(
    name="tiny", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=32, ffn=96, vocab=203,
    context_tokens=64, rope_theta=700.0, rms_eps=1e-5, tied_embeddings=False, bos_id=1,
    stop_ids=(2,),
)  # fmt: skip
QWEN2 = replace(LLAMA, qkv_bias=True, rms_eps=1e-6, stop_ids=(2, 7))
QWEN3 = replace(LLAMA, qk_norm=True, bos_id=None)

SHAPES: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "llama": (LLAMA, {}),
    "llama, tied and ungrouped": (replace(LLAMA, kv_heads=4, tied_embeddings=True), {}),
    "llama, linear": (replace(LLAMA, rope_scaling=Linear(4.0)), {}),
    "llama, llama3": (replace(LLAMA, rope_scaling=Llama3(8.0, 32, 1.0, 4.0)), {}),
    "llama, dynamic": (replace(LLAMA, rope_scaling=DynamicNtk(2.0, 64)), {}),
    "mistral": (LLAMA, {"family": "Mistral", "sliding_window": None}),
    "qwen2": (QWEN2, {}),
    "qwen2, tied": (replace(QWEN2, tied_embeddings=True), {}),
    "qwen2, yarn": (replace(QWEN2, rope_scaling=Yarn(4.0, 32)), {}),
    "qwen3": (QWEN3, {}),
    "qwen3, tied and ungrouped": (replace(QWEN3, kv_heads=4, tied_embeddings=True), {}),
    "qwen3, yarn": (
        replace(QWEN3, rope_scaling=Yarn(4.0, 32, 16.0, 2.0, 1.0, 0.5, truncate=False)), {},
    ),
}  # fmt: skip
TOKENS = np.random.default_rng(1).integers(0, LLAMA.vocab, 90)  # beyond every trained length


def weights_of(config: ModelConfig) -> RandomModel:
    """Random weights whose head is scaled so that no token is a close call."""
    made = random_model(config, 3)
    if not config.tied_embeddings:
        made.tensor("head")[:] *= 3
    return made


def check_same(config: ModelConfig, found: Any, expected: torch.Tensor) -> None:
    """`found` are weights; their logits are `expected`."""
    ours, _ = Reference(config, found.tensors()).forward(TOKENS)
    assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()


# -- folders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_folders(tmp_path: Path, name: str) -> None:
    config, options = SHAPES[name]
    weights = weights_of(config)
    theirs = write_folder(tmp_path / "tiny", weights, **options)
    found = load_folder(tmp_path / "tiny")
    scaling = config.rope_scaling
    length = scaling.length(config.context_tokens) if scaling else config.context_tokens
    assert found.config == replace(config, context_tokens=length)
    for tensor, values in found.tensors():
        np.testing.assert_array_equal(values, weights.tensor(tensor), err_msg=tensor)
    expected = logits(theirs, TOKENS)
    check_same(found.config.for_context(len(TOKENS)), found, expected)
    if scaling is not None:  # the scaling is no matter of rounding
        plain, _ = Reference(replace(found.config, rope_scaling=None), found.tensors()).forward(
            TOKENS
        )
        assert (plain - expected).abs().max() > 0.05 * expected.abs().max()


def test_dynamic_scaling_below_the_trained_length_changes_nothing(tmp_path: Path) -> None:
    config = replace(LLAMA, rope_scaling=DynamicNtk(2.0, 64))
    assert config.for_context(64) == replace(config, rope_scaling=None)
    long = config.for_context(1000)
    assert (long.rope_scaling, long.context_tokens) == (None, 1000)
    assert long.for_context(2000) == long  # resolved once
    with pytest.raises(ValueError, match="dynamic NTK scaling depends on ctx"):
        config.rotations(5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shard", [None, "30KB"])
def test_half_precision_and_shards(tmp_path: Path, dtype: torch.dtype, shard: str | None) -> None:
    write_folder(tmp_path, weights_of(QWEN2), dtype, shard)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3 if shard else True
    found = load_folder(tmp_path, "qwen")
    assert found.config == replace(QWEN2, name="qwen")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    check_same(QWEN2, found, logits(theirs, TOKENS))


# -- GGUF files -----------------------------------------------------------------------------------

TYPES = [
    GGMLQuantizationType[name]
    for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
]
# K-quantised blocks are rows of 256.
WIDE = dict(hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=256, vocab=300, stop_ids=(2,))
WIDE |= dict(bos_id=1, rms_eps=float(np.float32(1e-5)))
GGUF = {
    "llama": replace(LLAMA, **WIDE),
    "qwen2": replace(QWEN2, **WIDE),
    "qwen3": replace(QWEN3, tied_embeddings=True, **WIDE),
}


class Rounded(RandomModel):
    """The weights of `write_gguf` after a round trip through a quantisation."""

    def __init__(self, config: ModelConfig, dtype: GGMLQuantizationType) -> None:
        super().__init__(config, 7)
        self.dtype = dtype

    def tensor(self, name: str) -> FloatArray:
        values = super().tensor(name)
        if values.ndim == 1:
            return values
        blocks = quantized(self.stored(name, values), self.dtype)
        return self.stored(name, dequantize(blocks, self.dtype).reshape(values.shape), back=True)

    def stored(self, name: str, values: FloatArray, back: bool = False) -> FloatArray:
        """Rows as the file has them: rotary pairs of Llama side by side."""
        part = name.rpartition(".")[2]
        if part not in ("q", "k") or self.config.qkv_bias or self.config.qk_norm:
            return values
        heads, half = self.config.heads if part == "q" else self.config.kv_heads, 32
        shape = (heads, half, 2) if back else (heads, 2, half)
        return values.reshape(*shape, -1).swapaxes(1, 2).reshape(values.shape)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("architecture", GGUF)
def test_gguf_files(tmp_path: Path, architecture: str, dtype: GGMLQuantizationType) -> None:
    config = GGUF[architecture]
    path = write_gguf(tmp_path / "tiny.gguf", config, dtype=dtype, architecture=architecture)
    found, rounded = load(path), Rounded(config, dtype)
    assert found.config == config
    for name, values in found.tensors():
        np.testing.assert_array_equal(values, rounded.tensor(name), err_msg=name)
    check_same(config, found, logits(transformers_model(rounded), TOKENS))


def llama3_factors(head_dim: int, theta: float, scaling: Llama3) -> np.ndarray:
    """The tensor that stands for Llama 3 scaling in a GGUF file, wavelength by wavelength."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < scaling.original_context / scaling.high_freq_factor:
            factors.append(1.0)
        elif wavelength > scaling.original_context / scaling.low_freq_factor:
            factors.append(scaling.factor)
        else:
            smooth = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            factors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return np.array(factors, np.float32)


GGUF_ROPE: dict[str, tuple[str, Any, dict[str, Any], dict[str, Any]]] = {
    "linear": ("llama", Linear(4.0), {"type": "linear", "factor": 4.0}, {}),
    "linear without its name": ("qwen3", Linear(4.0), {"factor": 4.0}, {}),
    "none": ("qwen2", None, {"type": "none", "factor": 4.0}, {}),
    "yarn": (
        "qwen2",
        Yarn(4.0, 32),
        {"type": "yarn", "factor": 4.0, "original_context_length": 32, "finetuned": True},
        {},
    ),
    "yarn, all keys": (
        "qwen3",
        Yarn(4.0, 64, 16.0, 2.0, attention_factor=0.75 * (0.1 * math.log(4.0) + 1)),
        {
            "type": "yarn", "factor": 4.0, "attn_factor": 0.75, "yarn_beta_fast": 16.0,
            "yarn_beta_slow": 2.0, "yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0,
        },
        {},
    ),
    "llama3": (
        "llama",
        Llama3(8.0, 32, 1.0, 4.0),
        {},
        {"rope_freqs.weight": llama3_factors(64, 700.0, Llama3(8.0, 32, 1.0, 4.0))},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GGUF_ROPE)
def test_rope_scaling_of_gguf_files(tmp_path: Path, name: str) -> None:
    architecture, scaling, keys, tensors = GGUF_ROPE[name]
    config = GGUF[architecture]
    path = write_gguf(
        tmp_path / "tiny.gguf", config, architecture=architecture, tensors=tensors,
        keys={f"{architecture}.rope.scaling.{key}": value for key, value in keys.items()},
    )  # fmt: skip
    found = load(path)
    if isinstance(scaling, Llama3):
        assert isinstance(found.config.rope_scaling, FrequencyFactors)
    else:
        assert found.config.rope_scaling == scaling
    scaled = RandomModel(replace(config, rope_scaling=scaling), 7)
    check_same(found.config, found, logits(transformers_model(scaled), TOKENS))


# -- through the rings ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_engines(tmp_path: Path, name: str) -> None:
    """A prompt of two chunks and fifty tokens, greedily: those of transformers."""
    config, options = SHAPES[name]
    theirs = write_folder(tmp_path / "tiny", weights_of(config), **options)
    prompt = TOKENS[:70].tolist()
    with (
        warnings.catch_warnings(record=True) as said,
        Engine(
            tmp_path / "tiny", ctx=128, slots=2, workers=2, chunk_rows=64, draft="off"
        ) as engine,
    ):
        warnings.simplefilter("always")
        assert engine.tokenizer is None
        assert engine.config.stop_ids == config.stop_ids
        params = SamplingParams(max_new_tokens=50, ignore_eos=True)
        result = engine.submit(prompt, params).result(60)
        assert engine.submit(prompt, params).result(60).token_ids == result.token_ids
        beyond = len(prompt) + 50 > engine.config.context_tokens
        assert len(said) == beyond  # once, and not where scaling reaches further
        assert beyond == (config.rope_scaling is None or isinstance(config.rope_scaling, Llama3))
    if isinstance(config.rope_scaling, DynamicNtk):  # theirs grows as it goes; ours is fixed
        theirs = transformers_model(weights_of(config.for_context(128)))
    expected = logits(theirs, [*prompt, *result.token_ids[:-1]])[69:]
    top = expected.topk(2).values
    clear = top[:, 0] - top[:, 1] > 1e-3 * expected.abs().max()
    assert clear.sum() > 40
    assert torch.equal(torch.tensor(result.token_ids)[clear], expected.argmax(1)[clear])


def test_speculation_on_a_target_with_biases_and_norms() -> None:
    """The drafter's head norms and the target's are two things: tokens are those of plain decoding,
    bit for bit, and its drafts are its own."""
    shape = replace(TARGET, qkv_bias=True, qk_norm=True, rope_scaling=Yarn(4.0, 64))
    model, prompt = random_model(shape, seed=5), TOKENS[:70].tolist()
    params = SamplingParams(max_new_tokens=120, temperature=1.5, seed=3, ignore_eos=True)
    options: dict[str, Any] = dict(ctx=512, slots=4, workers=2)
    with Engine(model, draft="off", **options) as engine:
        plain = engine.submit(prompt, params).result(60)
    with Engine(model, draft=drafter(), budget=20, **options) as engine:
        drafted = engine.submit(prompt, params).result(60)
    assert drafted.token_ids == plain.token_ids
    assert drafted.logprobs == plain.logprobs


@pytest.mark.parametrize("kind", ["qwen", "llama2"])
def test_text_in_and_text_out_of_a_folder(tmp_path: Path, kind: str) -> None:
    pipeline = KINDS[kind]()
    config = replace(QWEN2, vocab=pipeline.get_vocab_size() + 5, context_tokens=256)
    write_folder(tmp_path, weights_of(config))
    pipeline.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|bos|>", "eos_token": "<|end|>"})
    )
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<|bos|>", eos_token="<|end|>"
    )
    text, params = "They'll say 12345 — 日本語 <|end|>", SamplingParams(max_new_tokens=40)
    chat = [{"role": "user", "content": "hello world"}]
    with Engine(tmp_path, ctx=256, slots=2, workers=2, draft="off") as engine:
        plain = theirs.encode(text.replace("<|end|>", ""))
        assert engine.encode(text, chat=False).tolist()[: len(plain)] == plain
        assert theirs.convert_tokens_to_ids("<|end|>") not in engine.encode(text, chat=False)
        rendered = theirs.apply_chat_template(chat, chat_template=CHAT_TEMPLATE, tokenize=False)
        ids = theirs.encode(rendered, add_special_tokens=False)
        assert engine.encode(chat).tolist()[: len(ids)] == ids
        result = engine.submit(chat, params).result(60)
        raw = engine.submit(text, params, chat=False).result(60)
        assert result.text == engine.tokenizer.decode(result.token_ids)
        assert len(raw.token_ids) > 0


def test_a_known_path_of_either_kind(tmp_path: Path) -> None:
    write_folder(tmp_path / "folder", weights_of(QWEN3))
    path = write_gguf(tmp_path / "tiny.gguf", GGUF["qwen2"], architecture="qwen2")
    assert load_model(tmp_path / "folder").config.name == "folder"
    assert load_model(str(path)).config == GGUF["qwen2"]
