"""From what a user hands in to token ids, for one model."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np

from megadecode.config import ModelConfig
from megadecode.errors import EMPTY, ParameterError, PromptError
from megadecode.models.tokenizer import Tokenizer
from megadecode.sampling import SamplingParams

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]] | np.ndarray
"""One user turn (or raw text), token ids, or a conversation of {"role", "content"}."""


def encode(
    prompt: Prompt, config: ModelConfig, tokenizer: Tokenizer | None, *, chat: bool
) -> np.ndarray:
    """Token ids, `[n]` int32; see `Engine.encode`. Raises PromptError."""
    if isinstance(prompt, str):
        if not prompt:
            _refuse_empty()
        known = need_tokenizer(tokenizer, config)
        if chat:
            ids = known.chat([{"role": "user", "content": prompt}])
        else:
            ids = known.prompt(prompt)
        if not ids:
            raise PromptError("no token of the vocabulary stands for any byte of the prompt")
        return np.array(ids, np.int32)
    if isinstance(prompt, np.ndarray) and prompt.ndim:
        return _token_ids(prompt, config) if len(prompt) else _refuse_empty()
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
        raise PromptError(
            f"a prompt is text, chat messages or token ids, not {type(prompt).__name__}"
        )
    if len(prompt) == 0:
        _refuse_empty()
    if isinstance(prompt[0], Mapping):
        known = need_tokenizer(tokenizer, config)
        return np.array(known.chat(prompt), np.int32)  # type: ignore[arg-type]
    return _token_ids(prompt, config)


def need_tokenizer(tokenizer: Tokenizer | None, config: ModelConfig) -> Tokenizer:
    """The tokenizer; PromptError for a model without one."""
    if tokenizer is None:
        raise PromptError(f"model {config.name!r} has no tokenizer; give the prompt as token ids")
    return tokenizer


def _refuse_empty() -> NoReturn:
    raise PromptError(EMPTY)


def _token_ids(prompt: Sequence[Any] | np.ndarray, config: ModelConfig) -> np.ndarray:
    if not isinstance(prompt, np.ndarray):
        for at, token in enumerate(prompt):
            if isinstance(token, bool | np.bool_) or not hasattr(token, "__index__"):
                raise PromptError(f"token ids must be integers; position {at} holds {token!r:.80}")
        prompt = np.array([operator.index(token) for token in prompt], object)
    elif prompt.ndim != 1 or prompt.dtype.kind not in "iu":
        raise PromptError(
            f"token ids must be integers in one dimension; the array is {prompt.dtype} of "
            f"shape {prompt.shape}"
        )
    wrong = np.flatnonzero((prompt < 0) | (prompt >= config.vocab))
    if wrong.size:
        raise PromptError(
            f"token id {prompt[wrong[0]]} at position {wrong[0]} is outside the vocabulary of "
            f"{config.vocab} tokens"
        )
    return np.ascontiguousarray(prompt, np.int32)


def pair_up(
    prompts: Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[Prompt, SamplingParams | None]]:
    """Every prompt of a list with its parameters."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        raise PromptError(
            f"prompts is {prompts!r:.60}; give a list of prompts, [prompt] for a single one"
        )
    listed = list(prompts)
    if params is None or isinstance(params, SamplingParams):
        return [(prompt, params) for prompt in listed]
    if not isinstance(params, Sequence):
        raise ParameterError(
            f"params is {params!r:.60}; give a SamplingParams, or a list of one per prompt"
        )
    if len(params) != len(listed):
        raise ParameterError(f"{len(params)} params for {len(listed)} prompts; give one per prompt")
    return list(zip(listed, params))


@contextmanager
def numbered(number: int) -> Iterator[None]:
    """Errors say which prompt of a list they are about."""
    try:
        yield
    except (PromptError, ParameterError) as error:
        raise type(error)(f"prompt {number}: {error}") from None
