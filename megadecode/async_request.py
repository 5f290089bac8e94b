"""A request as asyncio sees it: something to await, or to iterate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import contextmanager, suppress

from megadecode.errors import QueueFull
from megadecode.request import Chunk, Generation, Request

_SHORTEST_S, _LONGEST_S = 0.0005, 0.05


class AsyncRequest:
    """A request that starts when it is first awaited or iterated.

    `await request` gives its `Generation`, `async for chunk in request` its chunks as they come;
    iterate first and await then to have both. Cancelling a task that waits for it, and leaving an
    iteration early, abort the request. While the engine holds as many requests as it can, it waits
    for its turn without holding up the event loop.

    Raises, when awaited, DeviceError when the device was lost.
    """

    def __init__(self, submit: Callable[[], Request]) -> None:
        """`submit` raises QueueFull while there is no place."""
        self._submit = submit
        self._request: Request | None = None
        self._starting = asyncio.Lock()

    def abort(self) -> None:
        """Ask for an early end, if it has begun; see `Request.abort`."""
        if self._request is not None:
            self._request.abort()

    def __await__(self) -> Generator[None, None, Generation]:
        return self._result().__await__()

    async def _result(self) -> Generation:
        request = await self._start()
        try:
            with _heard(request) as change:
                while not request.done:
                    await change.wait()
                    change.clear()
        finally:
            request.abort()  # cancelled; nothing when it has ended
        return request.result(0)

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        request = await self._start()
        try:
            with _heard(request) as change:
                while True:
                    change.clear()
                    chunk, done = request.take()
                    if chunk is not None:
                        yield chunk
                    elif done:
                        request.result(0)  # raises when the device was lost
                        return
                    else:
                        await change.wait()
        finally:
            request.abort()

    async def _start(self) -> Request:
        async with self._starting:
            pause_s = _SHORTEST_S
            while self._request is None:
                try:
                    self._request = self._submit()
                except QueueFull:
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_S)
        return self._request


@contextmanager
def _heard(request: Request) -> Iterator[asyncio.Event]:
    """An event of the running loop that is set whenever the request has changed."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:  # on the poller's thread
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(event.set)

    request.add_listener(wake)
    try:
        yield event
    finally:
        request.remove_listener(wake)
