"""The host's book of requests in flight: places, pool blocks, and whose sink hears of what."""

from __future__ import annotations

from collections import deque

import numpy as np

from host.errors import DeviceError
from host.pool import BlockPool
from host.sink import Nobody, Sink
from host.wire import CompletionKind, FinishReason


class InFlight:
    """Requests between their submit and their terminal entry. Not thread-safe; the link holds its
    lock. An id is a place and how often that was given out, so no two requests share one."""

    def __init__(self, most: int, blocks: int) -> None:
        self.most = most
        self.pool = BlockPool(blocks)
        # free places, the longest free first: ids of one place are far apart on the wire
        self.handles = deque(range(most))
        self.aborted: set[int] = set()
        self._requests: dict[int, tuple[Sink, int, int]] = {}  # id -> sink, first block, blocks
        self._copied: set[int] = set()  # their pool blocks are free again
        self._generation = [0] * most

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._requests

    def ids(self) -> list[int]:
        return list(self._requests)

    def open(self, sink: Sink, blocks: int) -> tuple[int, int] | None:
        """(id, first pool block) for a new request; None when no place or no room is left."""
        first = self.pool.allocate(blocks) if self.handles else None
        if first is None:
            return None
        handle = self.handles.popleft()
        self._generation[handle] += 1
        request_id = self._generation[handle] * self.most + handle
        self._requests[request_id] = (sink, first, blocks)
        sink.request_id = request_id
        return request_id, first

    def withdraw(self, request_id: int) -> None:
        """Take back a request that never reached the wire."""
        found = self._requests.pop(request_id, None)
        if found is not None:
            self.handles.append(request_id % self.most)
            self.pool.release(found[1], found[2])

    def take(self, entry: np.void) -> int | None:
        """Hand a completion entry to its request. The request's id if its sink has failed and the
        device should be told to stop: one reader's failure is nobody else's."""
        request_id, kind = int(entry["request_id"]), int(entry["kind"])
        sink, first, blocks = self._requests[request_id]
        if kind == CompletionKind.TOKENS:
            pairs = int(entry["pairs"])
            try:
                sink.on_pairs(
                    entry["token"][:pairs].tolist(),
                    entry["logprob"][:pairs].tolist(),
                    int(entry["accepted"]),
                    int(entry["step"]),
                    int(entry["stamp_ns"]),
                )
            except Exception as error:
                self._requests[request_id] = (Nobody(), first, blocks)
                sink.on_lost(DeviceError(f"the request's reader failed: {error!r}"))
                return request_id
        elif kind == CompletionKind.COPIED:
            self._copied.add(request_id)
            self.pool.release(first, blocks)
        elif kind == CompletionKind.TERMINAL:
            self._end(entry, request_id)
        return None

    def _end(self, entry: np.void, request_id: int) -> None:
        sink, first, blocks = self._requests.pop(request_id)
        if request_id in self._copied:
            self._copied.remove(request_id)
        else:  # ended before its prompt was copied
            self.pool.release(first, blocks)
        self.aborted.discard(request_id)
        self.handles.append(request_id % self.most)
        try:
            sink.on_end(
                FinishReason(int(entry["reason"])), entry["token"].tolist(), int(entry["stamp_ns"])
            )
        except Exception as error:
            sink.on_lost(DeviceError(f"the request's reader failed: {error!r}"))

    def lose(self, error: DeviceError) -> None:
        """Every request ends with `error`."""
        for sink, _, _ in self._requests.values():
            sink.on_lost(error)
        self._requests.clear()
