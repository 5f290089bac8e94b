"""tokenizer.json of every kind: the ids of transformers, and text that stays text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import CONTROL, KINDS, LONG, TEMPLATE, WORDS, write_tokenizer
from transformers import PreTrainedTokenizerFast

from megadecode.errors import ModelError
from megadecode.models.gguf_tokenizer import from_gguf
from megadecode.models.hf_tokenizer import read_tokenizer
from megadecode.models.stream import TextStream
from megadecode.models.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("tokenizers")
    for name in KINDS:
        write_tokenizer(home / name, name)
    return home


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, written: Path) -> tuple[Tokenizer, Any]:
    """Ours, and transformers' of the same file."""
    folder = written / request.param
    ours = read_tokenizer(folder)
    assert ours is not None
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<|bos|>", eos_token="<|end|>"
    )
    theirs.backend_tokenizer.no_truncation()
    theirs.backend_tokenizer.no_padding()
    return ours, theirs


characters = st.characters(codec="utf-8")
pieces = st.sampled_from(
    ["hello", " world", "'ll", "'S", "1234", " 5", "\n\n", "  ", "\t", "é", "é", "日本", "🎉",
     "<think>", "</think>", "<thi", "…", " " + LONG, "12345", "they'll", "—", "!?", "_x", "\r\n"]
)  # fmt: skip
texts = st.lists(pieces | st.text(characters, max_size=4), max_size=10).map("".join)
hostile = st.lists(
    st.sampled_from([*CONTROL, *WORDS, "<|", "end|>", "a ", " ", "<unk>", "<s>", "▁", "<0x41>"]),
    max_size=8,
).map("".join)
modest = settings(
    max_examples=150, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


@modest
@given(text=texts)
def test_ids_are_those_of_transformers(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = pair
    assert ours.encode(text, specials=False) == theirs.encode(text, add_special_tokens=False)
    assert ours.prompt(text) == theirs.encode(text)


@modest
@given(text=hostile)
def test_control_tokens_of_a_rendered_text(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = pair
    assert ours.encode(text, specials=True) == theirs.encode(text, add_special_tokens=False)


@modest
@given(contents=st.lists(texts, min_size=1, max_size=3))
def test_chats_are_those_of_transformers(pair: tuple[Tokenizer, Any], contents: list[str]) -> None:
    ours, theirs = pair
    roles = ["user", "assistant", "user"]
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    for generate in (True, False):
        rendered = theirs.apply_chat_template(
            messages, chat_template=TEMPLATE, add_generation_prompt=generate, tokenize=False
        )
        expected = theirs.encode(rendered, add_special_tokens=False)
        assert ours.chat(messages, add_generation_prompt=generate) == expected


@modest
@given(text=hostile)
def test_no_text_becomes_a_control_token(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = pair
    special = {theirs.convert_tokens_to_ids(name) for name in CONTROL}
    special |= {theirs.convert_tokens_to_ids("<unk>")} - {None}
    assert all(map(ours.is_special, special))
    ids = ours.encode(text, specials=False)
    assert special.isdisjoint(ids)
    chat = ours.chat([{"role": "user", "content": text}])
    assert [i for i in chat if i in special] == [
        theirs.convert_tokens_to_ids(name)
        for name in ("<|bos|>", "<|start|>", "<|end|>", "<|start|>")
    ]


@modest
@given(text=texts)
def test_round_trip(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = pair
    normalizer = theirs.backend_tokenizer.normalizer
    ids = ours.encode(text, specials=False)
    got = ours.decode(ids)
    if theirs.unk_token is None and "ByteLevel" in str(theirs.backend_tokenizer.decoder):
        assert got == (normalizer.normalize_str(text) if normalizer else text)
    else:  # U+2581 is a space, and a word at the beginning or behind an added token gets one
        bare = text.replace("\u2581", " ")
        exact = not any(word in text for word in WORDS)
        assert got.replace(" ", "") == bare.replace(" ", "")
        assert not exact or got.lstrip(" ") == bare.lstrip(" ")
    stream = TextStream(ours)
    assert "".join(stream.push([i]) for i in ids) + stream.finish() == got


def test_words_and_silence(written: Path) -> None:
    tokenizer = read_tokenizer(written / "qwen")
    assert tokenizer is not None
    ids = tokenizer.encode("<think>hm</think>", specials=False)
    assert tokenizer.decode(ids) == "<think>hm</think>"
    assert not any(map(tokenizer.is_special, ids))
    end = tokenizer.encode("<|end|>", specials=True)
    assert (len(end), tokenizer.decode(end)) == (1, "")


# -- the same vocabulary in a GGUF file -----------------------------------------------------------


def as_gguf(folder: Path, pre: str | None, scores: bool = False) -> dict[str, Any]:
    """The `tokenizer.*` keys that a converter would write."""
    data = json.loads((folder / "tokenizer.json").read_text())
    ids = dict(data["model"]["vocab"])
    added = {token["content"]: token for token in data["added_tokens"]}
    ids |= {text: token["id"] for text, token in added.items()}
    tokens = sorted(ids, key=ids.__getitem__)
    types = []
    for token in tokens:
        kind = 1
        if token in added:
            kind = 3 if added[token]["special"] else 4
        if token == data["model"].get("unk_token"):
            kind = 2
        elif scores and token.startswith("<0x"):
            kind = 6
        types.append(kind)
    merges = [" ".join(merge) for merge in data["model"]["merges"]]
    ranks = {"".join(merge.split(" ")): rank for rank, merge in reversed([*enumerate(merges)])}
    keys: dict[str, Any] = {
        "ggml.model": "llama" if scores else "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": tokens,
        "ggml.token_type": np.array(types, np.int32),
        "ggml.merges": None if scores else merges,
        "ggml.scores": np.array([-float(ranks.get(t, 1e6)) for t in tokens], np.float32)
        if scores
        else None,
        "ggml.bos_token_id": ids["<|bos|>"],
        "ggml.eos_token_id": ids["<|end|>"],
        "chat_template": TEMPLATE,
    }
    return {f"tokenizer.{key}": value for key, value in keys.items() if value is not None}


GGUF = {"qwen": ("qwen2", False), "llama3": ("llama-bpe", False), "llama2": (None, True)}


@pytest.fixture(scope="module", params=GGUF)
def both(request: pytest.FixtureRequest, written: Path) -> tuple[Tokenizer, Tokenizer]:
    pre, scores = GGUF[request.param]
    theirs = read_tokenizer(written / request.param)
    assert theirs is not None
    return from_gguf(as_gguf(written / request.param, pre, scores)), theirs


@modest
@given(text=texts | hostile)
def test_gguf_files_give_the_same_ids(both: tuple[Tokenizer, Tokenizer], text: str) -> None:
    gguf, folder = both
    assert gguf.encode(text, specials=False) == folder.encode(text, specials=False)
    assert gguf.encode(text, specials=True) == folder.encode(text, specials=True)
    assert gguf.prompt(text) == folder.prompt(text)
    ids = gguf.encode(text, specials=True)
    assert gguf.decode(ids) == folder.decode(ids)
    messages = [{"role": "user", "content": text}]
    assert gguf.chat(messages) == folder.chat(messages)


def test_unused_tokens_are_silent_and_unreachable(written: Path) -> None:
    keys = as_gguf(written / "qwen", "qwen2")
    keys["tokenizer.ggml.tokens"] = [*keys["tokenizer.ggml.tokens"], "[PAD1]", "[PAD1]"]
    types = keys["tokenizer.ggml.token_type"]
    keys["tokenizer.ggml.token_type"] = np.append(types, [5, 5]).astype(np.int32)
    tokenizer = from_gguf(keys)
    last = tokenizer.vocab_size - 1
    assert tokenizer.decode([last]) == ""
    for specials in (True, False):
        assert last not in tokenizer.encode("[PAD1]", specials=specials)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ggml.scores": None}, "tokenizer.ggml.scores is missing, but should be of type ndarray"),
        ({"ggml.scores": np.zeros(3, np.float32)}, "tokenizer.ggml.scores has 3 entries for "),
        (
            {"ggml.remove_extra_whitespaces": True},
            "tokenizer.ggml.remove_extra_whitespaces is not supported",
        ),
        ({"ggml.add_eos_token": True}, "tokenizer.ggml.add_eos_token is not supported: a prompt"),
    ],
)
def test_scores_that_cannot_be_used(written: Path, changes: dict[str, Any], message: str) -> None:
    keys = as_gguf(written / "llama2", None, scores=True)
    keys |= {f"tokenizer.{key}": value for key, value in changes.items()}
    with pytest.raises(ModelError) as caught:
        from_gguf({key: value for key, value in keys.items() if value is not None})
    assert str(caught.value).startswith(message)


def test_a_vocabulary_without_an_unknown_token(written: Path) -> None:
    keys = as_gguf(written / "llama2", None, scores=True)
    keys["tokenizer.ggml.token_type"][keys["tokenizer.ggml.token_type"] == 2] = 1
    with pytest.raises(ModelError, match=r"0 tokens of type 2 \(unknown\); expected one"):
        from_gguf(keys)
