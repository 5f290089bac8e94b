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

from cute_kernels.gpu.config import step_bytes
from cute_kernels.gpu.load import Kernel
from experiments.handoffs.skeleton import Skeleton, Weights
from experiments.handoffs.variants import VARIANTS
from experiments.provenance import provenance

ROUNDS = 5


def run(folder: pathlib.Path, names: list[str]) -> dict:
    results: dict = {"provenance": provenance(), "seed": time.time_ns() % 1000003, "variants": {}}
    shapes = {VARIANTS[n].shape.name: VARIANTS[n].shape for n in names}
    for shape in shapes.values():
        weights, ready = Weights(shape, results["seed"]), {}
        for name in (n for n in names if VARIANTS[n].shape == shape):
            c, row = VARIANTS[name], {}
            results["variants"][name] = row
            try:
                kernel = Kernel.read(folder / name)
                row["clusters"] = kernel.max_clusters() if c.cluster > 1 else None
                sk = Skeleton(kernel, c, weights)
                row.update(config=c.tag, check=sk.check())
            except Exception as e:  # noqa: BLE001 - one variant must not hide the others
                row["error"] = f"{type(e).__name__}: {e}"
                traceback.print_exc()
                print(f"{name:20s} {row['error']}", flush=True)
                if "CUDA" in str(e) or "failed" in str(e):
                    return results
                continue
            if c.timing:
                row["skew us"] = sk.skew()
            ready[name] = sk
            print(f"{name:20s} {row['check']}", flush=True)
        times: dict[str, list[float]] = {n: [] for n in ready}
        for _ in range(ROUNDS):
            for name, sk in ready.items():
                times[name].append(sk.step_us())
        for name, us in times.items():
            row, mid = results["variants"][name], statistics.median(us)
            row.update(us=mid, us_min=min(us), us_max=max(us))
            row["weights TB/s"] = step_bytes(VARIANTS[name]) / mid / 1e6
    return results


def main() -> None:
    folder, target = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    names = sys.argv[3:] or [n for n in VARIANTS if (folder / f"{n}.json").exists()]
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
