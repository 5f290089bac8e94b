"""A small tokenizer of every kind of family, trained here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Pipeline

CORPUS = [
    "The quick brown fox jumps over the lazy dog, didn't it? They'll say: \"we've seen 1234567.\"",
    "def f(x):\n    return x ** 2  # squared\n\n\nprint(f(12), f(345))\r\n\tif x != None:\n",
    "Über die Brücke gehen viele Leute. Ça va très bien; naïve façade — “quotes”…",
    "日本語のテキスト、そして한국어와中文。Привет, мир! Ελληνικά 🎉👍🏽",
    "hello world hello worlds HELLO World world's 1 22 333 4444 55555",
] * 3
CONTROL = ["<|bos|>", "<|start|>", "<|end|>"]
LONG = "supercalifragilistic"
WORDS = ["<think>", "</think>"]  # added tokens that are text
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n<think>{% endif %}"
)
# As the published files of these models spell them.
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def byte_level(pattern: str, normalizer: Any = None, bos: bool = False, whole: bool = False) -> Any:
    """Trained on text split at spaces only: the vocabulary has merges that no pattern here allows,
    and one word that no merges lead to."""
    made = Pipeline(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+\S+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    data = json.loads(made.to_str())
    data["model"]["vocab"]["Ġ" + LONG] = len(data["model"]["vocab"])
    data["model"]["ignore_merges"] = whole
    made = Pipeline.from_str(json.dumps(data))
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    return finish(made, bos)


def sentencepiece(first: bool) -> Any:
    """Llama 2's kind: spaces become U+2581, unknown characters their bytes.

    `first`: only a text's beginning gets a space in front, not what follows a control token.
    """
    made = Pipeline(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, show_progress=False, max_token_length=12
    )
    made.train_from_iterator(CORPUS, trainer)
    data = json.loads(made.to_str())
    data["added_tokens"] = data["added_tokens"][:1]  # bytes are ordinary tokens
    made = Pipeline.from_str(json.dumps(data))
    if first:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    else:
        made.pre_tokenizer = None
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return finish(made, bos=True)


def finish(made: Any, bos: bool) -> Any:
    made.add_special_tokens([AddedToken(text, normalized=False) for text in CONTROL])
    made.add_tokens([AddedToken(text, normalized=False) for text in WORDS])
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", made.token_to_id("<|bos|>"))]
        )
    return made


KINDS: dict[str, Callable[[], Any]] = {
    "qwen": lambda: byte_level(QWEN, normalizers.NFC()),
    "llama3": lambda: byte_level(LLAMA3, bos=True, whole=True),
    "llama2": lambda: sentencepiece(first=False),
    "mistral": lambda: sentencepiece(first=True),
}


def write_tokenizer(folder: Path, kind: str) -> Path:
    """A folder with tokenizer.json and its settings; the folder."""
    folder.mkdir()
    made = KINDS[kind]()
    made.enable_truncation(3)  # a file may hold both; neither is for prompts
    made.enable_padding(length=40)
    made.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "bos_token": {"content": "<|bos|>"}}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"chat_template": TEMPLATE})
    )
    return folder
