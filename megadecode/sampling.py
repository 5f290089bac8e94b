"""How a request wants its tokens chosen, and when it ends."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from host.wire import MAX_ALTERNATIVES, MAX_BIAS, MAX_STOP_IDS, PARAMS
from megadecode.aliases import unsupported
from megadecode.errors import ParameterError
from megadecode.limits import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS


def _integer(name: str, value: object, low: int, high: int, hint: str = "") -> int:
    """`value` as an int; anything with an exact integer index is one, a bool is not."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ParameterError(f"{name} is {value!r}; it must be an integer")
    number = int(value.__index__())
    if not low <= number <= high:
        raise ParameterError(f"{name} is {number}; it must be between {low} and {high}{hint}")
    return number


def _number(name: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating):
        raise ParameterError(f"{name} is {value!r}; it must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not low <= number <= high:
        raise ParameterError(f"{name} is {value!r}; it must be between {low:g} and {high:g}")
    return number


def _sequence(name: str, value: object, of: str) -> tuple[Any, ...]:
    if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
        raise ParameterError(f"{name} is {value!r}; it must be a sequence of {of}")
    return tuple(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What a request asks for besides its prompt. Fields are given by name and checked at once.

    Tokens are ordered by logit, on ties the lower id first, and the distribution is shaped in this
    order: `logit_bias`, `temperature`, `top_k`, `top_p`, `min_p`. The same seed gives the same
    tokens whatever else the engine does, with or without speculation.

    Args:
        max_new_tokens: tokens to generate at most; 0 gives an empty result. A request that reaches
            the engine's context length first ends there, with finish reason `length`.
        temperature: 0 to 100; 0 is greedy: the highest logit.
        top_k: only the k likeliest tokens; 0: all.
        top_p: only the likeliest tokens, as long as those before them have less than this mass; 1:
            all.
        min_p: only tokens at least this fraction as likely as the likeliest; 0: all.
        seed: 64 bits; None draws one.
        min_new_tokens: stop ids and stop strings do not end the request before.
        stop: up to 16 strings; text ends before the first of them.
        stop_token_ids: ids at which to stop besides the model's own, at most 32 in all. The stop
            token is part of the result's ids.
        ignore_eos: go on past the model's own stop ids.
        logprobs: 0 to 20 alternatives to report with every token.
        logit_bias: token id -> what to add to its logit; at most 300.

    Raises:
        ParameterError: a value has the wrong type or is out of range.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    min_new_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __new__(cls, *unnamed: Any, **values: Any) -> SamplingParams:
        """Names are looked at before `__init__` is: its TypeError would not say what to use."""
        if unnamed:
            raise ParameterError(
                "sampling parameters are given by name, as in SamplingParams(temperature=0.7)"
            )
        known = [f.name for f in fields(cls)]
        unknown = [name for name in values if name not in known]
        if unknown:
            raise ParameterError(unsupported(unknown, known))
        return object.__new__(cls)

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        put("max_new_tokens", _integer("max_new_tokens", self.max_new_tokens, 0, 2**31 - 1))
        put("temperature", _number("temperature", self.temperature, 0, 100))
        put("top_k", _integer("top_k", self.top_k, 0, 2**31 - 1, "; 0 keeps all tokens"))
        put("top_p", _number("top_p", self.top_p, 0, 1))
        if self.top_p == 0:
            raise ParameterError("top_p is 0; it must be above 0 (top_k=1 is greedy)")
        put("min_p", _number("min_p", self.min_p, 0, 1))
        if self.seed is not None:
            put("seed", _integer("seed", self.seed, -(2**63), 2**64 - 1))
        put("min_new_tokens", _integer("min_new_tokens", self.min_new_tokens, 0, 2**31 - 1))
        if self.min_new_tokens > self.max_new_tokens:
            raise ParameterError(
                f"min_new_tokens is {self.min_new_tokens}, more than max_new_tokens, "
                f"{self.max_new_tokens}"
            )
        put("logprobs", _integer("logprobs", self.logprobs, 0, MAX_ALTERNATIVES))
        stops = _sequence("stop_token_ids", self.stop_token_ids, "token ids")
        put(
            "stop_token_ids",
            tuple(_integer("a stop token id", i, 0, 2**31 - 1) for i in stops),
        )
        if not isinstance(self.ignore_eos, bool):
            raise ParameterError(f"ignore_eos is {self.ignore_eos!r}; it must be True or False")
        put("stop", self._stop_strings())
        put("logit_bias", self._bias())

    def _stop_strings(self) -> tuple[str, ...]:
        stops = (self.stop,) if isinstance(self.stop, str) else _sequence("stop", self.stop, "text")
        for stop in stops:
            if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
                raise ParameterError(
                    f"a stop string is {stop!r:.60}; it must be text of 1 to "
                    f"{MAX_STOP_CHARACTERS} characters"
                )
        if len(stops) > MAX_STOP_STRINGS:
            raise ParameterError(f"{len(stops)} stop strings; at most {MAX_STOP_STRINGS} fit")
        return stops

    def _bias(self) -> dict[int, float]:
        if not isinstance(self.logit_bias, Mapping):
            raise ParameterError(
                f"logit_bias is {self.logit_bias!r}; it must map token ids to numbers"
            )
        bias = {
            _integer("a logit_bias token id", token, 0, 2**31 - 1): _number(
                f"logit_bias[{token!r}]", value, -1e4, 1e4
            )
            for token, value in self.logit_bias.items()
        }
        if len(bias) > MAX_BIAS:
            raise ParameterError(f"logit_bias has {len(bias)} entries; at most {MAX_BIAS} fit")
        return bias

    def stop_ids(self, model_stop_ids: tuple[int, ...], vocab: int) -> list[int]:
        """Every id that ends the request, for a model of `vocab` tokens."""
        for what, tokens in (("stop", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            for token in tokens:
                if token >= vocab:
                    raise ParameterError(
                        f"{what} token id {token} is outside the vocabulary of {vocab} tokens"
                    )
        own = () if self.ignore_eos else model_stop_ids
        stops = list(dict.fromkeys((*own, *self.stop_token_ids)))
        if len(stops) > MAX_STOP_IDS:
            raise ParameterError(
                f"{len(stops)} stop token ids, the model's own included; at most {MAX_STOP_IDS} fit"
            )
        return stops

    def record(self, stops: Sequence[int]) -> np.void:
        """What goes on the wire, one record of `wire.PARAMS`; draws a seed if none was given."""
        record = np.zeros(1, PARAMS)
        seed = secrets.randbits(64) if self.seed is None else self.seed
        record["seed"] = np.uint64(seed % 2**64).view(np.int64)
        for name in ("temperature", "top_k", "top_p", "min_p", "min_new_tokens", "logprobs"):
            record[name] = getattr(self, name)
        record["bias_count"] = len(self.logit_bias)
        record["stop_count"] = len(stops)
        record["stop_ids"][0, : len(stops)] = stops
        found: np.void = record[0]
        return found

    def bias_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Token ids (int32) and biases (float32), in order of id."""
        tokens = sorted(self.logit_bias)
        return (
            np.array(tokens, np.int32),
            np.array([self.logit_bias[token] for token in tokens], np.float32),
        )
