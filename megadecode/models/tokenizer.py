"""Text to token ids and back: a `tokenizers` pipeline that no text can talk out of its role.

Control tokens (`<|im_start|>` and the like) are known to the pipeline only under a *mark* that
holds a random number, so no text of a user can produce one. They come only from
`encode(..., specials=True)` and from the chat template's own source.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence

from tokenizers import Tokenizer as Pipeline

from megadecode.errors import ModelError, PromptError
from megadecode.models.chat import ChatTemplate


class Marks:
    """What stands for control tokens inside a pipeline: private-use characters and a secret."""

    def __init__(self) -> None:
        self.secret = secrets.token_hex(16)

    def __getitem__(self, token: int) -> str:
        return f"\ue000{self.secret}:{token}\ue001"


class Tokenizer:
    """Ids are ints below `vocab_size`. Text holds any Unicode but lone surrogates.

    Bytes the vocabulary has no token for (in the default model some control characters) vanish in
    `encode`, as they do in the model's original tokenizer.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        marks: Marks,
        token_bytes: Sequence[bytes],
        control: Mapping[str, int],
        *,
        silent: Iterable[int] = (),
        prefix: Sequence[int] = (),
        named: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        """
        Args:
            pipeline: from text to ids; knows control token `i` as `marks[i]`.
            token_bytes: what each id stands for in text.
            control: text of every control token that text marked as special may hold -> its id.
            silent: further ids that show no text.
            prefix: ids in front of a raw prompt.
            named: the chat template's variables, such as `eos_token`.

        Raises ModelError for a chat template that cannot be used.
        """
        self._pipeline, self._marks = pipeline, marks
        self._bytes = list(token_bytes)
        self.vocab_size = len(self._bytes)
        self._control = dict(control)
        self._silent = frozenset(silent) | frozenset(control.values())
        for token in self._silent:
            self._bytes[token] = b""
        self._prefix = list(prefix)
        longest_first = sorted(self._control, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._template: ChatTemplate | None = None
        if chat_template is not None:
            self._template = ChatTemplate(chat_template, self._control, named or {})

    def encode(self, text: str, *, specials: bool) -> list[int]:
        """Token ids of `text`, without any token in front of or behind it.

        `specials=False` for whatever comes from a user: the text of a control token is then
        ordinary text. `specials=True` turns it into the control token. Raises PromptError.
        """
        self._check(text)
        if specials:
            text = self._control_pattern.sub(
                lambda match: self._marks[self._control[match.group()]], text
            )
        return self._ids(text)

    def prompt(self, text: str) -> list[int]:
        """Ids of a user's raw prompt: the BOS token if the model wants one, then ordinary text."""
        return self._prefix + self.encode(text, specials=False)

    def chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a conversation in the model's own format, ready for the assistant's answer.

        `messages` are {"role": "system" | "user" | "assistant", "content": text}. Whatever the
        contents hold, every control token comes from the template. Raises PromptError.
        """
        if self._template is None:
            raise PromptError(
                "this model has no chat template; send the text as it is with chat=False "
                "(on the command line, run --raw), or give token ids"
            )
        pieces = self._template.render(messages, add_generation_prompt)
        for piece in pieces:
            if isinstance(piece, str):
                self._check(piece)
        return self._ids(
            "".join(self._marks[piece] if isinstance(piece, int) else piece for piece in pieces)
        )

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; control tokens are silent, broken UTF-8 becomes U+FFFD.

        The space that a SentencePiece vocabulary puts in front of a text's first word is kept: the
        text of some ids is what they add to the text before them.
        """
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; none for a control token. ValueError for a wrong id."""
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token id {token} lies outside the vocabulary of {self.vocab_size}")
        return self._bytes[token]

    def is_special(self, token: int) -> bool:
        """Whether it is a control token: one that no user text produces and that shows no text."""
        return token in self._silent

    def _check(self, text: str) -> None:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise PromptError(
                f"the text holds a lone surrogate, U+{ord(text[error.start]):04X}, at character "
                f"{error.start}: it is not valid Unicode"
            ) from None
        if self._marks.secret in text:  # 2**-128 by chance
            raise PromptError("the text holds this tokenizer's private mark")

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._pipeline.encode(text, add_special_tokens=False).ids
        return ids


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's stand-ins: printable characters for themselves, the other bytes from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


_ALPHABET = _byte_level_alphabet()
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a token of a byte-level vocabulary. Raises ModelError."""
    try:
        return bytes(_ALPHABET[char] for char in token)
    except KeyError:
        raise ModelError(f"token {token!r} is not in the byte-level alphabet") from None


def sentencepiece_bytes(token: str) -> bytes:
    """The bytes of a token of a SentencePiece vocabulary: `<0x0A>` is a byte, U+2581 a space."""
    if match := _BYTE.fullmatch(token):
        return bytes([int(match.group(1), 16)])
    return token.replace("\u2581", " ").encode()
