"""Tokens: the ids transformers gives, and control tokens that no message text can produce."""

from __future__ import annotations

import random
from typing import Any

import jinja2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tiny_gguf import TEMPLATE, vocabulary, write_gguf

from megadecode.errors import ModelError, PromptError
from megadecode.models.chat import ChatTemplate
from megadecode.models.gguf_file import LoadedModel, load
from megadecode.models.gguf_tokenizer import from_gguf
from megadecode.models.stream import TextStream
from megadecode.models.tokenizer import Tokenizer
from tests.golden import prompt_ids, read_golden, read_prompts

# Bytes for which the default model's vocabulary has no token: they vanish.
MISSING = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}

characters = st.characters(codec="utf-8").filter(lambda c: MISSING.isdisjoint(c.encode()))
any_text = st.text(characters, max_size=60)
# Text that tries hard: whole and broken control tokens among ordinary characters.
FRAGMENTS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|im_",
    "start|>",
    "<",
    "|>",
    "<|endoftext|>",
    "user",
    "\n",
]
hostile_text = st.lists(
    st.sampled_from(FRAGMENTS) | st.text(characters, max_size=3), max_size=12
).map("".join)


# -- ids ------------------------------------------------------------------------------------------


def test_ids_of_every_pinned_text(tokenizer: Tokenizer) -> None:
    """`experiments/greedy_golden.py` checked these against transformers when it wrote them."""
    golden = read_golden()
    texts = [item["text"] for item in golden["tokenizer"]]
    raw = [prompt["raw"] for prompt in read_prompts()["prompts"] if "raw" in prompt]
    assert texts == [*read_prompts()["tokenizer_texts"], *raw]
    for item in golden["tokenizer"]:
        assert tokenizer.encode(item["text"], specials=False) == item["ids"], item["text"]
    assert len(golden["tokenizer_differences"]) > 0


def test_ids_of_every_golden_prompt(tokenizer: Tokenizer) -> None:
    golden, asked = read_golden()["prompts"], read_prompts()["prompts"]
    assert [item["name"] for item in golden] == [prompt["name"] for prompt in asked]
    for item, prompt in zip(golden, asked, strict=True):
        assert prompt_ids(tokenizer, prompt) == item["ids"], prompt["name"]


