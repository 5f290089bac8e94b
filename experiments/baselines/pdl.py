"""The honest rival: megadecode's own phases as one kernel each, in a graph of programmatic edges.

Every kernel starts while the one in front still runs, sets itself up and streams weights (or
committed keys and values) into its ring; only its consumers wait. Verifies up to 16 rows, from
their tokens to the choices. What a graph has and a resident kernel has not: an edge between two
phases waits for the *whole* grid in front and for its flush.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from cute_kernels.gpu.arguments import COUNT, Arg
from cute_kernels.gpu.board import make_board
from cute_kernels.gpu.config import KINDS, LAYER_KINDS, ROWS
from cute_kernels.gpu.load import Kernel
from cute_kernels.gpu.script import SCRIPT_WORDS
from cute_kernels.gpu.tiles import Buffers, make_plan
from experiments.baselines.pdl_ends import Choose, embed_rows
from experiments.baselines.pdl_plan import attention_config, phase_config
from tests.gpu.model import Context, Model


class PdlStep:
    """The verify step of a model of `pdl_plan.MODELS`.

    held: its weights and tables by the names of Arg, packed for `attention_config`; ROPE among them
    (its PLAN is made here). embed: bf16 [vocab, hidden]. pool, pages: keys and values, a page table
    entry for every position of a step. dependent=False: plain edges, for comparison.
    """

    def __init__(
        self, folder: Path, name: str, held: dict[str, torch.Tensor], embed: torch.Tensor,
        pool: torch.Tensor, pages: torch.Tensor, dependent: bool = True,
    ) -> None:  # fmt: skip
        self.c, self.phase = attention_config(name), phase_config(name)
        self.kernels = {
            part: Kernel.read(folder / f"pdl-{name}-{part}") for part in (*KINDS, "attention")
        }
        self.dependent, self.embed = dependent, embed
        s, self.b = self.c.shape, Buffers.of(self.c)
        self.layers, self.rows = s.layers, ROWS
        # Two sets of buffers: while one is used, the words of the other are cleared beside it.
        size = self.layers * self.b.bytes
        self.sets = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
        self.clear()
        self.x0 = torch.zeros(ROWS * s.hidden, dtype=torch.bfloat16, device="cuda")
        self.residual = torch.zeros(ROWS * s.hidden, device="cuda")
        self.logits = torch.zeros(ROWS, self.c.logit_stride, device="cuda")
        self.tokens = torch.zeros(ROWS, dtype=torch.int64, device="cuda")
        self.board = torch.from_numpy(make_board()).cuda()
        self.choose = Choose(ROWS, s.vocab)
        self.stream, self.side = torch.cuda.Stream(), torch.cuda.Stream()
        # Tiles lie as they do for attention's kernel; how many copies they come in is the ring's.
        plan = torch.from_numpy(make_plan(self.phase, s.layers)).cuda()
        own = {"PLAN": plan, "BOARD": self.board, "KV_POOL": pool, "PAGE_TABLE": pages}
        self.held = held | own
        values = np.zeros(COUNT, np.int64)
        values[Arg.LAYERS] = s.layers
        for key, tensor in self.held.items():
            values[Arg[key]] = tensor.data_ptr()
        self.table = torch.from_numpy(values).cuda()
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    @classmethod
    def of_test(
        cls, folder: Path, name: str, weights: Model, context: Context, dependent: bool = True
    ) -> PdlStep:
        """Of a model and a context as the GPU tests have them."""
        held = weights.packed(attention_config(name)) | {"ROPE": context.rope}
        return cls(folder, name, held, weights.embed, context.pool, context.pages, dependent)

    def clear(self) -> None:
        """All words EMPTY, in both sets: before a first step with set 0."""
        for words in self.sets:
            words.fill_(255)

    def begin(self, step: np.ndarray, tokens: list[int]) -> None:
        """The rows: a descriptor of script.decode_step, and its tokens, 16 or fewer."""
        self.rows = len(tokens)
        self.tokens[: self.rows] = torch.tensor(tokens, device="cuda")
        self.board[:SCRIPT_WORDS] = torch.from_numpy(step.astype(np.int32)).cuda()
        self.graphs.clear()

    def launch(self, which: int) -> None:
        """The kernels of a step, into the current stream. which: the set of buffers, 0 or 1."""
        b, act, args = self.b, self.sets[which].data_ptr(), self.table.data_ptr()
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            self.sets[1 - which].view(self.layers, b.bytes)[:, b.a :].fill_(255)
        embed_rows(self.tokens, self.embed, self.x0, self.residual)
        stream, x = main.cuda_stream, self.x0.data_ptr()
        edge = dict(cooperative=False, dependent=self.dependent)

        def matrix(kind: str, phase: int, source: int, to: int) -> None:
            values = [args, source, to, self.residual.data_ptr(), phase, self.rows]
            self.kernels[kind].launch(values, "qqqqii", stream, **edge)

        for layer in range(self.layers):
            at = act + layer * b.bytes
            hops = (x, at + b.q), (at + b.a, at + b.y), (at + b.y, at + b.h), (at + b.h, at + b.x)
            for i, (kind, (source, to)) in enumerate(zip(LAYER_KINDS, hops)):
                matrix(kind, 4 * layer + i, source, to)
                if kind == "qkv":
                    self.kernels["attention"].launch([args, at, layer], "qqi", stream, **edge)
            x = at + b.x
        matrix("lm", 4 * self.layers, x, self.logits.data_ptr())
        self.choose(self.logits)
        main.wait_stream(self.side)

    def run(self, which: int) -> None:
        """One step, waited for."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            self.launch(which)
        torch.cuda.synchronize()

    def capture(self, steps: int) -> torch.cuda.CUDAGraph:
        """A graph of so many steps, an even number of them or one for each set."""
        if steps not in self.graphs:
            self.run(0)  # warms up what Triton compiles
            self.run(1)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for i in range(steps):
                    self.launch(i % 2)
            self.graphs[steps] = graph
        return self.graphs[steps]

    def step_us(self, steps: int, rounds: int) -> float:
        """us of a step in a graph of `steps`, an even number, replayed back to back."""
        graph = self.capture(steps)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        for _ in range(rounds):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3 / (rounds * steps)
