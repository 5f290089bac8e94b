"""Text to token ids and back, from the vocabulary that a GGUF file carries.

Byte-level BPE as the `tokenizers` package implements it. Control tokens (`<|im_start|>` and the
like) are not part of the BPE vocabulary at all: no text can produce one. They come only from
`encode(..., specials=True)` and from the chat template's own source.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer as _Bpe
from tokenizers import models, pre_tokenizers

from megadecode.errors import ModelError, PromptError
from megadecode.models.chat import ChatTemplate

_NORMAL, _CONTROL = 1, 3


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


# Pre-tokenizer name in the file -> how text is split before BPE.
PRE_TOKENIZERS = {
    "gpt-2": _gpt2,
    # Every digit on its own, then the GPT-2 pattern.
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), _gpt2()]
    ),
}


class Tokenizer:
    """Ids are ints below `vocab_size`. Text holds any Unicode but lone surrogates.

    Bytes the vocabulary has no token for (in the default model some control characters) vanish in
    `encode`, as they do in the model's original tokenizer.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        merges: Sequence[tuple[str, str]],
        *,
        control: Iterable[int],
        pre_tokenizer: str,
        eos_id: int,
        bos_id: int | None = None,
        add_bos: bool = False,
        chat_template: str | None = None,
    ) -> None:
        if pre_tokenizer not in PRE_TOKENIZERS:
            raise ModelError(
                f"pre-tokenizer {pre_tokenizer!r} is not supported; "
                f"supported: {', '.join(PRE_TOKENIZERS)}"
            )
        self.vocab_size = len(tokens)
        self.eos_id, self.bos_id, self.add_bos = eos_id, bos_id, add_bos
        self._control = frozenset(control)
        self._bytes = [
            b"" if i in self._control else _from_byte_level(token) for i, token in enumerate(tokens)
        ]
        ids = {token: i for i, token in enumerate(tokens) if i not in self._control}
        if len(ids) + len(self._control) != len(tokens):
            raise ModelError("tokenizer.ggml.tokens holds the same token twice")
        try:
            self._bpe = _Bpe(models.BPE(vocab=ids, merges=list(merges)))
        except Exception as error:  # the package raises bare Exception
            raise ModelError(f"tokenizer.ggml.merges do not fit the vocabulary: {error}") from None
        self._bpe.pre_tokenizer = PRE_TOKENIZERS[pre_tokenizer]()

        self._control_ids = {tokens[i]: i for i in self._control if tokens[i]}
        longest_first = sorted(self._control_ids, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._template: ChatTemplate | None = None
        if chat_template is not None:
            named = {"eos_token": tokens[eos_id]}
            if bos_id is not None:
                named["bos_token"] = tokens[bos_id]
            self._template = ChatTemplate(chat_template, self._control_ids, named)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From the `tokenizer.*` keys of a GGUF file. Raises ModelError naming the key."""

        def get(key: str, kind: type, default: Any = None) -> Any:
            value = metadata.get(f"tokenizer.{key}", default)
            if type(value) is not kind:
                found = "missing" if value is None else f"of type {type(value).__name__}"
                raise ModelError(
                    f"tokenizer.{key} is {found}, but should be of type {kind.__name__}"
                )
            return value

        if (model := get("ggml.model", str)) != "gpt2":
            raise ModelError(f"tokenizer model {model!r} is not supported; supported: gpt2")
        if get("ggml.add_space_prefix", bool, False):
            raise ModelError("tokenizer.ggml.add_space_prefix is not supported")
        tokens = get("ggml.tokens", list)
        types = get("ggml.token_type", np.ndarray)
        if len(types) != len(tokens):
            raise ModelError(
                f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens"
            )
        unknown = set(types.tolist()) - {_NORMAL, _CONTROL}
        if unknown:
            first = int(np.flatnonzero(np.isin(types, list(unknown)))[0])
            raise ModelError(f"token {first} has type {types[first]}, which is not supported")
        merges = [tuple(merge.split(" ")) for merge in get("ggml.merges", list)]
        for index, merge in enumerate(merges):
            if len(merge) != 2:
                raise ModelError(f"tokenizer.ggml.merges[{index}] is not a pair of tokens")
        eos_id = get("ggml.eos_token_id", int)
        bos_id = (
            get("ggml.bos_token_id", int) if "tokenizer.ggml.bos_token_id" in metadata else None
        )
        for name, token in (("eos", eos_id), ("bos", bos_id)):
            if token is not None and not 0 <= token < len(tokens):
                raise ModelError(
                    f"tokenizer.ggml.{name}_token_id is {token}, outside the {len(tokens)} tokens"
                )
        add_bos = get("ggml.add_bos_token", bool, False)
        if add_bos and bos_id is None:
            raise ModelError("tokenizer.ggml.add_bos_token asks for a bos_token_id; there is none")
        return cls(
            tokens,
            merges,
            control=np.flatnonzero(types == _CONTROL).tolist(),
            pre_tokenizer=get("ggml.pre", str, "default"),
            eos_id=eos_id,
            bos_id=bos_id,
            add_bos=add_bos,
            chat_template=get("chat_template", str, "") or None,
        )

    def encode(self, text: str, *, specials: bool) -> list[int]:
        """Token ids of `text`, without any token in front of or behind it.

        `specials=False` for whatever comes from a user: the text of a control token is then
        ordinary text. `specials=True` turns it into the control token. Raises PromptError.
        """
        if not specials:
            return self._ordinary(text)
        ids: list[int] = []
        done = 0
        for match in self._control_pattern.finditer(text):
            ids += self._ordinary(text[done : match.start()])
            ids.append(self._control_ids[match.group()])
            done = match.end()
        return ids + self._ordinary(text[done:])

    def prompt(self, text: str) -> list[int]:
        """Ids of a user's raw prompt: the BOS token if the model wants one, then ordinary text."""
        bos = [self.bos_id] if self.add_bos and self.bos_id is not None else []
        return bos + self._ordinary(text)

    def chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a conversation in the model's own format, ready for the assistant's answer.

        `messages` are {"role": "system" | "user" | "assistant", "content": text}. Whatever the
        contents hold, every control token comes from the template. Raises PromptError.
        """
        if self._template is None:
            raise PromptError("this model has no chat template; give a plain prompt instead")
        ids: list[int] = []
        for part in self._template.render(messages, add_generation_prompt):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._ordinary(part)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; control tokens are silent, broken UTF-8 becomes U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; none for a control token. ValueError for a wrong id."""
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token id {token} lies outside the vocabulary of {self.vocab_size}")
        return self._bytes[token]

    def is_special(self, token: int) -> bool:
        """Whether it is a control token: one that no user text produces and that shows no text."""
        return token in self._control

    def _ordinary(self, text: str) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise PromptError(
                f"the text holds a lone surrogate, U+{ord(text[error.start]):04X}, at character "
                f"{error.start}: it is not valid Unicode"
            ) from None
        ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        return ids


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's stand-ins: printable characters for themselves, the other bytes from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


_ALPHABET = _byte_level_alphabet()


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[char] for char in token)
    except KeyError:
        raise ModelError(f"token {token!r} is not in the byte-level alphabet") from None
