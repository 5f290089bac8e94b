"""Microseconds of a prompt's chunk on the GPU, whole and by part, random weights:

    python -m tests.gpu.kernels DIR NAME ...               # anywhere: builds prompt-MODEL-PART
    python -m experiments.gpu_prompt DIR RESULT.json [MODEL ...]     # a GPU and torch; no DSL

A chunk's time is that of one launch of the segment, by CUDA events, the launch included; a part's
is that of a kernel which runs nothing else in every layer, less the grid barriers between phases,
per layer, of 256 and of 32 rows. Median of ROUNDS, least and largest beside it. Of models with more
than 3 GB of layers 8 layers run, and the chunk's time is scaled to all.
"""

import dataclasses
import functools
import json
import pathlib
import statistics

import torch

from cute_kernels.gpu.config import SHAPES, product
from cute_kernels.gpu.load import Kernel
from cute_kernels.gpu.prompt_plan import PARTS
from experiments.common import of_kernels
from experiments.provenance import provenance
from tests.gpu.prompt_case import Model, PromptCase

CASES = ((256, 0), (256, 1024), (256, 16384), (64, 0))  # rows, position
ROUNDS = 9
PREDICTED_US = {  # of 256 rows at position 0, written down before the code was first timed
    "smollm2-135m": 1600,
    "llama-3.2-1b": 3000,
    "llama-3.1-8b": 14600,
    "qwen3-8b": 14200,
    "odd-960": 570,
    "odd-768": 260,
}


def times_us(case: PromptCase, kernel: Kernel, rows: int, position: int, first: int, last: int):
    """[us] of ROUNDS launches, two more before them."""
    out = []
    for _ in range(ROUNDS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        stream = torch.cuda.current_stream().cuda_stream
        kernel.launch([case.args.data_ptr(), rows, position, first, last], "qiiii", stream)
        end.record()
        torch.cuda.synchronize()
        out.append(start.elapsed_time(end) * 1e3)
    return out[2:]


def spread(us: list[float], scale: float = 1.0) -> dict[str, float]:
    us = [t * scale for t in us]
    return {"us": statistics.median(us), "us_min": min(us), "us_max": max(us)}


def measure(load, name: str) -> dict:
    s = SHAPES[name]
    shape = dataclasses.replace(s, layers=8) if s.hidden >= 4096 else s
    c, scale = product(shape), s.layers / shape.layers
    case = PromptCase(c, Model(c, seed=3), max(p + n for n, p in CASES), seed=4)
    last = 4 * c.shape.layers
    row: dict = {"predicted us": PREDICTED_US[name], "layers run": shape.layers, "chunks": []}
    for rows, position in CASES:
        us = times_us(case, load(f"prompt-{name}-all"), rows, position, 0, last)
        row["chunks"].append({"rows": rows, "position": position, **spread(us, scale)})
    # phases without work, from the second on (nothing is embedded): launch and barriers
    empty = load(f"prompt-{name}-embed")
    launch, idle = (statistics.median(times_us(case, empty, 256, 0, 1, n)) for n in (1, last))
    row["us a layer"] = {"barrier": (idle - launch) / (last - 1)}
    for rows in (256, 32):
        for part in PARTS[1:]:
            us = times_us(case, load(f"prompt-{name}-{part}"), rows, 0, 0, last)
            us_layer = (statistics.median(us) - idle) / shape.layers
            row["us a layer"][f"{part} {rows}"] = us_layer
    return row


def line(name: str, row: dict) -> str:
    chunks = [f"{c['rows']} at {c['position']}: {c['us']:.0f} us" for c in row["chunks"]]
    parts = [f"{part} {us:.1f}" for part, us in row["us a layer"].items()]
    return f"{name:13s} {', '.join(chunks)} (predicted {row['predicted us']}); {', '.join(parts)}"


def main(folder: pathlib.Path, target: pathlib.Path, names: list[str]) -> None:
    load = functools.cache(lambda name: Kernel.read(folder / name))
    results: dict = {"provenance": provenance(), "models": {}}
    for name in names or SHAPES:
        row = results["models"][name] = measure(load, name)
        print(line(name, row), flush=True)
        target.write_text(json.dumps(results, indent=1))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    asked = of_kernels(__doc__, "gpu_prompt", "names")
    torch.zeros(1, device="cuda")  # makes the context that kernels are loaded into
    main(asked.folder, asked.result, asked.names)
