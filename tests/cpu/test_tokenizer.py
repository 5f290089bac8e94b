"""Token ids of text and text of token ids, whole and streamed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_strategies import MISSING, any_text, hostile_text

from megadecode.errors import PromptError
from megadecode.models.stream import TextStream
from megadecode.models.tokenizer import Tokenizer
from tests.golden import prompt_ids, read_golden, read_prompts


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
