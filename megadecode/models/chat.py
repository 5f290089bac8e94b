"""A model's chat template, rendered so that message text can never become a control token.

The trick: in the template's *source* every control token is replaced by a mark that carries a
random number, and only marks become control tokens after rendering. Whatever a template does to the
contents (trim, split, join), text that came from a message stays text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megadecode.errors import ModelError, PromptError

ROLES = ("system", "user", "assistant")
_PROBE = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})


class ChatTemplate:
    """A compiled Jinja template with the names and filters that models expect to find.

    `control` maps the text of every control token to its id; `named` gives the template's variables
    such as `eos_token`. Raises ModelError if the template is broken, or if it puts control tokens
    together from pieces, which marks cannot follow.
    """

    def __init__(self, source: str, control: Mapping[str, int], named: Mapping[str, str]) -> None:
        self._secret = secrets.token_hex(16)
        # Private-use characters: they mean nothing to Jinja, JSON, trim or case filters.
        opening, closing = "\ue000", "\ue001"
        marks = {
            text: f"{opening}{self._secret}:{token}{closing}" for text, token in control.items()
        }
        self._mark = re.compile(f"{opening}{self._secret}:([0-9]+){closing}")
        longest_first = sorted(control, key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

        def mark(text: str) -> str:
            return pattern.sub(lambda match: marks[match.group()], text)

        environment = _environment()
        self._named = {name: mark(text) for name, text in named.items()}
        try:
            self._template = environment.from_string(mark(source))
            plain = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template cannot be compiled: {error}") from None
        try:
            marked = self._render(self._template, self._named, _PROBE, True)
            expected = self._render(plain, named, _PROBE, True)
        except PromptError as error:
            raise ModelError(f"the chat template cannot be used: {error}") from None
        if marked != mark(expected):
            raise ModelError(
                "the chat template builds control tokens out of pieces, "
                "which cannot be kept apart from message text: not supported"
            )

    def render(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool
    ) -> list[str | int]:
        """The conversation as pieces: str is ordinary text, int a control token.

        Raises PromptError for malformed messages and for what the template itself refuses.
        """
        check_messages(messages)
        if any(self._secret in message["content"] for message in messages):
            raise PromptError("a message holds this template's private mark")  # 2**-128 by chance
        text = self._render(self._template, self._named, messages, add_generation_prompt)
        # `split` with one group alternates text and token id.
        pieces = self._mark.split(text)
        return [int(piece) if odd else piece for odd, piece in _alternate(pieces) if piece]

    def _render(
        self,
        template: jinja2.Template,
        named: Mapping[str, str],
        messages: Sequence[Mapping[str, str]],
        add_generation_prompt: bool,
    ) -> str:
        try:
            return template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **named,
            )
        except jinja2.TemplateError as error:
            raise PromptError(
                f"the model's chat template refuses these messages: {error}"
            ) from None
        except Exception as error:  # whatever the template's own expressions raise
            raise PromptError(
                f"the model's chat template fails: {type(error).__name__}: {error}"
            ) from None


def check_messages(messages: Sequence[Mapping[str, str]]) -> None:
    """Raises PromptError unless `messages` is a non-empty list of {"role", "content"} texts."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise PromptError(f"messages must be a list, not {type(messages).__name__}")
    if not messages:
        raise PromptError("messages is empty; give at least one")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise PromptError(f"message {index} must be a dict, not {type(message).__name__}")
        for key in ("role", "content"):
            if key not in message:
                raise PromptError(f"message {index} has no {key!r}")
            if not isinstance(message[key], str):
                raise PromptError(
                    f"message {index}: {key!r} must be text, not {type(message[key]).__name__}"
                )
        for key in message:
            if key not in ("role", "content"):
                raise PromptError(f"message {index}: {key!r} is not supported")
        if message["role"] not in ROLES:
            raise PromptError(
                f"message {index}: unknown role {message['role']!r}; known: {', '.join(ROLES)}"
            )


def _alternate(pieces: list[str]) -> list[tuple[bool, str]]:
    return [(index % 2 == 1, piece) for index, piece in enumerate(pieces)]


def _environment() -> ImmutableSandboxedEnvironment:
    """What published chat templates are written for: transformers' settings, filters and names."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
