"""How a request wants its tokens chosen, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from host.wire import MAX_STOP_IDS
from megadecode.errors import ParameterError


def _integer(name: str, value: object) -> int:
    """`value` as an int; anything with an exact integer index is one, a bool is not."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ParameterError(f"{name} is {value!r}; it must be an integer")
    return int(value.__index__())


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What a request asks for besides its prompt.

    Args:
        max_new_tokens: tokens to generate at most; 0 gives an empty result. A request that reaches
            the engine's context length first ends there, with finish reason `length`.
        temperature: 0.0, greedy: the highest logit, on ties the lowest token id.
        stop_token_ids: ids at which to stop besides the model's own, at most 32 in all. The stop
            token is part of the result's ids.
        ignore_eos: go on past the model's own stop ids.

    Raises:
        ParameterError: a value has the wrong type or is out of range.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        new = _integer("max_new_tokens", self.max_new_tokens)
        if not 0 <= new < 2**31:
            raise ParameterError(f"max_new_tokens is {new}; it must be between 0 and 2**31 - 1")
        temperature = self.temperature
        if isinstance(temperature, bool) or not isinstance(temperature, int | float):
            raise ParameterError(f"temperature is {temperature!r}; it must be a number")
        if math.isnan(temperature) or temperature != 0:
            raise ParameterError(
                f"temperature is {temperature!r}; this release decodes greedily: use 0.0"
            )
        if isinstance(self.stop_token_ids, str | bytes) or not hasattr(
            self.stop_token_ids, "__iter__"
        ):
            raise ParameterError(
                f"stop_token_ids is {self.stop_token_ids!r}; it must be a sequence of token ids"
            )
        stops = tuple(_integer("a stop token id", i) for i in self.stop_token_ids)
        if not isinstance(self.ignore_eos, bool):
            raise ParameterError(f"ignore_eos is {self.ignore_eos!r}; it must be True or False")
        object.__setattr__(self, "max_new_tokens", new)
        object.__setattr__(self, "temperature", float(temperature))
        object.__setattr__(self, "stop_token_ids", stops)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SamplingParams:
        """From keyword arguments; ParameterError names those this release does not know."""
        known = [f.name for f in fields(cls)]
        unknown = [name for name in values if name not in known]
        if unknown:
            raise ParameterError(
                f"unsupported sampling parameter {', '.join(map(repr, unknown))}; "
                f"this release knows {', '.join(known)}"
            )
        return cls(**values)

    def stop_ids(self, model_stop_ids: tuple[int, ...], vocab: int) -> list[int]:
        """Every id that ends the request, for a model of `vocab` tokens."""
        for token in self.stop_token_ids:
            if not 0 <= token < vocab:
                raise ParameterError(
                    f"stop token id {token} is outside the vocabulary of {vocab} tokens"
                )
        own = () if self.ignore_eos else model_stop_ids
        stops = list(dict.fromkeys((*own, *self.stop_token_ids)))
        if len(stops) > MAX_STOP_IDS:
            raise ParameterError(
                f"{len(stops)} stop token ids, the model's own included; at most {MAX_STOP_IDS} fit"
            )
        return stops
