"""Check and time the built kernels:  python -m experiments.handoffs.run DIR RESULT.json [name ...]

Every variant is checked against torch in the same run, then all variants of a shape are timed in
turn, `ROUNDS` times over, and the median of the rounds is reported.
"""

import json
import pathlib
import statistics
import sys
import time
import traceback

import torch

from cute_kernels.gpu.config import KINDS, Config
from cute_kernels.gpu.load import Kernel
from cute_kernels.gpu.tiles import step_bytes
from experiments.handoffs.context import Context, random_tree
from experiments.handoffs.graph import PhaseGraph
from experiments.handoffs.skeleton import Skeleton, Weights
from experiments.handoffs.variants import CONTEXTS, GRAPHS, VARIANTS
from experiments.provenance import provenance

ROUNDS = 5


def config_of(name: str) -> Config:
    return VARIANTS[name] if name in VARIANTS else GRAPHS[name][0]


def make(folder: pathlib.Path, name: str, weights: Weights, row: dict) -> Skeleton:
    c = config_of(name)
    if name in GRAPHS:
        kernels = {p: Kernel.read(folder / f"{name}-{p}") for p in KINDS}
        return PhaseGraph(kernels, c, weights)
    kernel = Kernel.read(folder / name)
    row["clusters"] = kernel.max_clusters() if c.cluster > 1 else None
    context = None
    if name in CONTEXTS:
        tree = random_tree(c.rows, seed=5)
        context = Context.random(c.shape, CONTEXTS[name], tree, seed=6)
    return Skeleton(kernel, c, weights, context)


def run(folder: pathlib.Path, names: list[str]) -> dict:
    results: dict = {"provenance": provenance(), "seed": time.time_ns() % 1000003, "variants": {}}
    shapes = {config_of(n).shape.name: config_of(n).shape for n in names}
    for shape in shapes.values():
        weights, ready = Weights(shape, results["seed"]), {}
        for name in (n for n in names if config_of(n).shape == shape):
            c, row = config_of(name), {}
            results["variants"][name] = row
            try:
                sk = make(folder, name, weights, row)
                row.update(config=c.tag, check=sk.check())
            except Exception as e:
                row["error"] = f"{type(e).__name__}: {e}"
                traceback.print_exc()
                print(f"{name:20s} {row['error']}", flush=True)
                if "CUDA" in str(e) or "failed" in str(e):
                    return results
                continue
            if c.timing:
                row["skew us"], row["lateness us"] = sk.skew(), sk.lateness()
            ready[name] = sk
            errors = {k: max(v.values()) for k, v in row["check"].items() if k.startswith("rel")}
            equal = [v for k, v in row["check"].items() if k.endswith("equal")]
            print(f"{name:20s} {errors} bit-equal {equal}", flush=True)
        times: dict[str, list[float]] = {n: [] for n in ready}
        for _ in range(ROUNDS):
            for name, sk in ready.items():
                times[name].append(sk.step_us())
        for name, us in times.items():
            row, mid = results["variants"][name], statistics.median(us)
            row.update(us=mid, us_min=min(us), us_max=max(us))
            row["weights TB/s"] = step_bytes(config_of(name)) / mid / 1e6
    return results


def main() -> None:
    folder, target = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    names = sys.argv[3:] or [
        n
        for n in [*VARIANTS, *GRAPHS]
        if (folder / f"{n}.json").exists() or (folder / f"{n}-lm.json").exists()
    ]
    results = run(folder, names)
    target.write_text(json.dumps(results, indent=1))
    for name, row in results["variants"].items():
        if "us" in row:
            print(
                f"{name:20s} {row['us']:7.1f} us/step ({row['us_min']:.1f} to {row['us_max']:.1f})"
                f"  {row['weights TB/s']:.2f} TB/s  ok {row['check']['ok']}"
            )
        for what, three in row.get("skew us", {}).items():
            print(f"    {what:15s} {three}")


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = False
    main()
