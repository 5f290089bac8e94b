"""Vocabularies of GGUF files: other ones than the default model's, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny_gguf import TEMPLATE, vocabulary, write_gguf

from megadecode.errors import ModelError, PromptError
from megadecode.models.gguf_file import load
from megadecode.models.gguf_tokenizer import from_gguf


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
