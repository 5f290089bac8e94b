"""A training step as a CUDA graph: forward, loss, backward, clipping and the optimiser in one call.

A drafter is small: launched kernel by kernel, a step waits for Python. One graph per batch shape,
captured at the shape's third step; all of them share their memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch

WARM_UP = 2

Step = Callable[..., tuple[torch.Tensor, ...]]


class GraphStep:
    """Wraps a step that takes tensors and returns tensors, and works in place on everything else.

    Results are overwritten by the next call. What cannot be captured is said once and run as it
    is. `reset` is called before a capture: gradients must
    not exist yet, so that they lie in the graphs' own memory.
    """

    def __init__(self, step: Step, reset: Callable[[], None]) -> None:
        self._step, self._reset = step, reset
        self._possible = True
        self._seen: dict[tuple[torch.Size, ...], int] = {}
        self._graphs: dict[
            tuple[torch.Size, ...],
            tuple[torch.cuda.CUDAGraph, list[torch.Tensor], tuple[torch.Tensor, ...]],
        ] = {}

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        key = tuple(x.shape for x in inputs)
        if not self._possible:
            return self._step(*inputs)
        if key in self._graphs:
            graph, places, results = self._graphs[key]
            for place, x in zip(places, inputs):
                place.copy_(x)
            graph.replay()
            return results
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] <= WARM_UP:
            return self._aside(inputs)
        try:
            return self._capture(key, inputs)
        except RuntimeError as error:
            warnings.warn(f"training steps are not captured: {error}", stacklevel=2)
            self._possible = False
            self._reset()
            return self._step(*inputs)

    def _aside(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run as it is, on a stream of its own, as what is captured afterwards will be."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._reset()
            results = self._step(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        return results

    def _capture(
        self, key: tuple[torch.Size, ...], inputs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        places = [x.clone() for x in inputs]
        pool = next((graph.pool() for graph, _, _ in self._graphs.values()), None)
        self._reset()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            results = self._step(*places)
        self._graphs[key] = graph, places, results
        graph.replay()
        return results
