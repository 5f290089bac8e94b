"""Microseconds of the decision on the GPU, alone on the kernel's CTAs:

    python -m tests.gpu.decide_kernels DIR               # anywhere
    python -m experiments.gpu_decide DIR RESULT.json     # needs a GPU, torch; no DSL

Two kinds of rows: like a model's, 300 likely tokens far above a normal distribution of deviation 2
(top-p 0.9 keeps up to about 50), and open ones, where the distribution is wide enough to hold most
of the mass (up to 10,000). Every result is already there, logits are in L2. A figure is the median
over launches of the time that the slowest CTA takes for its row.
"""

import itertools
import json
import pathlib
import statistics

import numpy as np
import torch

from cute_kernels.gpu.config import product
from cute_kernels.gpu.load import Kernel
from experiments.common import of_kernels
from experiments.provenance import provenance
from host.wire import SAMPLING
from tests.gpu.decide_rig import Rig

LAUNCHES = 25
MODELS = ("smollm2-135m", "llama-3.2-1b", "qwen3-8b")
ROWS = (1, 16, 64)
HOW = {
    "greedy": dict(),
    "greedy, 20 alternatives": dict(logprobs=20),
    "greedy, biases": dict(bias_count=3),
    "T=1": dict(temperature=1),
    "T=1, top-k 50": dict(temperature=1, top_k=50),
    "T=1, top-p 0.9": dict(temperature=1, top_p=0.9),
    "T=1, min-p 0.05": dict(temperature=1, min_p=0.05),
    "T=0.7, top-k 50, top-p 0.9": dict(temperature=0.7, top_k=50, top_p=0.9),
    "T=1, top-k 5000": dict(temperature=1, top_k=5000),
}


def make_rows(n: int, vocab: int, lead: float, deviation: float) -> np.ndarray:
    rng = np.random.default_rng(1)
    z = rng.standard_normal((n, vocab)) * deviation
    for row in z:
        likely = rng.choice(vocab, 300, replace=False)
        row[likely] += lead - 2.2 * np.log(1 + np.arange(300))
    return z.astype(np.float32)


KINDS = {"like a model's": dict(lead=18.0, deviation=2.0), "open": dict(lead=14.0, deviation=2.5)}


def main(folder: pathlib.Path, target: pathlib.Path) -> None:
    torch.zeros(1, device="cuda")
    report: dict = {"where": provenance(), "us": {}}
    for model, kind in itertools.product(MODELS, KINDS):
        rig = Rig(Kernel.read(folder / f"decide-{model}"), product(model))
        for name, values in HOW.items():
            record = np.zeros(1, SAMPLING)
            record["top_p"] = 1
            for field, value in values.items():
                record[field] = value
            record["bias_ids"][0, :3], record["bias"][0, :3] = (1, 2, 3), (1, -1, 2)
            line = {}
            for n in ROWS:
                rows = make_rows(n, rig.c.shape.vocab, **KINDS[kind])
                rig.prepare(rows, record, np.arange(n) + 100)
                samples = []
                for _ in range(LAUNCHES):
                    rig.logits[:n].nan_to_num().sum()  # into L2
                    rig.launch()
                    samples.append(rig.microseconds())
                line[n] = statistics.median(samples[3:])
            report["us"].setdefault(f"{model}, {kind}", {})[name] = line
            figures = "  ".join(f"{n} rows {us:6.1f}" for n, us in line.items())
            print(f"{model:14s} {kind:14s} {name:28s} {figures} us", flush=True)
    target.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    asked = of_kernels(__doc__, "gpu_decide")
    main(asked.folder, asked.result)
