"""The greedy goldens: what is asked (`prompts.json`) and what transformers answered in fp32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megadecode.models.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"
GOLDEN = DATA / "greedy_golden.json"


def read_prompts() -> dict[str, Any]:
    """`prompts`: 24 dicts with a name and one kind of input; `tokenizer_texts`: strings."""
    result: dict[str, Any] = json.loads((DATA / "prompts.json").read_text(encoding="utf-8"))
    return result


def read_golden() -> dict[str, Any]:
    """Written by `python -m experiments.greedy_golden`; see there for the fields."""
    result: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return result


def prompt_messages(prompt: dict[str, Any]) -> list[dict[str, str]] | None:
    """The conversation a prompt stands for; None for raw text and token ids."""
    if "messages" in prompt:
        messages: list[dict[str, str]] = prompt["messages"]
        return messages
    if "user" in prompt:
        return [{"role": "user", "content": prompt["user"]}]
    if "chat_lines" in prompt:
        rule = prompt["chat_lines"]
        lines = (rule["line"].format(n=n, sq=n * n) for n in range(1, rule["count"] + 1))
        return [{"role": "user", "content": rule["head"] + "".join(lines) + rule["tail"]}]
    return None


def prompt_ids(tokenizer: Tokenizer, prompt: dict[str, Any]) -> list[int]:
    """Token ids of one entry of `prompts`."""
    if "ids" in prompt:
        ids: list[int] = prompt["ids"]
        return ids
    messages = prompt_messages(prompt)
    if messages is None:
        return tokenizer.prompt(prompt["raw"])
    return tokenizer.chat(messages)
