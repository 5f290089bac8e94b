"""What `megadecode chat` remembers between turns, and its /commands."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from megadecode.commands._common import summary
from megadecode.errors import ParameterError
from megadecode.request import Generation
from megadecode.sampling import SamplingParams

HELP = """\
/reset           forget the conversation; the system message stays
/system TEXT     set the system message and begin anew; without TEXT, show it
/set NAME VALUE  change a sampling parameter; without VALUE, show it; without NAME, all
/save PATH       write the conversation as JSON
/stats           figures of the last answer and of all
/help            this list
/exit            leave
//...            a message that begins with a slash"""


class Left(Exception):
    """The user has said /exit."""


class Conversation:
    """The messages so far, the parameters of the next turn, and figures.

    A turn is `ask(text)`, which gives the messages to send, then `note(result)`, or `take_back()`
    when it could not be answered.
    """

    def __init__(self, params: SamplingParams, system: str = "") -> None:
        self.params = params
        self.system = system
        self._turns: list[dict[str, str]] = []
        self._last: Generation | None = None
        self._tokens = self._answers = 0

    @property
    def messages(self) -> list[dict[str, str]]:
        """{"role", "content"} of everything said, the system message first."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return first + self._turns

    def ask(self, text: str) -> list[dict[str, str]]:
        """Add a user's turn."""
        content = text[1:] if text.startswith("//") else text
        self._turns.append({"role": "user", "content": content})
        return self.messages

    def note(self, result: Generation) -> None:
        """Add the answer, whole or cut short."""
        self._turns.append({"role": "assistant", "content": result.text})
        self._last = result
        self._tokens += result.stats.tokens
        self._answers += 1

    def take_back(self) -> None:
        """Forget a user's turn that got no answer, if there is one."""
        if self._turns and self._turns[-1]["role"] == "user":
            self._turns.pop()

    def command(self, line: str) -> str | None:
        """What there is to say to a /command; None for a turn. Raises Left, ParameterError,
        OSError."""
        if not line.startswith("/") or line.startswith("//"):
            return None
        name, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        if name in ("exit", "quit"):
            raise Left
        known = {
            "reset": self._reset, "system": self._system, "set": self._set, "save": self._save,
            "stats": self._stats, "help": lambda _: HELP,
        }  # fmt: skip
        if name not in known:
            raise ParameterError(f"unknown command /{name}; /help lists them")
        return known[name](rest)

    def _reset(self, rest: str) -> str:
        self._turns.clear()
        return "the conversation is forgotten"

    def _system(self, rest: str) -> str:
        if not rest:
            return self.system or "there is no system message"
        self.system = rest
        self._turns.clear()
        return "the system message is set; the conversation begins anew"

    def _set(self, rest: str) -> str:
        name, _, value = rest.partition(" ")
        names = [field.name for field in fields(self.params)]
        if value:
            changes: dict[str, Any] = {name: _value(value.strip())}
            self.params = replace(self.params, **changes)
        elif name and name not in names:
            raise ParameterError(f"unknown parameter {name!r}; there are {', '.join(names)}")
        shown = [name] if name else names
        return "\n".join(f"{each} = {getattr(self.params, each)!r}" for each in shown)

    def _save(self, rest: str) -> str:
        if not rest:
            raise ParameterError("say where to: /save PATH")
        path = Path(rest).expanduser()
        text = json.dumps(self.messages, ensure_ascii=False, indent=1)
        path.write_text(text + "\n", encoding="utf-8")
        return f"{len(self.messages)} messages written to {path}"

    def _stats(self, rest: str) -> str:
        if self._last is None:
            return "no answer yet"
        accepted = ", ".join(
            f"{count} of {tokens}"
            for tokens, count in enumerate(self._last.stats.accepted)
            if count
        )
        return (
            f"{summary(self._last)}\n{self._last.stats.prompt_tokens} prompt tokens; "
            f"steps by tokens committed: {accepted or 'none'}\n"
            f"{self._answers} answers, {self._tokens} tokens in all"
        )


def _value(text: str) -> Any:
    """A value as JSON has it, or else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
