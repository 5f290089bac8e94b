"""`graph_pdl` as a whole speculative step in one graph: megadecode's phases verify, with
programmatic edges; the drafter, the tree and the walk are those of `graph_whole_step`, fused and
with split-KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from cute_kernels.gpu.config import ROWS
from cute_kernels.gpu.kv_layout import PAGE, key_order, swizzle_rows
from experiments.baselines.core import Core, Setup
from experiments.baselines.graphs import Captured
from experiments.baselines.loops import WholeStep
from experiments.baselines.pdl import PdlStep
from experiments.baselines.pdl_plan import MODELS, attention_config
from experiments.baselines.pdl_step_ends import describe, gather_features, move_rows
from megadecode.cuda_weights import pack_model


class PdlCore(Core):
    """A core whose target is a graph of phases; keys and values lie in the kernel's pages."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        super().__init__(setup)
        c = setup.weights.config
        name = next((m for m in MODELS if attention_config(m).shape.hidden == c.hidden), None)
        if name is None or self.rows > ROWS:
            raise ValueError(f"graph_pdl is built for up to {ROWS} rows of {', '.join(MODELS)}")
        config = attention_config(name)
        held = pack_model(c, setup.weights.tensor, config, self.capacity)
        held = {
            k: held[k] for k in ("STREAM", "OFFSETS", "FINAL_NORM", "QK_NORM", "ROPE") if k in held
        }
        n, s = self.capacity // PAGE, config.shape
        self.pages = torch.arange(n, dtype=torch.int32, device="cuda")
        self.pool = torch.zeros(
            n, s.layers, s.kv_heads, 2, PAGE, s.head_dim, dtype=torch.bfloat16, device="cuda"
        )
        self.pdl = PdlStep(folder, name, held, self.target.embed, self.pool, self.pages)
        self.pdl.rows, self.pdl.tokens = self.rows, self.tokens
        self.tap_layers = torch.tensor(self.taps, dtype=torch.int32, device="cuda")
        self.which = 0

    def prefill(self, prompt: Sequence[int]) -> int:
        first = super().prefill(prompt)
        self._to_pages()
        return first

    def pretend(self, length: int, seed: int = 0) -> int:
        first = super().pretend(length, seed)
        self._to_pages()
        return first

    def _to_pages(self) -> None:
        """What torch has put into its cache, in the kernel's pages and order."""
        stack = self.target.stack
        order = torch.from_numpy(key_order(stack.keys.shape[-1])).cuda()
        for i, cache in enumerate((stack.keys[..., order], stack.values)):
            blocks = cache.unflatten(2, (-1, PAGE))
            self.pool[:, :, :, i] = swizzle_rows(blocks).permute(2, 0, 1, 3, 4)

    def verify(self, keys: int) -> None:
        """keys: which set of buffers."""
        self.which = keys
        if not self.draft_model:
            self.tokens.copy_(self.anchor)
        describe(self.pdl.board, self.length, self.depths, self.paths)
        self.pdl.launch(keys)
        self.decided.copy_(self.pdl.choose.chosen[: self.rows])

    def commit(self) -> None:
        if self.draft_model:
            move_rows(self.pool, self.pages, self.length, self.path, self.count)
            act = self.pdl.sets[self.which].view(torch.bfloat16)
            stride, first = self.pdl.b.bytes // 2, self.pdl.b.x // 2
            gather_features(act, first, stride, self.tap_layers, self.path, self.fresh)
        self.length += self.count


class GraphPdl(WholeStep):
    """One graph for each of the two sets of buffers; the host replays them in turn."""

    name = "graph_pdl"

    def __init__(self, setup: Setup, folder: Path) -> None:
        self._folder = folder
        super().__init__(setup)
        self.dynamic = False

    def open_core(self, setup: Setup) -> Core:
        return PdlCore(setup, self._folder)

    def prepare(self, first: int, last: int) -> None:
        for which in range(2):
            for graph in self.graphs():
                self.core._begin(first)
                graph.prepare(which)

    def begin(self, length: int) -> None:
        super().begin(length)
        assert isinstance(self.core, PdlCore)
        self.core.pdl.clear()

    def graph_key(self, bound: int) -> int:
        return self._sent % 2

    def graphs(self) -> list[Captured]:
        return [self._all]
