"""tokenizer.json of every kind: the ids of transformers, text that stays text, refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import CONTROL, KINDS, LONG, TEMPLATE, WORDS
from transformers import PreTrainedTokenizerFast

from megadecode.errors import ModelError, PromptError
from megadecode.models.gguf_tokenizer import from_gguf
from megadecode.models.hf_tokenizer import read_tokenizer
from megadecode.models.stream import TextStream
from megadecode.models.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("tokenizers")
    for name, make in KINDS.items():
        (home / name).mkdir()
        made = make()
        made.enable_truncation(3)  # a file may hold both; neither is for prompts
        made.enable_padding(length=40)
        made.save(str(home / name / "tokenizer.json"))
        settings = {"eos_token": "<|end|>", "bos_token": {"content": "<|bos|>"}}
        settings["chat_template"] = TEMPLATE
        (home / name / "tokenizer_config.json").write_text(json.dumps(settings))
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


# -- what a folder may hold -----------------------------------------------------------------------


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written / "llama3", tmp_path / "llama3"))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def test_beginnings(folder: Path) -> None:
    """BOS as the settings want it; where they are silent, as the file's own pipeline adds it."""
    bos = read_tokenizer(folder).encode("<|bos|>", specials=True)  # type: ignore[union-attr]
    for value, expected in ((None, bos), (True, bos), (False, [])):
        edit(folder / "tokenizer_config.json", lambda v, value=value: v.update(add_bos_token=value))
        tokenizer = read_tokenizer(folder)
        assert tokenizer is not None
        assert tokenizer.prompt("a") == expected + tokenizer.encode("a", specials=False)


def test_templates(folder: Path) -> None:
    settings = folder / "tokenizer_config.json"
    messages = [{"role": "user", "content": "a"}]

    def said() -> str:
        tokenizer = read_tokenizer(folder)
        assert tokenizer is not None
        return tokenizer.decode(tokenizer.chat(messages))

    assert said() == "user\na\nassistant\n<think>"
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    edit(settings, lambda v: v.update(chat_template=several))
    assert said() == "y"
    (folder / "chat_template.jinja").write_text("z{{ eos_token }}")
    assert said() == "z"
    (folder / "chat_template.jinja").unlink()
    edit(settings, lambda v: v.update(chat_template=several[:1]))
    with pytest.raises(PromptError, match="this model has no chat template"):
        said()
    edit(settings, lambda v: v.update(chat_template=5))
    with pytest.raises(ModelError) as caught:
        said()
    assert str(caught.value) == f"{settings}: chat_template is 5; expected text"
    edit(settings, lambda v: v.update(chat_template="{% if %}"))
    with pytest.raises(ModelError) as caught:
        said()
    assert str(caught.value).startswith(f"{settings}: the chat template cannot be compiled: ")


def test_tokens_that_only_the_settings_know(folder: Path) -> None:
    size = read_tokenizer(folder).vocab_size  # type: ignore[union-attr]
    more = {str(size): {"content": "<|more|>", "special": True, "lstrip": False, "rstrip": False,
                        "single_word": False, "normalized": False}}  # fmt: skip
    edit(folder / "tokenizer_config.json", lambda v: v.update(added_tokens_decoder=more))
    tokenizer = read_tokenizer(folder)
    assert tokenizer is not None
    assert tokenizer.encode("a<|more|>", specials=True)[-1] == size
    assert size not in tokenizer.encode("a<|more|>", specials=False)


def test_no_tokenizer(tmp_path: Path) -> None:
    assert read_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelError) as caught:
        read_tokenizer(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: there is tokenizer.model, but no tokenizer.json; transformers' AutoTokenizer "
        "writes one with save_pretrained"
    )


