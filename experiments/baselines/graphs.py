"""A function over static buffers as a CUDA graph; where there is no GPU, the function itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Captured:
    """`work(keys)` captured once for each number of keys that attention reads, then replayed.

    enabled=False: never captured. Graphs share one memory pool: they are never replayed at the same
    time. Capturing runs the work, so it is done ahead of a request, when no state matters yet.
    """

    _pool: Any = None

    def __init__(self, work: Callable[[int], None], device: torch.device, enabled: bool) -> None:
        self._work = work
        self._enabled = enabled and device.type == "cuda"
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def prepare(self, keys: int) -> None:
        """Warm up on a side stream, as capturing wants, then record."""
        if not self._enabled or keys in self._graphs:
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._work(keys)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=Captured._pool):
            self._work(keys)
        Captured._pool = graph.pool()
        self._graphs[keys] = graph

    def __call__(self, keys: int) -> None:
        """KeyError if it was not prepared for that many keys."""
        if self._enabled:
            self._graphs[keys].replay()
        else:
            self._work(keys)
