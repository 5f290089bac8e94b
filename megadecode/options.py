"""Checks of arguments, so that nothing wrong gets as far as the device."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Mapping
from numbers import Real
from typing import Any

from megadecode.errors import ParameterError

NEVER_S = -1.0
_LONGEST_S = 1e9


def size(name: str, value: object, low: int, high: int) -> int:
    """`value` as an int in low..high; ParameterError otherwise."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ParameterError(f"{name} is {value!r}; it must be an integer")
    if not low <= number <= high:
        raise ParameterError(f"{name} is {number}; it must be between {low} and {high}")
    return number


def _real(value: object) -> float | None:
    """A number as a float (infinite when it is too large for one); None for anything else."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return math.inf
    return None if math.isnan(number) else number


def seconds(name: str, value: object) -> float:
    """A number of seconds; what is negative, infinite or beyond thirty years means never."""
    number = _real(value)
    if number is None:
        raise ParameterError(f"{name} is {value!r}; it must be a number of seconds")
    return number if 0 <= number <= _LONGEST_S else NEVER_S


def wait_s(name: str, value: object) -> float | None:
    """How long to wait: a number of seconds, or None (or beyond thirty years) for ever."""
    number = None if value is None else _real(value)
    if value is not None and number is None:
        raise ParameterError(f"{name} is {value!r}; it must be a number of seconds, or None")
    return None if number is None or number > _LONGEST_S else number


def positive_s(name: str, value: object) -> float:
    """A number of seconds above 0; at most thirty years."""
    number = _real(value)
    if number is None or number <= 0:
        raise ParameterError(f"{name} is {value!r}; it must be a number of seconds above 0")
    return min(number, _LONGEST_S)


def flag(name: str, value: object) -> bool:
    """`value` if it is a bool; ParameterError otherwise."""
    if not isinstance(value, bool):
        raise ParameterError(f"{name} is {value!r}; it must be True or False")
    return value


def choice(name: str, value: object, *known: str) -> str:
    """`value` if it is one of `known`; ParameterError otherwise."""
    if not isinstance(value, str) or value not in known:
        *most, last = known
        raise ParameterError(f"{name} is {value!r}; choose {', '.join(most)} or {last}")
    return value


def path_or_name(name: str, value: object) -> str:
    """Text, or the text of a path; ParameterError otherwise."""
    try:
        text = os.fspath(value)  # type: ignore[call-overload]
    except TypeError:
        text = None
    if not isinstance(text, str):
        raise ParameterError(f"{name} is {value!r:.80}; it must be a name or a path")
    return text


Range = tuple[int, int]


def device_options(values: Mapping[str, Any], sizes: Mapping[str, Range]) -> dict[str, Any]:
    """A device's own options: `sizes` by range (None: the device's choice), `deadline_s`, and
    `script`, which is for tests. ParameterError names those there are not."""
    checked: dict[str, Any] = {}
    for name, value in values.items():
        if name in sizes:
            if value is not None:
                checked[name] = size(name, value, *sizes[name])
        elif name == "deadline_s":
            checked[name] = positive_s(name, value)
        elif name == "script":
            checked[name] = value
        else:
            raise ParameterError(
                f"unknown engine option {name!r}; besides the named ones: "
                f"{', '.join((*sizes, 'deadline_s'))}"
            )
    return checked
