"""The exported draft model, read back by the `gguf` package."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tiny_drafter as td
from gguf import GGUFReader
from tiny_gguf import TINY, vocabulary, write_gguf

from megadecode.drafter import Yarn
from megadecode.drafter.config import SLIDING
from megadecode.drafter.gguf_export import export_gguf
from megadecode.errors import ModelError
from megadecode.models.gguf_file import load

CONFIG = td.variant(
    hidden=TINY.hidden, heads=TINY.heads, kv_heads=TINY.kv_heads, head_dim=TINY.head_dim,
    ffn=TINY.ffn, vocab=TINY.vocab, layers=2, taps=(0,), target_layers=TINY.layers,
    mask_token_id=77, rope_theta=5000.0,
)  # fmt: skip


@pytest.fixture
def target(tmp_path):
    return write_gguf(tmp_path / "target.gguf")


def export(target, tmp_path, **changes):
    drafter = td.drafter(dataclasses.replace(CONFIG, **changes), seed=3)
    export_gguf(drafter, target, tmp_path / "draft.gguf", 128)
    return drafter, GGUFReader(tmp_path / "draft.gguf")


def test_keys(target, tmp_path):
    _, reader = export(target, tmp_path)
    found = {name: field.contents() for name, field in reader.fields.items()}
    expected = {
        "general.architecture": "dflash",
        "dflash.block_count": 2,
        "dflash.context_length": 128,
        "dflash.embedding_length": TINY.hidden,
        "dflash.feed_forward_length": TINY.ffn,
        "dflash.attention.head_count": TINY.heads,
        "dflash.attention.head_count_kv": TINY.kv_heads,
        "dflash.attention.key_length": TINY.head_dim,
        "dflash.attention.value_length": TINY.head_dim,
        "dflash.attention.causal": False,
        "dflash.rope.freq_base": 5000.0,
        "dflash.rope.dimension_count": TINY.head_dim,
        "dflash.block_size": 8,
        "dflash.target_layers": [1],  # what goes into layer 1 is what layer 0 put out
        "tokenizer.ggml.mask_token_id": 77,
        "tokenizer.ggml.tokens": vocabulary()[0],
        "tokenizer.ggml.eos_token_id": 2,
    }
    assert {name: found[name] for name in expected} == expected
    assert found["dflash.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    assert "dflash.attention.sliding_window" not in found


def test_tensors_are_the_drafters(target, tmp_path):
    drafter, reader = export(target, tmp_path)
    stored = {tensor.name: tensor.data for tensor in reader.tensors}
    names = {"fc": "fc", "context_norm": "enc.output_norm", "final_norm": "output_norm"}
    for part, name in (
        ("attn_norm", "attn_norm"), ("q", "attn_q"), ("k", "attn_k"), ("v", "attn_v"),
        ("o", "attn_output"), ("q_norm", "attn_q_norm"), ("k_norm", "attn_k_norm"),
        ("ffn_norm", "ffn_norm"), ("gate", "ffn_gate"), ("up", "ffn_up"), ("down", "ffn_down"),
    ):  # fmt: skip
        names |= {f"layers.{i}.{part}": f"blk.{i}.{name}" for i in range(2)}
    assert stored.keys() == {f"{name}.weight" for name in names.values()}
    for canonical, name in names.items():
        np.testing.assert_array_equal(stored[f"{name}.weight"], drafter.get(canonical))


def test_a_smaller_vocabulary_brings_its_own_head(target, tmp_path):
    tokens = tuple(range(3, 99))
    _, reader = export(target, tmp_path, draft_tokens=tokens)
    stored = {tensor.name: tensor.data for tensor in reader.tensors}
    assert stored["d2t"].tolist() == list(tokens) and stored["d2t"].dtype == np.int64
    np.testing.assert_array_equal(stored["output.weight"], load(target).tensor("head")[3:99])


def test_windows(target, tmp_path):
    kinds = (SLIDING, SLIDING)
    _, reader = export(target, tmp_path, layer_types=kinds, window=32)
    found = {name: field.contents() for name, field in reader.fields.items()}
    assert found["dflash.attention.sliding_window"] == 32
    assert found["dflash.attention.sliding_window_pattern"] == [True, True]
    assert found["dflash.attention.causal"] is True


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        (dict(prediction="next"), "prediction"),
        (dict(taps=(1,)), "last layer"),
        (dict(layer_types=(SLIDING, "full_attention"), window=32), "causal"),
        (dict(yarn=Yarn(factor=2.0, original_context=64)), "yarn"),
    ],
)
def test_what_llama_cpp_cannot_run_is_refused(target, tmp_path, changes, word):
    with pytest.raises(ModelError, match=word):
        export(target, tmp_path, **changes)
    assert not (tmp_path / "draft.gguf").exists()


def test_a_target_that_is_no_gguf_file(tmp_path):
    (tmp_path / "target.gguf").write_bytes(b"nothing of the kind" * 9)
    with pytest.raises(ModelError, match="GGUF"):
        export(tmp_path / "target.gguf", tmp_path)
