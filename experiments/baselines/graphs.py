"""A function over static buffers as a CUDA graph; where there is no GPU, the function itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


class Captured:
    """`work(keys)` captured once for each number of keys that attention reads, then replayed.

    pool: of graphs that are never replayed at the same time (`torch.cuda.graph_pool_handle`); None:
    the work is never captured. Capturing runs the work, so it is done ahead of a request, when no
    state matters yet.
    """

    def __init__(self, work: Callable[[int], None], pool: Any) -> None:
        self._work, self._pool = work, pool
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def prepare(self, keys: int) -> None:
        """Warm up on a side stream, as capturing wants, then record."""
        if self._pool is None or keys in self._graphs:
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._work(keys)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._work(keys)
        self._graphs[keys] = graph

    def forget(self, pool: Any) -> None:
        """Nothing is captured; what will be comes from another pool, since one whose graphs have
        all gone takes no new ones."""
        self._graphs.clear()
        if self._pool is not None:
            self._pool = pool

    def __call__(self, keys: int) -> None:
        """KeyError if it was not prepared for so many keys."""
        if self._pool is not None:
            self._graphs[keys].replay()
        else:
            self._work(keys)

    def __iter__(self) -> Iterator[torch.cuda.CUDAGraph]:
        """The graphs, for who times them."""
        return iter(self._graphs.values())
