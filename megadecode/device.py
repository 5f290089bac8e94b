"""What the engine needs of a device, and where one is chosen.

A device is a module with `prepare(settings, options)`: it checks everything that can be checked
without the model, so that a mistake costs no loading, and gives back what starts the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from host.link import Link
from megadecode.config import ModelConfig
from megadecode.drafter.io import Drafter
from megadecode.errors import ParameterError
from megadecode.models.weights import FloatArray
from megadecode.sampling import SamplingParams
from megadecode.split import StepSplit
from megadecode.trace import PhaseFigures

DEVICES = ("auto", "cpu", "cuda")
AUTO_BUDGET = -1


@dataclass(frozen=True, slots=True)
class Settings:
    """What every device is told, checked by the engine as far as it holds for all of them.

    `ctx`: positions a request may use; `slots`: requests decoded at the same time; `pages` of 64
    positions are shared by all slots; `weights`: the type they are kept in, or None for the
    device's own choice; `chunk_rows`: prompt tokens a step, a multiple of 64, or None for the
    device's own; `park_after_s`: idle seconds after which the loop leaves the device (negative:
    never); `budget`: nodes a slot and step, or `AUTO_BUDGET`; `chain`: the budget is its length.
    """

    ctx: int
    slots: int
    pages: int
    weights: str | None
    chunk_rows: int | None
    park_after_s: float
    budget: int
    chain: bool


class Parts(Protocol):
    """A device that has been put together and not yet launched: the first request does that."""

    @property
    def link(self) -> Link:
        """The host's end of its wire."""
        ...

    @property
    def reserve_rows(self) -> int:
        """Positions beyond its own that a request takes up in pages: a step's verify rows."""
        ...

    @property
    def weights(self) -> str:
        """The type that the weights are kept in."""
        ...

    @property
    def acceptance(self) -> str | None:
        """Where drafts come from: `drafter`, `scripted`, or None without."""
        ...

    def refuse(self, params: SamplingParams) -> None:
        """ParameterError for what is in order but not to be had on this device."""
        ...

    def figures(self, *, reset: bool) -> list[PhaseFigures]:
        """Time per phase since the start or the last reset."""
        ...

    def split(self) -> StepSplit | None:
        """Where a step's time goes, on a device that counts it."""
        ...

    def read_gb_per_s(self) -> float:
        """What the device reads from its memory per second, measured now; the loop is parked."""
        ...


Tensors = Callable[[str], FloatArray]
"""fp32 tensors by canonical name; see `megadecode.models.weights`."""

Start = Callable[[ModelConfig, Tensors, Drafter | None], Parts]
"""Packs the weights, allocates everything and makes the link. Raises ModelError for a shape that
the device has no kernel for, ParameterError when memory is short."""


def default_slots(name: str) -> int:
    """Requests decoded at the same time where the engine is not told."""
    return 1 if name == "cuda" else 16


def prepare(name: str, settings: Settings, options: Mapping[str, Any]) -> Start:
    """Choose a device and check what it is asked for; `options` are its own, by name.

    `auto` is the CPU device, which serves everything; a GPU is used where it is asked for.
    Raises ParameterError for an unknown device or a wrong option, DeviceUnavailable for a device
    that cannot be used here.
    """
    if name not in DEVICES:
        raise ParameterError(f"device is {name!r}; choose auto, cpu or cuda")
    if name == "cuda":
        from megadecode import cuda_device

        return cuda_device.prepare(settings, options)
    from megadecode import cpu_device

    return cpu_device.prepare(settings, options)
