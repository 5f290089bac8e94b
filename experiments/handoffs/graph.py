"""The honest rival: the same phase code as one kernel per phase, in a CUDA graph, each launch
allowed to begin before the one in front of it has ended (programmatic dependent launch)."""

import torch

from cute_kernels.gpu import pack
from cute_kernels.gpu.config import KINDS, Config
from cute_kernels.gpu.load import Kernel
from experiments.handoffs.skeleton import Skeleton, Weights


class PhaseGraph(Skeleton):
    """A Skeleton whose `launch` replays a captured graph of phase kernels."""

    def __init__(
        self, kernels: dict[str, Kernel], c: Config, weights: Weights, dependent: bool = True
    ) -> None:
        super().__init__(kernels["qkv"], c, weights)
        self.kernels, self.dependent = kernels, dependent
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        hidden = c.shape.hidden
        self.x0 = torch.zeros(c.tile_rows * hidden, dtype=torch.bfloat16, device="cuda")
        self.r0 = torch.zeros(hidden // 8 * c.tile_rows * 8, device="cuda")
        self.residual = torch.zeros_like(self.r0)

    def _step(self, layers: int) -> None:
        stream, offsets, plan = (t.data_ptr() for t in self.pack(layers))
        self.residual.copy_(self.r0)
        b, act, x = self.buffers, self.act.data_ptr(), self.x0.data_ptr()
        phases = 4 * layers + 1
        hops = []
        for _ in range(layers):
            hops += [(x, act + b.q), (act + b.q, act + b.y), (act + b.y, act + b.h)]
            hops += [(act + b.h, act + b.x)]
            x = act + b.x
        hops.append((x, self.logits.data_ptr()))
        for i, (src, dst) in enumerate(hops):
            name = KINDS[i % 4] if i < 4 * layers else "lm"
            self.kernels[name].launch(
                [stream, offsets, plan, src, dst, self.residual.data_ptr(), i, phases],
                "q" * 6 + "ii",
                torch.cuda.current_stream().cuda_stream,
                cooperative=False,
                dependent=self.dependent and i > 0,
            )

    def launch(self, x: torch.Tensor, layers: int, steps: int, context=None) -> float:
        c = self.c
        full = torch.zeros(c.tile_rows, c.shape.hidden, dtype=torch.bfloat16, device="cuda")
        full[: x.shape[0]] = x
        self.x0.copy_(pack.to_fragments(full, c))
        self.r0.copy_(full.float().reshape(c.tile_rows, -1, 8).transpose(0, 1).reshape(-1))
        self.act.view(torch.int16).fill_(-1)
        self.logits.fill_(float("nan"))
        self.last = 0
        key = (layers, steps)
        if key not in self.graphs:
            self.pack(layers)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(steps):
                    self._step(layers)
            self.graphs[key] = graph
            graph.replay()  # the first replay uploads
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        self.graphs[key].replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3

    def step_us(self, few: int = 5, many: int = 25) -> float:
        return super().step_us(few, many)
