"""The tokenizer of a Hugging Face folder: `tokenizer.json` as the `tokenizers` package runs it.

The pipeline is the file's own. Changed are only its control tokens, which are renamed to marks (see
`tokenizer`), and padding and truncation, which are left out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Pipeline

from megadecode.errors import ModelError
from megadecode.models.files import read_json
from megadecode.models.tokenizer import (
    Marks,
    Tokenizer,
    byte_level_bytes,
    sentencepiece_bytes,
)

FILE, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_OTHERS = ("tokenizer.model", "vocab.json")


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """The folder's tokenizer; None if there is none. Raises ModelError naming the file."""
    path = folder / FILE
    if not path.exists():
        if others := [name for name in _OTHERS if (folder / name).exists()]:
            raise ModelError(
                f"{folder}: there is {others[0]}, but no {FILE}; "
                "transformers' AutoTokenizer writes one with save_pretrained"
            )
        return None
    try:
        return _read(folder, read_json(path), _settings(folder))
    except ModelError as error:
        text = str(error)
        raise ModelError(text if text.startswith(str(folder)) else f"{path}: {text}") from None


def read_template(folder: Path) -> str | None:
    """The Jinja source of the chat template: a file of its own, or a key of the settings."""
    return _find_template(folder)[1]


def _find_template(folder: Path) -> tuple[Path, str | None]:
    """Where the chat template stands, and its source."""
    path = folder / TEMPLATE
    if path.exists():
        try:
            return path, path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path}: cannot be read: {error}") from None
    template = _settings(folder).get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    path = folder / SETTINGS
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{path}: chat_template is {template!r:.80}; expected text")
    return path, template


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / SETTINGS
    return read_json(path) if path.exists() else {}


def _read(folder: Path, data: dict[str, Any], settings: dict[str, Any]) -> Tokenizer:
    model = data.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE":
        kind = model.get("type") if isinstance(model, dict) else model
        raise ModelError(f"tokenizer model {kind!r:.80} is not supported; supported: 'BPE'")
    vocabulary = model.get("vocab")
    if not isinstance(vocabulary, dict) or not all(
        type(i) is int and i >= 0 for i in vocabulary.values()
    ):
        raise ModelError("model.vocab is missing or is not a table of token ids")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key) not in (None, "", 0.0):
            raise ModelError(f"model.{key} = {model[key]!r:.80} is not supported")
    to_bytes, marks = _spelling(data), Marks()
    data |= {"padding": None, "truncation": None}
    control, own_text = _mark_control_tokens(data, _added_tokens(data, settings), marks)
    size = 1 + max(vocabulary.values(), default=-1)
    if size > len(vocabulary) + 1_000_000:
        raise ModelError(f"the largest token id is {size - 1} in a vocabulary of {len(vocabulary)}")
    try:
        pipeline = Pipeline.from_str(json.dumps(data))
    except Exception as error:  # the package raises bare Exception
        raise ModelError(f"cannot be used: {error}") from None

    token_bytes = [b""] * size
    silent = set(range(size)) - set(vocabulary.values()) | set(control.values())
    for text, number in vocabulary.items():
        if number in own_text:
            token_bytes[number] = own_text[number].encode()
        elif number not in silent:
            token_bytes[number] = to_bytes(text)
    prefix = _prefix(pipeline, control, settings)
    where, template = _find_template(folder)
    try:
        return Tokenizer(
            pipeline,
            marks,
            token_bytes,
            {text: number for text, number in control.items() if text},
            silent=silent,
            prefix=prefix,
            named=_named(settings),
            chat_template=template,
        )
    except ModelError as error:  # the template's
        raise ModelError(f"{where}: {error}") from None


def _mark_control_tokens(
    data: dict[str, Any], added: list[dict[str, Any]], marks: Marks
) -> tuple[dict[str, int], dict[int, str]]:
    """Rename control tokens to their marks throughout `data`.

    Returns the control tokens, text -> id, and the text of the other added tokens by id.
    """
    model: dict[str, Any] = data["model"]
    control: dict[str, int] = {}
    own_text: dict[int, str] = {}
    data["added_tokens"] = []
    for token in added:
        text, number = token["content"], token["id"]
        if token.get("special"):
            control[text] = number
            model["vocab"].pop(text, None)
            token = token | {"content": marks[number]}
            if model.get("unk_token") == text:  # the model looks it up by its name
                model["unk_token"] = marks[number]
        else:
            own_text[number] = text
        # A token that the model's own vocabulary holds keeps its id when it is added.
        model["vocab"][token["content"]] = number
        data["added_tokens"].append(token)
    return control, own_text


def _added_tokens(data: dict[str, Any], settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of the file, and those that only the settings know."""
    added = data.get("added_tokens") or []
    more = settings.get("added_tokens_decoder") or {}
    try:
        known = {token["id"] for token in added}
        added = [*added, *({"id": int(i), **t} for i, t in more.items() if int(i) not in known)]
        sound = all(
            isinstance(t["content"], str) and type(t["id"]) is int and t["id"] >= 0 for t in added
        )
    except (TypeError, KeyError, ValueError, AttributeError):
        sound = False
    if not sound:
        raise ModelError("added_tokens is damaged: every entry needs an id and a content")
    return added


def _spelling(data: dict[str, Any]) -> Any:
    """How tokens spell bytes, told by the decoder. Raises ModelError for an unknown way."""
    decoder = data.get("decoder")
    steps = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    kinds = [step.get("type") for step in steps if isinstance(step, dict)]
    if "ByteLevel" in kinds:
        return byte_level_bytes
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return sentencepiece_bytes
    raise ModelError(
        f"decoder {', '.join(map(str, kinds)) or None} is not supported; "
        "supported: ByteLevel, and ByteFallback or Metaspace (SentencePiece)"
    )


def _prefix(pipeline: Pipeline, control: dict[str, int], settings: dict[str, Any]) -> list[int]:
    """Ids in front of a raw prompt: the settings' BOS token, else what the file's pipeline adds."""
    if settings.get("add_eos_token"):
        raise ModelError(f"{SETTINGS}: add_eos_token is not supported: a prompt has no end")
    add_bos = settings.get("add_bos_token")
    if add_bos is None:
        bare = pipeline.encode("a", add_special_tokens=False).ids
        full = pipeline.encode("a", add_special_tokens=True).ids
        prefix = full[: len(full) - len(bare)]
        if prefix + bare != full:
            raise ModelError("post_processor adds tokens behind the text: not supported")
        for token in prefix:
            if pipeline.id_to_token(token) is None:
                raise ModelError(f"post_processor adds token {token}, which does not exist")
        return prefix
    if not add_bos:
        return []
    bos = _named(settings).get("bos_token")
    if bos not in control:
        raise ModelError(f"{SETTINGS}: add_bos_token asks for a bos_token; it is {bos!r}")
    return [control[bos]]


def _named(settings: dict[str, Any]) -> dict[str, str]:
    """The special tokens a chat template may ask for by name."""
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found
