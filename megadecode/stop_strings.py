"""Stop strings: text at which a request ends, wherever tokens and steps cut it."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches streamed text. What may be the beginning of a stop string is held back until it is
    clear that it is not, so that nothing behind a stop is ever shown."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """The text that may be shown now; sets `hit` when a stop string is complete.

        Of several, the one that begins first counts; what precedes it is the last text shown.
        """
        if self.hit is not None:
            return ""
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.hit = min(found, key=lambda pair: (pair[0], len(pair[1])))
            self._held = ""
            return text[:at]
        hold = self._possible_start(text)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def finish(self) -> str:
        """The text held back when the request ends otherwise."""
        rest, self._held = self._held, ""
        return rest

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
