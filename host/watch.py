"""The watchdog: is the device alive?"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from host.errors import DeviceHung
from host.ring import read_word
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
