"""The command, end to end, on a tiny model that writes ASCII and ends its turns."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from tiny_gguf import TINY, TOP, write_gguf
from typer.testing import CliRunner

from megadecode.cli import app
from megadecode.drafter import load_drafter
from megadecode.errors import ModelError
from megadecode.models.gguf_file import load
from megadecode.models.random_model import random_model
from megadecode.reference import Reference
from megadecode.training.corpus import Corpus
from megadecode.training.evaluate import read_texts
from megadecode.training.frame import Frame

TALKATIVE = dataclasses.replace(
    TINY, name="talkative", layers=4, hidden=64, heads=2, kv_heads=1, head_dim=32,
    context_tokens=2048, tied_embeddings=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def talkative(tmp_path_factory):
    """Bytes above ASCII and two control tokens are never likely; the stop token is now and then,
    turned over, as its row happens to point away from where this model's states lie."""
    head = np.array(random_model(TALKATIVE, 7).tensor("head"))
    head[3:131] *= 2.5
    head[[0, 1, *range(131, 300)]] *= 0.01
    head[2] *= -3
    path = tmp_path_factory.mktemp("model") / "talkative.gguf"
    return write_gguf(path, TALKATIVE, tensors={TOP["head"]: head})


def test_a_conversation_is_put_together_as_the_template_would(talkative) -> None:
    tokenizer = load(talkative).tokenizer()
    frame = Frame.of(tokenizer)
    turns = ["Why?", "Because.", "And then?"]
    said = [tokenizer.encode(turn, specials=False) for turn in turns]
    whole = tokenizer.chat(
        [{"role": r, "content": t} for r, t in zip(("user", "assistant", "user"), turns)]
    )
    assert frame.conversation([(said[0], [*said[1], frame.stop_id])], said[2]) == whole
    assert frame.stop_id == 2


def test_the_command_trains_judges_and_goes_on(talkative, tmp_path) -> None:
    words = [
        "train-drafter", str(talkative), "--out", str(tmp_path), "--device", "cpu", "--answers",
        "48", "--rewrites", "6", "--long", "2", "--answer-tokens", "24", "--rows", "16", "--steps",
        "20", "--tokens", "1024", "--blocks", "32", "--layers", "1", "--texts", "1",
    ]  # fmt: skip
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    corpus = Corpus.load(tmp_path / "corpus.npz")
    assert len(corpus) >= 48 and corpus.lengths.max() > 1500
    assert corpus.about["target"] == "talkative"
    sample = next(s for s in map(corpus.sample, range(len(corpus))) if s.temperature == 0)
    answer = Reference(TALKATIVE, load(talkative).tensors()).greedy(
        sample.tokens[: sample.prompt_tokens], len(sample.tokens) - sample.prompt_tokens, (2,)
    )[0]
    assert sample.tokens[sample.prompt_tokens :] == answer
    record = json.loads((tmp_path / "training.json").read_text())
    losses = [report["loss"] for report in record["history"]]
    assert record["steps"] == 20 and np.isfinite(losses).all()
    texts = read_texts(tmp_path / "held-out.jsonl")
    trained = {tuple(corpus.sample(i).tokens) for i in np.flatnonzero(~corpus.held_out)}
    assert not trained & {text.ids for text in texts}
    drafter = load_drafter(tmp_path / "drafter.safetensors", load(talkative))
    assert drafter.config.layer_types == ("sliding_attention",)
    first = drafter.tensors()
    again = CliRunner().invoke(app, words, catch_exceptions=False)  # the corpus is not rewritten
    assert again.exit_code == 0
    for name, values in load_drafter(tmp_path / "drafter.safetensors").tensors().items():
        np.testing.assert_array_equal(values, first[name])
    other = write_gguf(tmp_path / "other.gguf", dataclasses.replace(TALKATIVE, ffn=96))
    with pytest.raises(ModelError, match="was written by another model"):
        CliRunner().invoke(app, [words[0], str(other), *words[2:]], catch_exceptions=False)
