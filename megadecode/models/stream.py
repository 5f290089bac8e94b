"""Text as it is generated: whole characters only, and in the end exactly the full decode."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from megadecode.models.tokenizer import Tokenizer


class TextStream:
    """Turns token ids into text piece by piece.

    A character whose bytes are spread over tokens is held back until it is complete, so no piece
    splits one. All pieces together equal `tokenizer.decode(all ids)`: control tokens give no text,
    broken bytes give U+FFFD as they would there. Ids beyond the tokenizer's vocabulary, which a
    padded output matrix can yield, give no text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that became complete with these tokens; may be empty."""
        known = self._tokenizer.vocab_size
        return self._decoder.decode(
            b"".join(self._tokenizer.token_bytes(token) for token in ids if token < known)
        )

    def finish(self) -> str:
        """What an unfinished character leaves behind. The stream is then ready for another text."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
