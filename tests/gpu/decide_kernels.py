"""Decisions:  python -m tests.gpu.decide_kernels DIR [arch]   builds the kernels anywhere."""

import dataclasses
import json
import pathlib
import sys
from functools import partial

from cute_kernels.gpu.config import product

# vocabularies of 49,152, 5,003 (not whole vectors), 128,256 and 151,936; 6 and 8 consumer warps
MODELS = ("smollm2-135m", "odd-768", "llama-3.2-1b", "qwen3-8b")


def main(folder: pathlib.Path, arch: str = "sm_90a") -> None:
    from cute_kernels.gpu import build
    from cute_kernels.gpu.speculate_kernel import make_speculate

    folder.mkdir(parents=True, exist_ok=True)
    for model in MODELS:
        c = product(model, arch)
        what = f"decide {sorted(dataclasses.asdict(c).items())}"
        make = partial(make_speculate, c, "decide")
        a = build.build(what, make, arch, folder.parent / "cache")
        (folder / f"decide-{model}.cubin").write_bytes(a.cubin)
        (folder / f"decide-{model}.json").write_text(json.dumps(a.manifest))
        print(f"decide-{model}: {a.manifest['reg']} registers, {a.manifest['stack']} B of stack")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), *sys.argv[2:])