FILE, SETTINGS = "tokenizer.json", "tokenizer_config.json"
WRONG: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "model": (
        FILE, lambda v: v.update(model={"type": "Unigram"}),
        "tokenizer model 'Unigram' is not supported; supported: 'BPE'",
    ),
    "no model": (FILE, lambda v: v.pop("model"), "tokenizer model None is not supported;"),
    "vocabulary": (
        FILE, lambda v: v["model"].update(vocab=["a"]),
        "model.vocab is missing or is not a table of token ids",
    ),
    "ids": (
        FILE, lambda v: v["model"].update(vocab={"a": "1"}),
        "model.vocab is missing or is not a table of token ids",
    ),
    "far ids": (
        FILE, lambda v: v["model"]["vocab"].update(zzz=2**40),
        f"the largest token id is {2**40} in a vocabulary of ",
    ),
    "dropout": (
        FILE, lambda v: v["model"].update(dropout=0.1), "model.dropout = 0.1 is not supported",
    ),
    "prefix": (
        FILE,
        lambda v: v["model"].update(continuing_subword_prefix="##"),
        "model.continuing_subword_prefix = '##' is not supported",
    ),
    "decoder": (
        FILE, lambda v: v.update(decoder={"type": "WordPiece"}),
        "decoder WordPiece is not supported; supported: ByteLevel, and ByteFallback or Metaspace",
    ),
    "no decoder": (FILE, lambda v: v.pop("decoder"), "decoder None is not supported;"),
    "alphabet": (
        FILE, lambda v: v["model"]["vocab"].update({"日本": 9999}),
        "token '日本' is not in the byte-level alphabet",
    ),
    "merges": (
        FILE, lambda v: v["model"]["merges"].append(["日", "本"]), "cannot be used: ",
    ),
    "pre-tokenizer": (
        FILE, lambda v: v.update(pre_tokenizer={"type": "Magic"}), "cannot be used: ",
    ),
    "added": (
        FILE, lambda v: v.update(added_tokens=[{"id": 3}]),
        "added_tokens is damaged: every entry needs an id and a content",
    ),
    "added below zero": (
        FILE, lambda v: v["added_tokens"][0].update(id=-1),
        "added_tokens is damaged: every entry needs an id and a content",
    ),
    "added in settings": (
        SETTINGS, lambda v: v.update(added_tokens_decoder={"x": {}}),
        "added_tokens is damaged: every entry needs an id and a content",
    ),
    "ends": (
        FILE,
        lambda v: v["post_processor"]["single"].append(
            {"SpecialToken": {"id": "<|bos|>", "type_id": 0}}
        ),
        "post_processor adds tokens behind the text: not supported",
    ),
    "beginning": (
        FILE,
        lambda v: v["post_processor"]["special_tokens"]["<|bos|>"].update(ids=[4000]),
        "post_processor adds token 4000, which does not exist",
    ),
    "eos": (
        SETTINGS, lambda v: v.update(add_eos_token=True),
        "tokenizer_config.json: add_eos_token is not supported: a prompt has no end",
    ),
    "bos": (
        SETTINGS, lambda v: v.update(add_bos_token=True, bos_token="<|nobody|>"),
        "tokenizer_config.json: add_bos_token asks for a bos_token; it is '<|nobody|>'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_files_that_cannot_be_used(folder: Path, name: str) -> None:
    file, change, message = WRONG[name]
    edit(folder / file, change)
    with pytest.raises(ModelError) as caught:
        read_tokenizer(folder)
    assert str(caught.value).startswith(f"{folder / FILE}: {message}")


@pytest.mark.parametrize("file", [FILE, SETTINGS])
def test_files_that_are_not_json(folder: Path, file: str) -> None:
    (folder / file).write_text("{")
    with pytest.raises(ModelError) as caught:
        read_tokenizer(folder)
    assert str(caught.value).startswith(f"{folder / file}: is not JSON: ")


ANYTHING = ("x", -1, 0, 1.5, None, True, [], [7], {}, {"a": 1}, 10**400)


@pytest.mark.parametrize("file", [FILE, SETTINGS])
def test_any_value_of_any_key_is_a_tokenizer_or_a_message(folder: Path, file: str) -> None:
    whole = (folder / file).read_text()
    keys = [(key,) for key in json.loads(whole)]
    keys += [("model", key) for key in json.loads(whole).get("model", {})]
    keys += [("add_bos_token",), ("add_eos_token",), ("added_tokens_decoder",)]
    messages = 0
    for *outer, key in keys:
        for value in ANYTHING:
            values = json.loads(whole)
            table = values[outer[0]] if outer else values
            table[key] = value
            (folder / file).write_text(json.dumps(values))
            try:
                tokenizer = read_tokenizer(folder)
                assert tokenizer is not None
                tokenizer.decode(tokenizer.prompt("a b"))
            except ModelError as error:
                messages += 1
                assert str(error).startswith(str(folder))
    assert messages > len(keys)
