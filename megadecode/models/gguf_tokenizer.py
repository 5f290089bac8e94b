"""The tokenizer that a GGUF file carries, as a pipeline of the `tokenizers` package.

Two kinds: byte-level BPE with its merges (`gpt2`: Llama 3, Qwen, SmolLM and others, which differ in
how text is split first), and SentencePiece BPE (`llama`: Llama 2), whose merges are those pairs of
tokens that make a third, in order of its score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Pipeline

from megadecode.errors import ModelError
from megadecode.models.tokenizer import (
    Marks,
    Tokenizer,
    byte_level_bytes,
    sentencepiece_bytes,
)

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)


@dataclass(frozen=True)
class PreTokenizer:
    """How text is prepared for byte-level BPE.

    `split`: into words, before bytes take their stand-ins. `whole_words`: a word that is a token is
    taken whole, whatever the merges say. `add_bos`: what holds where the file does not say.
    """

    split: Callable[[], list[Any]]
    normalizer: Callable[[], Any] | None = None
    whole_words: bool = False
    add_bos: bool = False


def _gpt2() -> list[Any]:
    return [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]


def _smollm() -> list[Any]:
    """Every digit on its own, then the GPT-2 pattern."""
    return [pre_tokenizers.Digits(individual_digits=True), *_gpt2()]


def _cl100k(digits: str) -> Callable[[], list[Any]]:
    """The pattern of cl100k and its descendants, which differ in how long a number's pieces are."""
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
        r"|[^\r\n\p{L}\p{N}]?\p{L}+"
        rf"|\p{{N}}{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+"
        r"|\s+(?!\S)"
        r"|\s+"
    )
    return lambda: [
        pre_tokenizers.Split(Regex(words), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


_LLAMA3 = PreTokenizer(_cl100k("{1,3}"), whole_words=True, add_bos=True)

# Name in the file -> what it stands for.
PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(_gpt2),
    "smollm": PreTokenizer(_smollm),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": PreTokenizer(_cl100k(""), normalizer=normalizers.NFC),
}


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """From the `tokenizer.*` keys of a GGUF file. Raises ModelError naming the key."""
    keys = _Keys(metadata)
    kind = keys.get("ggml.model", str)
    if kind not in _KINDS:
        raise ModelError(
            f"tokenizer model {kind!r} is not supported; supported: {', '.join(_KINDS)}"
        )
    allowed, to_bytes, make_pipeline = _KINDS[kind]
    tokens, types = _vocabulary(keys, allowed)
    marks = Marks()
    control = np.flatnonzero((types == _CONTROL) | (types == _UNKNOWN)).tolist()
    unused = np.flatnonzero(types == _UNUSED).tolist()
    # What the model knows: control tokens by their marks, the others by their own text.
    known = list(tokens)
    for i in control:
        known[i] = marks[i]
    ids = {token: i for i, token in enumerate(known) if types[i] != _UNUSED}
    if len(ids) + len(unused) != len(tokens):
        raise ModelError("tokenizer.ggml.tokens holds the same token twice")
    pipeline, add_bos = make_pipeline(keys, known, types, ids)
    # User-defined tokens are cut out of any text first; their text is their own.
    user_defined = np.flatnonzero(types == _USER_DEFINED).tolist()
    pipeline.add_tokens([AddedToken(tokens[i], normalized=False) for i in user_defined])
    pipeline.add_special_tokens([AddedToken(known[i], normalized=False) for i in control])

    eos_id = keys.token_id("eos", len(tokens), needed=True)
    bos_id = keys.token_id("bos", len(tokens))
    add_bos = keys.get("ggml.add_bos_token", bool, add_bos and bos_id is not None)
    if add_bos and bos_id is None:
        raise ModelError("tokenizer.ggml.add_bos_token asks for a bos_token_id; there is none")
    if keys.get("ggml.add_eos_token", bool, False):
        raise ModelError("tokenizer.ggml.add_eos_token is not supported: a prompt has no end")
    named = {"eos_token": eos_id, "bos_token": bos_id}
    spoken = (_NORMAL, _BYTE)
    return Tokenizer(
        pipeline,
        marks,
        [
            to_bytes(token) if types[i] in spoken else token.encode()
            for i, token in enumerate(tokens)
        ],
        {tokens[i]: i for i in control if tokens[i]},
        silent=unused,
        prefix=[bos_id] if add_bos and bos_id is not None else [],
        named={name: tokens[token] for name, token in named.items() if token is not None},
        chat_template=keys.get("chat_template", str, "") or None,
    )


def _vocabulary(keys: _Keys, allowed: tuple[int, ...]) -> tuple[list[str], np.ndarray]:
    tokens = keys.get("ggml.tokens", list)
    types = keys.get("ggml.token_type", np.ndarray)
    if len(types) != len(tokens):
        raise ModelError(
            f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens"
        )
    wrong = np.flatnonzero(~np.isin(types, allowed))
    if wrong.size:
        raise ModelError(f"token {wrong[0]} has type {types[wrong[0]]}, which is not supported")
    return tokens, types


def _byte_level(
    keys: _Keys, tokens: list[str], types: np.ndarray, ids: dict[str, int]
) -> tuple[Pipeline, bool]:
    name = keys.get("ggml.pre", str, "default")
    if name not in PRE_TOKENIZERS:
        raise ModelError(
            f"pre-tokenizer {name!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}"
        )
    if keys.get("ggml.add_space_prefix", bool, False):
        raise ModelError("tokenizer.ggml.add_space_prefix is not supported")
    merges = [tuple(merge.split(" ")) for merge in keys.get("ggml.merges", list)]
    for index, merge in enumerate(merges):
        if len(merge) != 2:
            raise ModelError(f"tokenizer.ggml.merges[{index}] is not a pair of tokens")
    chosen = PRE_TOKENIZERS[name]
    try:
        model = models.BPE(vocab=ids, merges=merges, ignore_merges=chosen.whole_words)
    except Exception as error:  # the package raises bare Exception
        raise ModelError(f"tokenizer.ggml.merges do not fit the vocabulary: {error}") from None
    pipeline = Pipeline(model)
    if chosen.normalizer is not None:
        pipeline.normalizer = chosen.normalizer()
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(chosen.split())
    return pipeline, chosen.add_bos


def _sentencepiece(
    keys: _Keys, tokens: list[str], types: np.ndarray, ids: dict[str, int]
) -> tuple[Pipeline, bool]:
    scores = keys.get("ggml.scores", np.ndarray)
    if len(scores) != len(tokens):
        raise ModelError(
            f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens"
        )
    unknown = np.flatnonzero(types == _UNKNOWN).tolist()
    if len(unknown) != 1:
        raise ModelError(f"{len(unknown)} tokens of type {_UNKNOWN} (unknown); expected one")
    model = models.BPE(
        vocab=ids,
        merges=_merges_by_score(tokens, types, scores),
        unk_token=tokens[unknown[0]],
        fuse_unk=True,
        byte_fallback=True,
    )
    if keys.get("ggml.remove_extra_whitespaces", bool, False):
        raise ModelError("tokenizer.ggml.remove_extra_whitespaces is not supported")
    pipeline = Pipeline(model)
    spaces: list[Any] = [normalizers.Replace(" ", "\u2581")]
    if keys.get("ggml.add_space_prefix", bool, True):
        spaces.insert(0, normalizers.Prepend("\u2581"))
    pipeline.normalizer = normalizers.Sequence(spaces)
    return pipeline, True


def _merges_by_score(
    tokens: list[str], types: np.ndarray, scores: np.ndarray
) -> list[tuple[str, str]]:
    """Pairs of ordinary tokens that make one, the best-scored first."""
    ordinary = {token: i for i, token in enumerate(tokens) if types[i] == _NORMAL}
    found = [
        (-scores[i], i, token[:at], token[at:])
        for token, i in ordinary.items()
        for at in range(1, len(token))
        if token[:at] in ordinary and token[at:] in ordinary
    ]
    return [(left, right) for _, _, left, right in sorted(found)]


# Tokenizer model -> token types it may hold, the bytes of a token, and what makes the pipeline and
# says whether a prompt begins with BOS where the file does not.
_KINDS: dict[str, tuple[tuple[int, ...], Callable[[str], bytes], Any]] = {
    "gpt2": ((_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED), byte_level_bytes, _byte_level),
    "llama": (
        (_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE),
        sentencepiece_bytes,
        _sentencepiece,
    ),
}


class _Keys:
    """Typed access to the `tokenizer.*` keys."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.metadata.get(f"tokenizer.{key}", default)
        if type(value) is not kind:
            found = "missing" if value is None else f"of type {type(value).__name__}"
            raise ModelError(f"tokenizer.{key} is {found}, but should be of type {kind.__name__}")
        return value

    def token_id(self, name: str, tokens: int, needed: bool = False) -> int | None:
        key = f"ggml.{name}_token_id"
        if not needed and f"tokenizer.{key}" not in self.metadata:
            return None
        token: int = self.get(key, int)
        if not 0 <= token < tokens:
            raise ModelError(f"tokenizer.{key} is {token}, outside the {tokens} tokens")
        return token