def test_digits_are_split_one_by_one(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("  345 6", specials=False) == [256, 35, 36, 37, 216, 38]
    for number in ("7", "42", "31415926535", "1e10"):
        ids = tokenizer.encode(number, specials=False)
        assert [tokenizer.decode([token]) for token in ids] == list(number)


def test_special_ids_and_sizes(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert [token for token in range(49152) if tokenizer.is_special(token)] == list(range(17))
    assert tokenizer.encode("<|im_start|>a<|im_end|>", specials=True) == [1, 81, 2]
    assert tokenizer.prompt("a<|im_end|>") == tokenizer.encode("a<|im_end|>", specials=False)


@settings(max_examples=300, deadline=None)
@given(text=any_text | hostile_text)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, specials=False)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_bytes_without_a_token_vanish(tokenizer: Tokenizer) -> None:
    left_out = {byte for byte in range(128) if tokenizer.encode(chr(byte), specials=False) == []}
    assert left_out == {byte for byte in MISSING if byte < 128}
    assert tokenizer.decode(tokenizer.encode("a\x04b", specials=False)) == "ab"


@settings(max_examples=200, deadline=None)
@given(text=hostile_text)
def test_specials_are_cut_out_first(tokenizer: Tokenizer, text: str) -> None:
    """With specials, each control token's text is its id and the rest is encoded by itself."""
    ids = tokenizer.encode(text, specials=True)
    assert ids.count(1) == text.count("<|im_start|>")
    assert ids.count(2) == text.count("<|im_end|>")
    assert ids.count(0) == text.count("<|endoftext|>")
    spelled = {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>"}
    parts = (spelled.get(token, "").encode() or tokenizer.token_bytes(token) for token in ids)
    assert b"".join(parts).decode() == text


def test_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    message = "the text holds a lone surrogate, U\\+D83D, at character 3: it is not valid Unicode"
    with pytest.raises(PromptError, match=message):
        tokenizer.encode("abc\ud83d", specials=False)
    with pytest.raises(PromptError, match=message.replace("character 3", "character 13")):
        tokenizer.encode("<|im_end|>abc\ud83d", specials=True)
    with pytest.raises(PromptError, match="lone surrogate"):
        tokenizer.chat([{"role": "user", "content": "\ud83d"}])


@pytest.mark.parametrize("token", [-1, 49152])
def test_ids_outside_the_vocabulary(tokenizer: Tokenizer, token: int) -> None:
    message = f"token id {token} lies outside the vocabulary of 49152"
    with pytest.raises(ValueError, match=message):
        tokenizer.token_bytes(token)
    with pytest.raises(ValueError, match=message):
        tokenizer.decode([81, token])


def test_a_stream_has_no_text_for_ids_that_only_a_padded_output_matrix_has(
    tokenizer: Tokenizer,
) -> None:
    stream = TextStream(tokenizer)
    word = tokenizer.encode("word", specials=False)
    assert stream.push([49152, *word, 60000]) + stream.finish() == "word"


# -- injection ------------------------------------------------------------------------------------


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


# -- streaming ------------------------------------------------------------------------------------


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Token ids, about half of them pieces of characters, and how many to push at a time."""
    seed, length = draw(st.integers(0, 2**32)), draw(st.integers(0, 40))
    rng = random.Random(seed)
    ids = [rng.choice((rng.randrange(49152), rng.randrange(17, 260))) for _ in range(length)]
    return ids, draw(st.lists(st.integers(0, 5), max_size=40))


@settings(max_examples=300, deadline=None)
@given(case=cuts())
def test_streamed_text_is_the_whole_text(
    tokenizer: Tokenizer, case: tuple[list[int], list[int]]
) -> None:
    ids, sizes = case
    stream, pieces, left = TextStream(tokenizer), [], list(ids)
    for size in sizes:
        pieces.append(stream.push(left[:size]))
        left = left[size:]
    pieces += [stream.push([token]) for token in left]
    pieces.append(stream.finish())
    assert "".join(pieces) == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(text=any_text)
def test_no_piece_splits_a_character(tokenizer: Tokenizer, text: str) -> None:
    stream = TextStream(tokenizer)
    ids = tokenizer.encode(text, specials=False)
    pieces = [stream.push([token]) for token in ids]
    assert stream.finish() == ""
    assert "".join(pieces) == text
    assert all(piece in text for piece in pieces)


def test_broken_text_at_the_end(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("🎉", specials=False)[:-1]
    stream = TextStream(tokenizer)
    assert stream.push(half) == ""
    assert stream.finish() == tokenizer.decode(half) == "�"
    assert stream.push(tokenizer.encode("ok", specials=False)) == "ok"


def test_control_tokens_are_silent(tokenizer: Tokenizer) -> None:
    party = tokenizer.encode("🎉", specials=False)
    ids = [1, *party[:1], 2, *party[1:], 0]
    assert tokenizer.decode(ids) == "🎉"
    stream = TextStream(tokenizer)
    assert "".join(stream.push([token]) for token in ids) + stream.finish() == "🎉"


# -- vocabularies ---------------------------------------------------------------------------------


def tiny(**keys: Any) -> dict[str, Any]:
    tokens, types, merges = vocabulary()
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }
    metadata |= {f"tokenizer.{name.replace('__', '.')}": value for name, value in keys.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def test_other_vocabulary() -> None:
    tokenizer = from_gguf(tiny(ggml__add_bos_token=True))
    assert tokenizer.prompt("ah") == [1, 259]
    assert tokenizer.chat([{"role": "user", "content": "<|end|>"}])[0] == 1
    every_byte = range(3, 259)
    assert b"".join(map(tokenizer.token_bytes, every_byte)) == bytes(range(256))


def test_gpt2_keeps_digits_together() -> None:
    assert len(from_gguf(tiny()).encode("ah", specials=False)) == 1
    merged = tiny(ggml__merges=["1 2", *vocabulary()[2]])
    merged["tokenizer.ggml.tokens"] = [*merged["tokenizer.ggml.tokens"][:-1], "12"]
    merged["tokenizer.ggml.merges"] = [
        m for m in merged["tokenizer.ggml.merges"] if m != vocabulary()[2][-1]
    ]
    assert len(from_gguf(merged).encode("12", specials=False)) == 1
    merged["tokenizer.ggml.pre"] = "smollm"
    assert len(from_gguf(merged).encode("12", specials=False)) == 2


def test_no_template() -> None:
    tokenizer = from_gguf(tiny(chat_template=None))
    with pytest.raises(
        PromptError, match="this model has no chat template; send the text as it is"
    ) as caught:
        tokenizer.chat([{"role": "user", "content": "x"}])
    assert str(caught.value) == (
        "this model has no chat template; send the text as it is with chat=False "
        "(on the command line, run --raw), or give token ids"
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"ggml__model": "t5"},
            "tokenizer model 't5' is not supported; supported: gpt2, llama",
        ),
        ({"ggml__model": None}, "tokenizer.ggml.model is missing, but should be of type str"),
        (
            {"ggml__pre": "deepseek-llm"},
            "pre-tokenizer 'deepseek-llm' is not supported; supported: gpt-2, smollm, llama-bpe",
        ),
        ({"ggml__pre": None}, "pre-tokenizer 'default' is not supported; supported: gpt-2, smollm"),
        ({"ggml__add_space_prefix": True}, "tokenizer.ggml.add_space_prefix is not supported"),
        ({"ggml__tokens": ["a", "b"]}, "tokenizer.ggml.token_type has 300 entries for 2 tokens"),
        ({"ggml__tokens": 3}, "tokenizer.ggml.tokens is of type int, but should be of type list"),
        ({"ggml__tokens": ["a"] * 300}, "tokenizer.ggml.tokens holds the same token twice"),
        (
            {"ggml__tokens": [*vocabulary()[0][:3], "日本", *vocabulary()[0][4:]]},
            "token '日本' is not in the byte-level alphabet",
        ),
        (
            {"ggml__token_type": np.array([3, 3, 3] + [1] * 296 + [6])},
            "token 299 has type 6, which is not supported",
        ),
        ({"ggml__merges": ["a b", "ab"]}, "tokenizer.ggml.merges[1] is not a pair of tokens"),
        ({"ggml__merges": ["a z"]}, "tokenizer.ggml.merges do not fit the vocabulary: "),
        ({"ggml__eos_token_id": None}, "tokenizer.ggml.eos_token_id is missing, but should be of"),
        ({"ggml__eos_token_id": 300}, "tokenizer.ggml.eos_token_id is 300, outside the 300 tokens"),
        ({"ggml__bos_token_id": -1}, "tokenizer.ggml.bos_token_id is -1, outside the 300 tokens"),
        (
            {"ggml__add_bos_token": True, "ggml__bos_token_id": None},
            "tokenizer.ggml.add_bos_token asks for a bos_token_id; there is none",
        ),
    ],
)
def test_vocabularies_that_cannot_be_used(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        from_gguf(tiny(**keys))
    assert str(caught.value).startswith(message)


def test_faults_name_the_file(tmp_path: Any) -> None:
    path = write_gguf(tmp_path / "x.gguf", keys={"tokenizer.ggml.pre": "other"})
    with pytest.raises(ModelError) as caught:
        load(path).tokenizer()
    assert str(caught.value) == (
        f"{path}: pre-tokenizer 'other' is not supported; "
        "supported: gpt-2, smollm, llama-bpe, llama3, llama-v3, qwen2"
    )


def test_jinja_is_sandboxed() -> None:
    with pytest.raises(jinja2.exceptions.SecurityError):
        ImmutableSandboxedEnvironment().from_string("{{ x.append(1) }}").render(x=[])
