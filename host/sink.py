"""What the link needs of the two it stands between: a request's reader and a device."""

from __future__ import annotations

from typing import Protocol

from host.errors import DeviceError
from host.wire import FinishReason


class Sink(Protocol):
    """Where one request's completions go. Called by the poller; must not block.

    `request_id` is set before the request is pushed, so before any call.
    """

    request_id: int

    def on_pairs(
        self, ids: list[int], logprobs: list[float], accepted: int, step: int, stamp_ns: int
    ) -> None: ...

    def on_end(self, reason: FinishReason, details: list[int], stamp_ns: int) -> None: ...

    def on_lost(self, error: DeviceError) -> None: ...


class Device(Protocol):
    """What the link needs of a device object."""

    operations: tuple[str, ...]
    workers: int
    worker_name: str
    crash: BaseException | None

    def launch(self) -> None: ...

    def failure(self) -> str: ...

    def close(self, timeout_s: float = 5.0) -> bool: ...


class Nobody:
    """The sink of a request whose own sink has failed."""

    request_id = -1

    def on_pairs(
        self, ids: list[int], logprobs: list[float], accepted: int, step: int, stamp_ns: int
    ) -> None: ...

    def on_end(self, reason: FinishReason, details: list[int], stamp_ns: int) -> None: ...

    def on_lost(self, error: DeviceError) -> None: ...
