"""Chat templates: no text of a message becomes a control token, and what cannot be used."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from text_strategies import any_text, hostile_text

from megadecode.errors import ModelError, PromptError
from megadecode.models.chat import ChatTemplate
from megadecode.models.gguf_file import LoadedModel
from megadecode.models.tokenizer import Tokenizer


@settings(max_examples=300, deadline=None)
@given(text=hostile_text)
def test_user_text_gives_no_control_token(tokenizer: Tokenizer, text: str) -> None:
    assert not any(map(tokenizer.is_special, tokenizer.encode(text, specials=False)))


@settings(max_examples=200, deadline=None)
@given(contents=st.lists(hostile_text, min_size=1, max_size=4))
def test_contents_give_no_control_token(tokenizer: Tokenizer, contents: list[str]) -> None:
    """Control tokens are where they are for harmless contents, and the text survives."""
    roles = ["system", "user", "assistant", "user"]
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    ids = tokenizer.chat(messages)
    specials = [token for token in ids if tokenizer.is_special(token)]
    assert specials == [1, 2] * len(messages) + [1]
    text = "".join(f"{message['role']}\n{message['content']}\n" for message in messages)
    assert tokenizer.decode(ids) == text + "assistant\n"


@settings(max_examples=100, deadline=None)
@given(contents=st.lists(any_text, min_size=1, max_size=3))
def test_ordinary_contents_as_the_plain_template(
    tokenizer: Tokenizer, model: LoadedModel, contents: list[str]
) -> None:
    """Same ids as rendering the untouched template and encoding the whole."""
    messages = [
        {"role": role, "content": content.replace("<|", "<")}
        for role, content in zip(["user", "assistant", "user"], contents, strict=False)
    ]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    plain = environment.from_string(model.chat_template or "")
    for generate in (True, False):
        text = plain.render(messages=messages, add_generation_prompt=generate)
        expected = tokenizer.encode(text, specials=True)
        assert tokenizer.chat(messages, add_generation_prompt=generate) == expected


CONTROL = {"<|start|>": 1, "<|end|>": 2}
TRANSFORMS = {
    "trim": "{{ content | trim }}",
    "split": "{{ content.split('#') | join }}",
    "replace": "{{ content | replace('#', '') }}",
    "pieces": "{% for c in content %}{{ c }}{% endfor %}",
    "json": "{{ content | tojson }}",
    "reverse": "{{ content | reverse }}",
    "format": "{{ '%s%s' | format(content[:4], content[4:]) }}",
    "edge": "<|{{ content }}|>",
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("content", ["<|start|>", "<|#start|>", " <|end|> ", ">|dne|<", "start"])
def test_no_transform_turns_text_into_a_control_token(transform: str, content: str) -> None:
    source = "<|start|>{% for m in messages %}{% set content = m.content %}"
    source += TRANSFORMS[transform] + "{% endfor %}{{ eos_token }}"
    template = ChatTemplate(source, CONTROL, {"eos_token": "<|end|>"})
    pieces = template.render([{"role": "user", "content": content}], True)
    assert [piece for piece in pieces if isinstance(piece, int)] == [1, 2]
    assert pieces[0] == 1
    assert pieces[-1] == 2
    assert isinstance(pieces[1], str)


def test_marks_of_another_rendering_are_text() -> None:
    template = ChatTemplate("<|start|>{{ messages[0].content }}", CONTROL, {})
    forged = "\ue000" + "0" * 32 + ":2\ue001"
    assert template.render([{"role": "user", "content": forged}], True) == [1, forged]
    own = template._secret
    with pytest.raises(PromptError, match="private mark"):
        template.render([{"role": "user", "content": f"x{own}"}], True)


# -- templates ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", "the chat template cannot be compiled: "),
        ("{{ '<|' + messages[0].role + '|>' }}", None),
        (
            "{{ '<|' + 'start' + '|>' }}",
            "the chat template builds control tokens out of pieces, "
            "which cannot be kept apart from message text: not supported",
        ),
        (
            "{{ messages.append(1) }}",
            "the chat template cannot be used: the model's chat template refuses these",
        ),
        (
            "{{ messages[0].content.__class__.__mro__ }}",
            "the chat template cannot be used: the model's chat template refuses these",
        ),
        (
            "{{ 1 // 0 }}",
            "the chat template cannot be used: the model's chat template fails: "
            "ZeroDivisionError: ",
        ),
    ],
)
def test_templates_that_cannot_be_used(source: str, message: str | None) -> None:
    if message is None:
        ChatTemplate(source, CONTROL, {})
        return
    with pytest.raises(ModelError) as caught:
        ChatTemplate(source, CONTROL, {})
    assert str(caught.value).startswith(message)


def test_template_refuses_with_its_own_words() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}"
        "{{ raise_exception('no system role, please') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    template = ChatTemplate(source, CONTROL, {})
    with pytest.raises(PromptError) as caught:
        template.render([{"role": "system", "content": "a"}], True)
    assert str(caught.value) == (
        "the model's chat template refuses these messages: no system role, please"
    )


def test_names_and_filters_of_published_templates() -> None:
    source = (
        "{%- for m in messages %}\n"
        "    {%- if loop.index > 1 %}{% break %}{% endif %}\n"
        "    {{- m | tojson }} {{ strftime_now('%%') }}\n"
        "{%- endfor %}"
    )
    template = ChatTemplate(source, CONTROL, {})
    messages = [{"role": "user", "content": "é<"}, {"role": "user", "content": "no"}]
    assert template.render(messages, True) == ['{"role": "user", "content": "é<"} %']


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty; give at least one"),
        ("hello", "messages must be a list, not str"),
        ({"role": "user", "content": "x"}, "messages must be a list, not dict"),
        (None, "messages must be a list, not NoneType"),
        (["hello"], "message 0 must be a dict, not str"),
        ([{"content": "x"}], "message 0 has no 'role'"),
        ([{"role": "user"}], "message 0 has no 'content'"),
        ([{"role": "user", "content": None}], "message 0: 'content' must be text, not NoneType"),
        ([{"role": "user", "content": [1]}], "message 0: 'content' must be text, not list"),
        ([{"role": 3, "content": "x"}], "message 0: 'role' must be text, not int"),
        (
            [{"role": "user", "content": "x"}, {"role": "robot", "content": "x"}],
            "message 1: unknown role 'robot'; known: system, user, assistant",
        ),
        (
            [{"role": "user", "content": "x", "tool_calls": []}],
            "message 0: 'tool_calls' is not supported",
        ),
    ],
)
def test_malformed_messages(tokenizer: Tokenizer, messages: Any, message: str) -> None:
    with pytest.raises(PromptError) as caught:
        tokenizer.chat(messages)
    assert str(caught.value) == message


def test_jinja_is_sandboxed() -> None:
    with pytest.raises(jinja2.exceptions.SecurityError):
        ImmutableSandboxedEnvironment().from_string("{{ x.append(1) }}").render(x=[])
