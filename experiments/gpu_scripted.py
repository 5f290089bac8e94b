"""The GPU kernel reading given texts token by token: teacher forcing through a script of steps.

Used by the experiments that compare decoding with a reference. The kernel is the engine's but for
its service warp, which takes the steps from a list; weights are packed as the engine packs them.

    python -m experiments.gpu_scripted DIR     # anywhere: builds SmolLM2's, for --kernels DIR
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cute_kernels.gpu import build
from cute_kernels.gpu.arguments import COUNT, Arg
from cute_kernels.gpu.board import MAX_ROWS, make_board
from cute_kernels.gpu.buffers import step_buffers
from cute_kernels.gpu.config import PAGE, Config, product
from cute_kernels.gpu.load import Kernel
from cute_kernels.gpu.script import RECORD, as_script, decode_step
from megadecode.cuda_kernel import choose_config, find_gpu, kernel_folder
from megadecode.cuda_weights import pack_model
from megadecode.models.weights import Weights

STRIDE = 32
"""Every so many steps the logits are kept as well (they are the last step's of a launch)."""


@dataclass
class Reading:
    """tokens: [steps] the likeliest token of every step; logits: [vocab] fp32 by step."""

    tokens: np.ndarray
    logits: dict[int, torch.Tensor]


class Scripted:
    """A model with real weights on the scripted kernel, one sequence of up to `ctx` positions."""

    def __init__(self, model: Weights, ctx: int, kernels: str | Path | None = None) -> None:
        self.c: Config = choose_config(model.config, find_gpu())
        folders = [kernel_folder()] if kernels is None else [Path(kernels), kernel_folder()]
        name = build.kernel_name(self.c, "script")
        found = build.find(name, self.c.arch, folders)
        if found is None:
            found = build.build_kernel(self.c, "script", kernel_folder())
        self.kernel = Kernel(found.cubin, found.manifest)
        self.layers, self.vocab = model.config.layers, model.config.vocab
        pages = -(-ctx // PAGE) + 1
        self.memory = pack_model(model.config, model.tensor, self.c, ctx + PAGE)
        blocks = pages * self.layers * model.config.kv_heads
        sizes = step_buffers(self.c) | {"KV_POOL": blocks * self.c.kv_block_bytes}
        self.memory |= {
            name: torch.full((size,), 255, dtype=torch.uint8, device="cuda")
            for name, size in sizes.items()
        }
        # pages in another order than positions: nothing may depend on it
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(1))
        self.memory["PAGE_TABLE"] = order.int().cuda()
        self.memory["TOKENS"] = torch.zeros(ctx + 256, dtype=torch.int32, device="cuda")
        self.memory["BOARD"] = torch.from_numpy(make_board(0, 0)).cuda()

    def run(self, steps: Sequence[np.ndarray]) -> np.ndarray:
        """One launch; RECORD [steps, MAX_ROWS]."""
        script = torch.from_numpy(as_script(steps)).cuda()
        out = torch.zeros(len(steps) * MAX_ROWS * RECORD.itemsize, dtype=torch.uint8, device="cuda")
        table = np.zeros(COUNT, np.int64)
        table[Arg.LAYERS], table[Arg.SCRIPT_STEPS] = self.layers, len(steps)
        tensors = dict(self.memory, SCRIPT=script, SCRIPT_OUT=out)
        for name, tensor in tensors.items():
            table[Arg[name]] = tensor.data_ptr()
        arguments = torch.from_numpy(table).cuda()
        torch.cuda.synchronize()
        self.kernel.launch([arguments.data_ptr()], "q", torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        return out.cpu().numpy().view(RECORD).reshape(len(steps), MAX_ROWS)

    def logits(self) -> torch.Tensor:
        """[vocab] fp32 of the last step's first row."""
        flat: Any = self.memory["LOGITS"].view(torch.float32)
        return flat[: self.vocab].clone()

    def read(self, ids: Sequence[int]) -> Reading:
        """One text, a decode step of one row for each token."""
        tokens = np.zeros(len(ids), np.int64)
        kept: dict[int, torch.Tensor] = {}
        for start in range(0, len(ids), STRIDE):
            chunk = list(enumerate(ids))[start : start + STRIDE]
            steps = [decode_step([token], at, self.layers) for at, token in chunk]
            records = self.run(steps)[:, 0]
            if records["flags"].any():
                raise ValueError(f"NaN or +inf among the logits of positions {start} on")
            tokens[start : start + len(chunk)] = records["token"]
            kept[start + len(chunk) - 1] = self.logits()
        return Reading(tokens, kept)


def read_through(
    model: Weights, texts: Sequence[Sequence[int]], kernels: str | Path | None = None
) -> Iterator[Reading]:
    """Every text in turn."""
    scripted = Scripted(model, max(map(len, texts)) + 1, kernels)
    for ids in texts:
        yield scripted.read(ids)


if __name__ == "__main__":
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("folder", type=Path, help="where SmolLM2's kernel goes")
    build.build_kernel(product("smollm2-135m"), "script", made.parse_args().folder)
