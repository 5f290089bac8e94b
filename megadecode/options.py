"""Checks of the engine's options, so that nothing wrong gets as far as the device."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megadecode.cpu_device import CpuOptions
from megadecode.errors import DeviceUnavailable, ParameterError

NEVER_S = -1.0
_LONGEST_S = 1e9

# Options of the CPU device that `Engine` passes on, and their ranges.
_DEVICE_SIZES = {
    "decode_rows": (1, 256),
    "max_inflight": (1, 2**20),
    "completion_entries": (1, 2**24),
    "request_entries": (1, 2**24),
    "pool_bytes": (1, 2**40),
    "first_sequence": (0, 2**62),
}
_DEVICE_OTHERS = ("deadline_s", "script")


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


def seconds(name: str, value: object) -> float:
    """A number of seconds; what is negative, infinite or beyond thirty years means never."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ParameterError(f"{name} is {value!r}; it must be a number of seconds")
    return float(value) if 0 <= value <= _LONGEST_S else NEVER_S


def check_device(device: str) -> None:
    """ParameterError for an unknown device, DeviceUnavailable for one that cannot be used."""
    if device not in ("auto", "cpu", "cuda"):
        raise ParameterError(f"device is {device!r}; choose auto, cpu or cuda")
    if device == "cuda":
        raise DeviceUnavailable(
            "device 'cuda' has no kernel in this release; use device='cpu' or 'auto'"
        )


def device_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Further options of the CPU device, checked; ParameterError names those there are not."""
    known = {f.name for f in fields(CpuOptions)}
    assert known.issuperset((*_DEVICE_SIZES, *_DEVICE_OTHERS))
    checked: dict[str, Any] = {}
    for name, value in values.items():
        if name in _DEVICE_SIZES:
            checked[name] = None if value is None else size(name, value, *_DEVICE_SIZES[name])
        elif name == "deadline_s":
            if (limit := seconds(name, value)) <= 0:
                raise ParameterError(f"deadline_s is {value!r}; it must be above 0")
            checked[name] = limit
        elif name == "script":
            checked[name] = value
        else:
            options = ", ".join((*_DEVICE_SIZES, *_DEVICE_OTHERS))
            raise ParameterError(
                f"unknown engine option {name!r}; besides the named ones: {options}"
            )
    return checked
