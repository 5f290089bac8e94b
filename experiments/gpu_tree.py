"""Microseconds of ranks, tree and compaction on the GPU, each alone on the kernel's CTAs:

    python -m tests.gpu.speculate_kernels DIR            # anywhere
    python -m experiments.gpu_tree DIR RESULT.json       # needs a GPU, torch, numba; no DSL

Random logits of a normal distribution, every result already there, logits in L2. A figure is the
median over launches of the time from the first consumer warp's begin to the last one's end, of the
CTA that takes longest; a launch runs the code once, as a step does.
"""

import json
import pathlib
import statistics

import numpy as np
import torch

from cute_kernels.gpu.config import product
from cute_kernels.gpu.load import Kernel
from experiments.common import of_kernels
from experiments.provenance import provenance
from tests.gpu.speculate_case import Step
from tests.gpu.speculate_rig import Pool, Rig

LAUNCHES = 25
RANKS = (  # model, columns of its drafter's head
    ("smollm2-135m", 49152),
    ("smollm2-135m", 16384),
    ("llama-3.1-8b", 128256),
    ("qwen3-8b", 151936),
)
PATHS = {"chain": range(8), "one leaves": (0, 1, 2, 3, 4, 5, 6, 9), "all leave": range(0, 32, 2)}


def spread(samples: list[float]) -> dict[str, float]:
    samples = sorted(samples)
    return {"median": statistics.median(samples), "least": samples[0], "most": samples[-1]}


def time_step(rig: Rig, part: str, step: Step) -> dict[str, float]:
    step.prepare(rig.c.ctas, rig.c.draft_stride)
    tensors = {n: torch.from_numpy(a).cuda() for n, a in step.arrays.items()}
    board, out = tensors["BOARD"].clone(), []
    for _ in range(LAUNCHES):
        tensors["BOARD"].copy_(board)
        tensors["DRAFT_LOGITS"].nan_to_num().sum()  # into L2
        rig.launch(part, tensors, step.numbers)
        out.append(float((rig.ns[:, 1] - rig.ns[:, 0]).max()) / 1000)
    return spread(out)


def main(folder: pathlib.Path, target: pathlib.Path) -> None:
    torch.zeros(1, device="cuda")
    rng, report = np.random.default_rng(1), {"where": provenance()}

    def rig_of(model: str) -> Rig:
        parts = ("compact", "rank", "tree", "both")
        return Rig({p: Kernel.read(folder / f"{p}-{model}") for p in parts}, product(model))

    for model, columns in RANKS:
        rig = rig_of(model)
        logits = rng.normal(0, 2, (8, columns)).astype(np.float32)
        for budget in (16, 64, 127):
            step = Step(logits, budget=budget, depth=7)
            name = f"rank {model} {columns} columns, {budget} candidates"
            report[name] = time_step(rig, "rank", step)
        report[f"both {model} {columns} columns, 63 nodes"] = time_step(
            rig, "both", Step(logits, budget=63, depth=7)
        )
    rig = rig_of("smollm2-135m")
    logits = rng.normal(0, 2, (16, 16384)).astype(np.float32)
    for depth in (7, 15):
        rig.run("rank", ranked := Step(logits, budget=127, depth=depth))
        for budget in (7, 15, 31, 63, 127):
            step = Step(logits, budget=budget, depth=depth, ranked=ranked.arrays["RANKED"])
            report[f"tree {budget} nodes, depth {depth}"] = time_step(rig, "tree", step)
    equal = Step(np.zeros((8, 16384), np.float32), budget=127, depth=7)
    rig.run("rank", equal)
    step = Step(equal.logits, budget=63, depth=7, ranked=equal.arrays["RANKED"])
    report["tree 63 nodes, depth 7, all equal"] = time_step(rig, "tree", step)
    report["rank smollm2-135m 16384 columns, all equal, 127 candidates"] = time_step(
        rig, "rank", equal
    )
    for model in ("smollm2-135m", "llama-3.1-8b"):
        rig, pool = rig_of(model), Pool(product(model), 1000, seed=1)
        for name, path in PATHS.items():
            out = []
            for _ in range(LAUNCHES):
                pool.bits.view(-1)[: 1 << 24].clone()
                pool.move(rig, 900, list(path))
                out.append(float((rig.ns[:, 1] - rig.ns[:, 0]).max()) / 1000)
            report[f"compact {model} {name} ({len(list(path))} rows)"] = spread(out)
    for name, value in report.items():
        if name != "where":
            low, high = value["least"], value["most"]
            print(f"{name:62s} {value['median']:7.2f} us ({low:.2f} .. {high:.2f})")
    target.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    asked = of_kernels(__doc__, "gpu_tree")
    main(asked.folder, asked.result)
