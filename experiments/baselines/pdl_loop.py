"""`graph_pdl` as a whole speculative step in one graph: megadecode's phases draft and verify, with
programmatic edges between them; candidates, tree, walk and moves are a Triton kernel each.
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
from experiments.baselines.pdl_decisions import Plant, Rank, accept
from experiments.baselines.pdl_draft import PdlDraft
from experiments.baselines.pdl_plan import MODELS, attention_config
from experiments.baselines.pdl_step_ends import describe, gather_features, move_rows
from megadecode.cuda_weights import pack_model


class PdlCore(Core):
    """A core whose target is a graph of phases; keys and values lie in the kernel's pages.
    drafter_too=False: the drafter, the tree and the walk as in `graph_whole_step`."""

    def __init__(self, setup: Setup, folder: Path, drafter_too: bool = True) -> None:
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
        self.drafter: PdlDraft | None = None
        if drafter_too and self.draft_model is not None and setup.drafter is not None:
            self.drafter = PdlDraft(
                folder, name, setup.drafter, self.draft_model, self.target.head, self.pages,
                self.capacity,
            )  # fmt: skip
            self.rank = Rank(
                self.depth, len(self.draft_model.ids), self.width, self.draft_model.ids
            )
            self.planter = Plant(self.depth, self.nodes, self.width, setup.chain, self.planted)
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
        pairs = [(self.target.stack, self.pool)]
        if self.drafter is not None and self.draft_model is not None:
            pairs.append((self.draft_model.stack, self.drafter.pool[:, 1:]))
        for stack, pool in pairs:
            order = torch.from_numpy(key_order(stack.keys.shape[-1])).cuda()
            for i, cache in enumerate((stack.keys[..., order], stack.values)):
                blocks = cache.unflatten(2, (-1, PAGE))
                pool[:, :, :, i] = swizzle_rows(blocks).permute(2, 0, 1, 3, 4)

    def clear(self) -> None:
        """All words of the phases EMPTY: before a first step with set 0."""
        self.pdl.clear()
        if self.drafter is not None:
            self.drafter.clear()

    @torch.no_grad()
    def draft(self, keys: int) -> None:
        """keys: which set of buffers."""
        if self.drafter is None:
            super().draft(keys)
            return
        first = self.drafter.config.first_row
        self.drafter.absorb(self.fresh, self.count, self.length)
        self.drafter.launch(keys, self.anchor, self.length)
        self.rank(self.drafter.logits[first:], self.logprobs, self.ids)

    def plant(self) -> None:
        if self.drafter is None:
            super().plant()
            return
        self.planter(self.logprobs, self.ids, self.anchor)

    def accept(self) -> None:
        if self.drafter is None:
            super().accept()
            return
        accept(
            self.planted, self.decided, self.count, self.anchor, self.path, self.out,
            self.setup.forced,
        )  # fmt: skip

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
    """One graph for each of the two sets of buffers; the host replays them in turn. folder: kernels
    of pdl_kernels.py."""

    name = "graph_pdl"

    def __init__(self, setup: Setup, folder: Path, drafter_too: bool = True) -> None:
        self._folder, self._drafter_too = folder, drafter_too
        super().__init__(setup)
        self.dynamic = False

    def open_core(self, setup: Setup) -> Core:
        return PdlCore(setup, self._folder, self._drafter_too)

    def prepare(self, first: int, last: int) -> None:
        for which in range(2):
            for graph in self.graphs():
                self.core._begin(first)
                graph.prepare(which)

    def begin(self, length: int) -> None:
        super().begin(length)
        assert isinstance(self.core, PdlCore)
        self.core.clear()

    def graph_key(self, bound: int) -> int:
        return self._sent % 2

    def graphs(self) -> list[Captured]:
        return [self._all]
