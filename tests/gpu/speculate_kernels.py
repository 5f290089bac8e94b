"""Ranks, tree, compaction:  python -m tests.gpu.speculate_kernels DIR [name ...]    anywhere."""

import dataclasses
import json
import pathlib
import sys
from functools import partial

from cute_kernels.gpu.config import SHAPES, product

PARTS = ("compact", "rank", "tree", "both")
MODELS = tuple(SHAPES)


def main(folder: pathlib.Path, names: list[str]) -> None:
    from cute_kernels.gpu import build
    from cute_kernels.gpu.speculate_kernel import make_speculate

    folder.mkdir(parents=True, exist_ok=True)
    for model in MODELS:
        c = product(model)
        for part in PARTS:
            name = f"{part}-{model}"
            if names and name not in names:
                continue
            what = f"{part} {sorted(dataclasses.asdict(c).items())}"
            a = build.build(what, partial(make_speculate, c, part), c.arch, folder.parent / "cache")
            (folder / f"{name}.cubin").write_bytes(a.cubin)
            (folder / f"{name}.json").write_text(json.dumps(a.manifest))
            print(f"{name}: {a.manifest['reg']} registers, {a.manifest['stack']} B of stack")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
