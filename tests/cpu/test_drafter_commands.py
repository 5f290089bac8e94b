"""The commands around drafters, on a tiny model in a file, and what they are made of."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny_drafter as td
from gguf import GGUFReader
from test_gguf_export import CONFIG
from tiny_gguf import write_gguf
from typer.testing import CliRunner

from megadecode.cli import app
from megadecode.drafter import fingerprint, write_single_file
from megadecode.errors import ModelError
from megadecode.models.gguf_file import load
from megadecode.reference import Reference
from megadecode.training.card import card
from megadecode.training.evaluate import Text, read_texts, write_texts
from megadecode.training.vocabulary import frequent_tokens


@pytest.fixture
def files(tmp_path):
    """A target, its drafter, and two texts the target wrote."""
    target = load(write_gguf(tmp_path / "target.gguf"))
    config = td.dataclasses.replace(CONFIG, target_fingerprint=fingerprint(target))
    write_single_file(tmp_path / "drafter.safetensors", config, td.random_tensors(config, 3))
    oracle = Reference(target.config, target.tensors())
    prompts = [[5, 9, 44, 3], [7, 8, 250, 11, 12]]
    texts = [Text((*p, *oracle.greedy(p, 24)[0]), len(p), 24, "list") for p in prompts]
    write_texts(tmp_path / "texts.jsonl", texts)
    assert read_texts(tmp_path / "texts.jsonl") == texts
    return tmp_path


def command(*words):
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_eval_drafter(files):
    said = command(
        "eval-drafter", files / "drafter.safetensors", "--texts", files / "texts.jsonl",
        "--model", files / "target.gguf", "--out", files / "out",
    )  # fmt: skip
    result = json.loads((files / "out" / "tau.json").read_text())
    every = result["tables"][0]
    counted = every["texts"] + every["looping"]["texts"]
    assert counted == 2
    assert result["drafter"]["target_fingerprint"].startswith("sha256:")
    if every["texts"]:
        assert f"{every['tau']['N=128']:.2f}" in said
        assert 1 <= every["tau"]["N=4"] <= every["tau"]["N=16"] <= every["tau"]["N=128"] <= 8
    record = dict(recipe={"rate": 1e-3}, corpus={"answers": 2}, steps=1, seconds=2.0, device="none")
    record |= {"tables": result["tables"], "drafter": result["drafter"]}
    text = card(record)
    assert result["drafter"]["target_fingerprint"] in text
    for table in result["tables"]:
        for value in table.get("tau", {}).values():
            assert f"{value:.2f}" in text


def test_export_drafter(files):
    said = command(
        "export-drafter", files / "drafter.safetensors", "--gguf", files / "draft.gguf",
        "--model", files / "target.gguf",
    )  # fmt: skip
    assert said == f"wrote {files / 'draft.gguf'}\n"
    names = {tensor.name for tensor in GGUFReader(files / "draft.gguf").tensors}
    assert {"fc.weight", "blk.1.ffn_down.weight", "enc.output_norm.weight"} <= names


def test_a_draft_is_not_exported_for_a_folder(files):
    with pytest.raises(ModelError) as caught:
        command(
            "export-drafter", files / "drafter.safetensors", "--gguf", files / "draft.gguf",
            "--model", files,
        )  # fmt: skip
    assert str(caught.value) == (
        f"{files}: is a folder; the draft takes its tokenizer from a GGUF file"
    )
    assert not (files / "draft.gguf").exists()


def test_the_most_frequent_tokens_are_drafted():
    written = np.repeat(np.arange(100), np.arange(100)[::-1])
    tokens, share = frequent_tokens(written, 128, 32, always=(101, 3))
    assert tokens == (*range(31), 101)
    assert share == pytest.approx(sum(range(69, 100)) / len(written))
    with pytest.raises(ValueError, match="count is 33; expected a multiple of 32"):
        frequent_tokens(written, 128, 33)
