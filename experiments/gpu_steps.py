"""Microseconds of a decode step on the GPU, by the service warp's own clock, random weights:

    python -m tests.gpu.kernels DIR NAME ...               # anywhere: builds timed-MODEL
    python -m experiments.gpu_steps DIR RESULT.json        # needs a GPU and torch; no DSL

Steps run free, each taking its token from the one before, from position CONTEXT on; the figure is
the median distance between two steps' results, launches of STEPS steps, the first ones left out.
Several rows are a chain of speculated positions; none is accepted, so the next step begins one
position on.
"""

import json
import pathlib
import statistics
from typing import Any

import numpy as np
import torch

from cute_kernels.gpu.config import Config
from cute_kernels.gpu.load import Kernel
from cute_kernels.gpu.script import decode_step
from cute_kernels.gpu.tiles import step_bytes
from experiments.common import figure, of_kernels
from experiments.provenance import provenance
from tests.gpu.kernels import timed
from tests.gpu.model import Context, Model
from tests.gpu.rig import Rig

CASES = ((1024, 1), (1024, 4), (1024, 8), (1024, 16), (16384, 1))  # context, rows
STEPS, FIRST, ROUNDS = 50, 5, 3


def step_us(rig: Rig, context: int, rows: int) -> dict[str, Any]:
    """Of the rounds' medians the least, the median and the largest, and all of them."""
    layers = rig.c.shape.layers
    steps = [
        decode_step([7] * rows, context + i * (rig.ctx is not None), layers, free=i > 0)
        for i in range(STEPS)
    ]
    rounds = []
    for _ in range(ROUNDS):
        times = np.diff(rig.run(steps)[:, 0]["ns"])[FIRST:]
        rounds.append(float(np.median(times)) / 1e3)
    found = {"us": statistics.median(rounds), "us_min": min(rounds), "us_max": max(rounds)}
    return found | {"rounds": rounds}


def phases(rig: Rig) -> dict[str, list[float]]:
    """Of the last step, us from a CTA's beginning of a phase until it has its activations, is done
    with its own tiles, is done; the mean of CTAs and layers. Attention stands before `o`."""
    t = rig.times.double().cpu() / 1e3
    n, out = t.shape[1] - 1, {}
    for i, kind in enumerate(("qkv", "o", "gu", "down", "lm")):
        v = t[:, i:n:4] if kind != "lm" else t[:, n:]
        d = (v - v[..., :1]).clamp(min=0)
        out[kind] = [round(float(d[..., j].mean()), 2) for j in (1, 2, 3)]
    return out


def run(folder: pathlib.Path, name: str, c: Config, packed: dict) -> dict:
    row: dict = {"config": c.tag, "weights GB": step_bytes(c) / 1e9, "steps": []}
    for context, rows in CASES:
        ctx = Context(c.shape, context, STEPS + 16, 4) if c.attention else None
        rig = Rig(Kernel.read(folder / name), c, packed, ctx)
        us = step_us(rig, context, rows)
        row["steps"].append({"context": context, "rows": rows, **us})
        rate = step_bytes(c) / us["us"] / 1e6
        print(
            f"{name:30s} context {context:6d} rows {rows:2d} {us['us']:8.1f} us"
            f" ({us['us_min']:.1f} to {us['us_max']:.1f})  weights at {rate:.2f} TB/s",
            flush=True,
        )
        if c.timing and rows == 1 and "phases" not in row:
            row["phases"] = phases(rig)
            print(row["phases"], flush=True)
    return row


def main(folder: pathlib.Path, target: pathlib.Path, names: list[str]) -> None:
    results: dict = {"provenance": provenance(), "figures": {}, "kernels": {}}
    packed: dict[tuple, dict] = {}  # of one model at a time
    for name, c in timed().items():
        if (names and name not in names) or not (folder / f"{name}.json").exists():
            continue
        key = (c.shape, c.attention)
        if key not in packed:
            packed.clear()
            torch.cuda.empty_cache()
            packed[key] = Model(c.shape, seed=3).packed(c)
        results["kernels"][name] = row = run(folder, name, c, packed[key])
        for step in row["steps"]:
            label = f"{name}, {step['rows']} rows at {step['context']}, us"
            results["figures"][label] = figure(step["rounds"])
        target.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    asked = of_kernels(__doc__, "gpu_steps", "names")
    torch.zeros(1, device="cuda")  # makes the context that kernels are loaded into
    main(asked.folder, asked.result, asked.names)
