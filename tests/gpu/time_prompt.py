"""How long a chunk of a prompt takes, as a table:

    python -m tests.gpu.time_prompt DIR [preset ...]       (tests.gpu.kernels builds DIR)

A line is a preset: us of a whole chunk of 256 rows at position 0 and behind 1,024 positions, of 64
rows, and what was predicted for the first before it was measured; then us a layer of every part and
of a grid barrier. By CUDA events around launches, minimum of five; the launch itself is in the
chunk's time. The parts' times are those of kernels of their own, less the barriers between phases.
Of models with more than 16 layers of 100 MB, 8 layers run and the chunk's time is scaled.
"""

import dataclasses
import functools
import pathlib
import sys

import torch

from cute_kernels.gpu.config import SHAPES, product
from cute_kernels.gpu.load import Kernel
from cute_kernels.gpu.prompt_plan import PARTS
from tests.gpu.prompt_case import Model, PromptCase

PREDICTED_US = {
    "smollm2-135m": 1600,
    "llama-3.2-1b": 3000,
    "llama-3.1-8b": 14600,
    "qwen3-8b": 14200,
    "odd-960": 570,
    "odd-768": 260,
}


def shape_of(name):
    s = SHAPES[name]
    return dataclasses.replace(s, layers=min(s.layers, 8) if s.hidden == 4096 else s.layers)


def us(case, kernel, rows, position, first, last):
    best = float("inf")
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        stream = torch.cuda.current_stream().cuda_stream
        kernel.launch([case.args.data_ptr(), rows, position, first, last], "qiiii", stream)
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) * 1e3)
    return best


def measure(load, name):
    c = product(shape_of(name))
    case = PromptCase(c, Model(c, seed=3), 1024 + 256, seed=4)
    layers, scale = c.shape.layers, SHAPES[name].layers / c.shape.layers
    whole = load(f"prompt-{name}-all")
    chunks = {
        f"{rows} rows at {position}": us(case, whole, rows, position, 0, 4 * layers) * scale
        for rows, position in ((256, 0), (256, 1024), (64, 0))
    }
    # phases without work, from the second on (nothing is embedded): the launch and barriers
    empty = load(f"prompt-{name}-embed")
    launch = us(case, empty, 256, 0, 1, 1)
    idle = us(case, empty, 256, 0, 1, 4 * layers)
    parts = {"barrier": (idle - launch) / (4 * layers - 1)}
    for part in PARTS[1:]:
        t = us(case, load(f"prompt-{name}-{part}"), 256, 0, 0, 4 * layers)
        parts[part] = (t - idle) / layers
    return chunks, parts


def main(folder: pathlib.Path, presets: list[str]) -> None:
    load = functools.cache(lambda name: Kernel.read(folder / name))
    for name in presets or SHAPES:
        chunks, parts = measure(load, name)
        print(
            f"{name:14s}"
            + ", ".join(f" {what} {t:.0f} us" for what, t in chunks.items())
            + f" (predicted {PREDICTED_US[name]}); a layer: "
            + ", ".join(f"{what} {t:.1f}" for what, t in parts.items()),
            flush=True,
        )
        torch.cuda.empty_cache()


if __name__ == "__main__":
    torch.zeros(1, device="cuda")
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
