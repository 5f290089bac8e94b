"""The seeds' loop around megadecode's own phases: draft and verify are graphs of our kernels with
programmatic edges, and between them the host builds the tree, carries it and walks it.

What is left of a rival between this and `graph_pdl` is the host alone.
"""

from __future__ import annotations

from pathlib import Path

from experiments.baselines.core import Setup
from experiments.baselines.graphs import Captured
from experiments.baselines.loops import HostTree, pinned
from experiments.baselines.pdl_loop import PdlCore
from experiments.baselines.trees import root_paths


class PdlHostTree(HostTree):
    """graph_host_tree whose two graphs are of our phases, a pair for each of their two sets of
    buffers. folder: kernels of pdl_kernels.py."""

    name = "graph_host_tree, our phases"

    def __init__(self, setup: Setup, folder: Path) -> None:
        self._folder = folder
        super().__init__(setup)
        self.dynamic = False
        core = self.core
        assert isinstance(core, PdlCore)
        self._paths_there = pinned(core.paths)
        self._paths = self._paths_there.numpy()

        def front(which: int) -> None:
            core.which = 1 - which  # the step before has used the other set
            core.commit()
            core.draft(which)

        def verify(which: int) -> None:
            core.paths.copy_(self._paths_there, non_blocking=True)
            core.verify(which)

        self._draft = Captured(front, self._pool)
        self._verify = Captured(verify, self._pool)

    def open_core(self, setup: Setup) -> PdlCore:
        return PdlCore(setup, self._folder)

    def keys(self) -> int:
        return self._steps % 2

    def prepare(self, first: int, last: int) -> None:
        for which in range(2):
            for graph in self.graphs():
                self.core._begin(first)
                graph.prepare(which)

    def begin(self, length: int) -> None:
        super().begin(length)
        self._steps = 0
        assert isinstance(self.core, PdlCore)
        self.core.clear()

    def carry(self, parents: list[int]) -> None:
        self._paths[:] = root_paths(parents, self.core.most)
