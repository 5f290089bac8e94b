"""Build the kernels of the study, on any machine.

    python -m experiments.handoffs.build DIR [name ...]

Writes DIR/<name>.cubin and .json; run.py reads them on the machine with the GPU.
"""

import dataclasses
import json
import pathlib
import sys
import time

from cute_kernels.gpu import build
from experiments.handoffs.variants import GRAPHS, VARIANTS


def keep(folder: pathlib.Path, name: str, a: build.Artefact, start: float) -> None:
    (folder / f"{name}.cubin").write_bytes(a.cubin)
    (folder / f"{name}.json").write_text(json.dumps(a.manifest))
    m = a.manifest
    print(
        f"{name:24s} {time.perf_counter() - start:5.1f} s  {m['reg']} registers,"
        f" {m['stack']} B stack, {m['local']} B local, {m['smem']} B shared",
        flush=True,
    )


def main(folder: pathlib.Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    cache = folder.parent / "cache"
    for name in names or [*VARIANTS, *GRAPHS]:
        start = time.perf_counter()
        if name in VARIANTS:
            keep(folder, name, build.build_step(VARIANTS[name], cache), start)
            continue
        config, blocks = GRAPHS[name]
        for phase, per_sm in blocks.items():
            c = dataclasses.replace(config, phase=phase)
            keep(folder, f"{name}-{phase}", build.build_phase(c, per_sm, cache), start)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
