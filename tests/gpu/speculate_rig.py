"""Runs the kernels of speculate_kernels.py on the GPU. Needs torch, numba; loads built cubins."""

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from cute_kernels.gpu import board, kv_layout
from cute_kernels.gpu.arguments import COUNT, Arg
from cute_kernels.gpu.board import Desc
from cute_kernels.gpu.config import Config
from cute_kernels.gpu.kv_layout import PAGE
from cute_kernels.gpu.load import Kernel
from tests.gpu.speculate_case import ROWS, Step


class Rig:
    """Kernels of one model, by part. After a run `ns` holds each CTA's (begin, end)."""

    def __init__(self, kernels: dict[str, Kernel], c: Config) -> None:
        self.kernels, self.c = kernels, c

    def launch(self, part: str, tensors: dict[str, torch.Tensor], numbers: dict[str, int]) -> None:
        values = np.zeros(COUNT, np.int64)
        values[Arg.LAYERS] = self.c.shape.layers
        for name, t in tensors.items():
            values[Arg[name]] = t.data_ptr()
        for name, v in numbers.items():
            values[Arg[name]] = v
        table = torch.from_numpy(values).cuda()
        torch.cuda.synchronize()
        self.kernels[part].launch([table.data_ptr()], "q", torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        self.ns = tensors["TIMES"].cpu().numpy()

    def run(self, part: str, step: Step) -> None:
        """Prepare the step, run, put back what the kernel wrote."""
        step.prepare(self.c.ctas, self.c.draft_stride)
        tensors = {n: torch.from_numpy(a).cuda() for n, a in step.arrays.items()}
        self.launch(part, tensors, step.numbers)
        step.arrays = {n: t.cpu().numpy() for n, t in tensors.items()}

    def stamps(self, step: Step) -> np.ndarray:
        at = board.Board.STAMP
        return step.arrays["BOARD"][at : at + 32].view(np.int64)


class Pool:
    """Random bits in the pages of one slot, which lie in any order."""

    def __init__(self, c: Config, positions: int, seed: int, layers: int | None = None) -> None:
        s = c.shape
        gen = torch.Generator("cuda").manual_seed(seed)
        n = -(-positions // PAGE)
        self.c, self.layers = c, layers or s.layers
        self.pages = torch.randperm(n + 1, generator=gen, device="cuda")[:n].int()
        shape = (n + 1, s.layers, s.kv_heads, 2, PAGE, s.head_dim)
        bits = torch.randint(-(1 << 15), 1 << 15, shape, generator=gen, device="cuda")
        self.bits = bits.short()
        self.times = torch.zeros(c.ctas, 2, dtype=torch.int64, device="cuda")

    def rows(self) -> torch.Tensor:
        """[layers, kv heads, K or V, positions, head_dim], pieces where they belong."""
        plain = kv_layout.swizzle_rows(self.bits[self.pages.long()])
        n, layers, heads, two, page, dim = plain.shape
        return plain.permute(1, 2, 3, 0, 4, 5).reshape(layers, heads, two, n * page, dim)

    def move(self, rig: Rig, position: int, accepted: Sequence[int]) -> None:
        """One DRAFT step's compaction; position: of its anchor."""
        words = board.make_board()
        words[Desc.POSITION], words[Desc.CONTEXT] = position, len(accepted)
        words[Desc.ACCEPTED : Desc.ACCEPTED + len(accepted)] = accepted
        tensors = dict(
            BOARD=torch.from_numpy(words).cuda(), KV_POOL=self.bits, PAGE_TABLE=self.pages,
            TIMES=self.times,
        )  # fmt: skip
        rig.launch("compact", tensors, dict(LAYERS=self.layers))


def short_paths(rows: int, depth: int) -> list[tuple[int, ...]]:
    """All paths from the root of `depth` rows or fewer below it, over `rows` rows."""
    return [
        (0, *path) for n in range(depth + 1) for path in itertools.combinations(range(1, rows), n)
    ]


def random_paths(n: int, rows: int, seed: int) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(n):
        depth = int(rng.integers(1, ROWS))
        path = np.sort(rng.permutation(np.arange(1, rows))[:depth])
        out.append((0, *(int(r) for r in path)))
    return out
