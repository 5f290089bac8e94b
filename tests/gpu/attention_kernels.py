"""Attention kernels:  python -m tests.gpu.attention_kernels DIR   builds them on any machine.

Every preset, and what no preset has: one warp a query head, several rows merged by one CTA.
"""

import dataclasses
import json
import pathlib
import sys

from cute_kernels.gpu.config import LLAMA_1B, QWEN3_8B, SHAPES, Config, Shape, product

LAYERS = 16  # of a page, so that figures can be taken over many layers


def _config(shape: Shape | str, **changes) -> Config:
    shape = SHAPES[shape] if isinstance(shape, str) else shape
    layers = dataclasses.replace(shape, layers=LAYERS)
    return product(layers, **changes)


SEVEN = Shape("seven", 1792, 2048, 28, 4, 64, 4096, LAYERS)  # seven query heads on eight warps
ATTENTION: dict[str, Config] = {f"attention-{n}": _config(n) for n in SHAPES} | {
    "attention-seven": Config(SEVEN, stages=10),
    "attention-splits4": _config(LLAMA_1B, splits=4),
    "attention-wide-splits8": _config(QWEN3_8B, splits=8),
}
TIMED = {
    f"{n}-t": dataclasses.replace(ATTENTION[n], timing=True)
    for n in ("attention-smollm2-135m", "attention-llama-3.2-1b", "attention-llama-3.1-8b")
}


def main(folder: pathlib.Path) -> None:
    from cute_kernels.gpu import build
    from cute_kernels.gpu.attention_kernel import make_attention

    folder.mkdir(parents=True, exist_ok=True)
    for name, c in (ATTENTION | TIMED).items():
        what = f"attention {sorted(dataclasses.asdict(c).items())}"
        a = build.build(what, lambda c=c: make_attention(c), c.arch, folder.parent / "cache")
        (folder / f"{name}.cubin").write_bytes(a.cubin)
        (folder / f"{name}.json").write_text(json.dumps(a.manifest))
        m = a.manifest
        print(f"{name}: {m['reg']} registers, {m['stack']} B of stack, {m['smem']} B shared")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
