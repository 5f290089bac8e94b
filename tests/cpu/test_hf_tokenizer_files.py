"""A folder's tokenizer files: what their keys mean, and what cannot be used, with a message."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import write_tokenizer

from megadecode.errors import ModelError, PromptError
from megadecode.models.hf_tokenizer import read_tokenizer


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "llama3", "llama3")


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "llama3"))


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
