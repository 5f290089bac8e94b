"""The watchdog: is the device alive?"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from host.errors import DeviceError, DeviceHung
from host.ring import read_word
from host.sink import Device
from host.wire import State, Word

_LARGEST_STEP_S = 0.05


class Watch:
    """Notices a device that shows no sign of life while it should be running: neither its heartbeat
    nor any worker's phase word moves. A long step alone is no hang.

    Only time in which the poller itself ran counts: when the whole process has been stopped, the
    clock has moved on and nobody hangs.
    """

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._beat: object = None
        self._still_s = 0.0
        self._last = time.monotonic()

    def look(self, control: np.ndarray, where: Callable[[], str]) -> DeviceHung | None:
        now = time.monotonic()
        step, self._last = min(now - self._last, _LARGEST_STEP_S), now
        beat = (int(read_word(control, Word.HEARTBEAT)), control[Word.PHASE :: 8].tobytes())
        if beat != self._beat or read_word(control, Word.STATE) != State.RUNNING:
            self._beat, self._still_s = beat, 0.0
            return None
        self._still_s += step
        if self._still_s < self.deadline_s:
            return None
        return DeviceHung(f"the device showed no sign of life for {self.deadline_s:g} s: {where()}")


def describe_fault(control: np.ndarray, device: Device) -> DeviceError:
    """What a device in the state FAULT has to say."""
    if device.crash is not None:
        return DeviceError(f"the device's loop ended with {device.crash!r}")
    at, who = int(control[Word.FAULT_OPERATION]), device.worker_name
    masks = control[Word.FAULT_WORKERS :]
    missing = [str(w) for w in range(device.workers) if int(masks[w // 64]) >> w % 64 & 1]
    where = f"in phase {device.operations[at]}" if at >= 0 else "before the first phase of a step"
    return DeviceHung(
        f"the device hung {where}: {who} {', '.join(missing)} of {device.workers} did not arrive "
        f"within the deadline"
    )


def describe_silence(control: np.ndarray, device: Device) -> str:
    """Where each worker of a silent device is, from its phase word; what the driver says, if it is
    one that can tell."""
    names, who = device.operations, device.worker_name
    places: dict[str, list[str]] = {}
    for w in range(device.workers):
        at = int(read_word(control, Word.PHASE + 8 * w))
        place = "outside" if not at else f"{'in' if at > 0 else 'after'} {names[abs(at) - 1]}"
        places.setdefault(place, []).append(str(w))
    found = ", ".join(f"{who} {' '.join(ws)} {place}" for place, ws in places.items())
    failure = device.failure()
    return f"{found}; the driver reports {failure}" if failure else found
