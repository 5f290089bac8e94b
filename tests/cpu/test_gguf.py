"""Reading GGUF: right values from sound files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from tiny_gguf import TINY, interleave, write_gguf

from megadecode.models import gguf_file
from megadecode.models.gguf_file import load
from megadecode.models.random_model import random_model
from megadecode.models.weights import tensor_shapes

QUANTIZED = [
    GGMLQuantizationType[name]
    for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_config_and_weights(tiny: Path) -> None:
    model = load(tiny)
    assert model.config == TINY
    names = []
    for name, values in model.tensors():
        names.append(name)
        assert values.dtype == np.float32
        assert values.flags.c_contiguous
        assert values.shape == tensor_shapes(TINY)[name]
        np.testing.assert_array_equal(values, random_model(TINY, 7).tensor(name), err_msg=name)
    assert names == list(tensor_shapes(TINY))


def test_rotary_rows_are_permuted_in_the_file() -> None:
    """The permutation is no identity, differs between q and k, and moves the rows it should."""
    q = np.arange(16.0)[:, None]
    assert interleave(q, 2)[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    assert interleave(q, 4)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15]


def test_tied_head_is_the_embedding_itself(tiny: Path) -> None:
    model = load(tiny)
    embed = model.tensor("embed")
    assert model.tensor("head") is embed


def test_untied_head(tmp_path: Path) -> None:
    config = replace(TINY, tied_embeddings=False)
    model = load(write_gguf(tmp_path / "untied.gguf", config))
    assert model.config == config
    np.testing.assert_array_equal(model.tensor("head"), random_model(config, 7).tensor("head"))
    assert not np.array_equal(model.tensor("head"), model.tensor("embed"))


def test_head_dim_other_than_hidden_over_heads(tmp_path: Path) -> None:
    config = replace(TINY, head_dim=16)
    assert load(write_gguf(tmp_path / "wide.gguf", config)).config == config


@pytest.mark.parametrize("dtype", QUANTIZED, ids=lambda dtype: dtype.name)
def test_dequantisation_is_the_packages_own(tmp_path: Path, dtype: GGMLQuantizationType) -> None:
    """Cutting the bytes into other pieces than rows changes no value; no piece is lost."""
    model = load(write_gguf(tmp_path / "q.gguf", dtype=dtype))
    for name in ("embed", "layers.1.down", "layers.0.v"):
        values = random_model(TINY, 7).tensor(name)
        expected = dequantize(quantize(values, dtype), dtype).reshape(values.shape)
        np.testing.assert_array_equal(model.tensor(name), expected)


@pytest.mark.parametrize("elements", [32, 96, 1024, 16384])
def test_piece_size_never_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elements: int
) -> None:
    path = write_gguf(tmp_path / "q.gguf", dtype=GGMLQuantizationType.Q4_1)
    expected = dict(load(path).tensors())
    monkeypatch.setattr(gguf_file, "PIECE_ELEMENTS", elements)
    for name, values in load(path).tensors():
        np.testing.assert_array_equal(values, expected[name])


def test_per_layer_values_that_are_all_equal(tmp_path: Path) -> None:
    keys = {"llama.attention.head_count_kv": [2, 2], "llama.feed_forward_length": [64, 64]}
    assert load(write_gguf(tmp_path / "layers.gguf", keys=keys)).config == TINY


def test_neutral_keys_are_accepted(tmp_path: Path) -> None:
    keys = {
        "llama.rope.scaling.type": "none",
        "llama.expert_count": 0,
        "llama.attention.causal": True,
        "llama.attention.key_length": None,
        "llama.rope.dimension_count": None,
        "llama.vocab_size": None,
    }
    assert load(write_gguf(tmp_path / "neutral.gguf", keys=keys)).config == TINY


def test_every_end_of_generation_token_stops(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 2}
    assert load(write_gguf(tmp_path / "eot.gguf", keys=keys)).config.stop_ids == (2, 0)


def test_default_model(model: gguf_file.LoadedModel) -> None:
    config = model.config
    assert (config.layers, config.hidden, config.heads, config.kv_heads) == (30, 576, 9, 3)
    assert (config.head_dim, config.ffn, config.vocab) == (64, 1536, 49152)
    assert (config.context_tokens, config.rope_theta) == (8192, 100000.0)
    assert config.tied_embeddings
    assert config.stop_ids == (2,)
