"""Build the kernels of the study, on any machine:  python -m experiments.handoffs.build DIR [name ...]

Writes DIR/<name>.cubin and .json; run.py reads them on the machine with the GPU.
"""

import json
import pathlib
import sys
import time

from cute_kernels.gpu import build
from experiments.handoffs.variants import VARIANTS


def main(folder: pathlib.Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or VARIANTS:
        start = time.perf_counter()
        a = build.build_step(VARIANTS[name], folder.parent / "cache")
        (folder / f"{name}.cubin").write_bytes(a.cubin)
        (folder / f"{name}.json").write_text(json.dumps(a.manifest))
        m = a.manifest
        print(
            f"{name:20s} {time.perf_counter() - start:5.1f} s  {m['reg']} registers,"
            f" {m['stack']} B stack, {m['local']} B local, {m['smem']} B shared",
            flush=True,
        )


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
