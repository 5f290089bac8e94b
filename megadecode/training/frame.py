"""A chat template taken apart, so that conversations are put together from token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from megadecode.errors import ModelError
from megadecode.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Frame:
    """opening: before the first user turn. reply: from a user turn's end to the answer's start.
    between: from an answer's end, behind its stop token, to the next user turn's start."""

    opening: list[int]
    reply: list[int]
    between: list[int]
    stop_id: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Frame:
        """Raises ModelError for a template whose conversations are no such chain."""

        def chat(*turns: str) -> list[int]:
            roles = ("user", "assistant", "user")
            return tokenizer.chat([{"role": r, "content": t} for r, t in zip(roles, turns)])

        first, second = chat("a"), chat("0")
        opening = _common(first, second)
        reply = _common(first[::-1], second[::-1])[::-1]
        a, b = tokenizer.encode("a", specials=False), tokenizer.encode("b", specials=False)
        three, start = chat("a", "b", "a"), opening + a + reply + b
        between = three[len(start) + 1 : len(three) - len(a) - len(reply)]
        frame = cls(opening, reply, between, three[len(start)])
        if frame.conversation([(a, [*b, frame.stop_id])], a) != three:
            raise ModelError(
                "this chat template does not repeat the same frame around every turn: "
                "conversations for training cannot be put together from it"
            )
        return frame

    def conversation(
        self, earlier: Sequence[tuple[list[int], list[int]]], turn: Sequence[int]
    ) -> list[int]:
        """The prompt for an answer to `turn` behind earlier (user turn, answer) pairs; answers end
        in the stop token. Turns are stripped text, encoded: their ids do not depend on the frame.
        """
        ids = list(self.opening)
        for asked, answered in earlier:
            ids += [*asked, *self.reply, *answered, *self.between]
        return [*ids, *turn, *self.reply]


def _common(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """What both begin with."""
    return [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other))]
