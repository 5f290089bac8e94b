"""Attention kernels:  python -m tests.gpu.attention_kernels DIR [name ...]   builds them anywhere.

Every preset, and what no preset has: one warp a query head, several rows merged by one CTA. Each in
two forms, the target's ("attention-...") and the drafter's ("draft-..."); some again for figures.
"""

import dataclasses
import json
import pathlib
import sys
from functools import partial

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
DRAFT = {n.replace("attention", "draft", 1): c for n, c in ATTENTION.items()}
FIGURES = ("smollm2-135m", "llama-3.2-1b", "llama-3.1-8b")
TIMED = {
    f"attention-{n}-t": dataclasses.replace(ATTENTION[f"attention-{n}"], timing=True)
    for n in FIGURES
}
# copies of KV in flight: the product's are those of ring.py for weights; and with a deeper queue
FLIGHTS = {"4-8": dict(inflight=4, hungry=8), "8-9": dict(inflight=8, hungry=9)}
DEEPER = {
    f"attention-{n}-{name}": dataclasses.replace(ATTENTION[f"attention-{n}"], **fields)
    for n in FIGURES
    for name, fields in FLIGHTS.items()
}
# the target's form again with fewer parts of the context, and a stage less, for a part then merges
# more rows: experiments/verify_attention.py
SPLITS = {
    f"attention-{n}-splits{splits}": dataclasses.replace(c, splits=splits, stages=c.stages - 1)
    for n in FIGURES
    for c in [ATTENTION[f"attention-{n}"]]
    for splits in (4, 8, 16)
    if splits < c.splits
}
ALL = ATTENTION | DRAFT | TIMED | DEEPER | SPLITS


def main(folder: pathlib.Path, names: list[str]) -> None:
    from cute_kernels.gpu import build
    from cute_kernels.gpu.attention_kernel import make_attention

    folder.mkdir(parents=True, exist_ok=True)
    for name in names or ALL:
        c, form = ALL[name], "draft_attention" if name in DRAFT else "attention"
        what = f"{form} {sorted(dataclasses.asdict(c).items())}"
        make = partial(make_attention, c, form)
        a = build.build(what, make, c.arch, folder.parent / "cache")
        (folder / f"{name}.cubin").write_bytes(a.cubin)
        (folder / f"{name}.json").write_text(json.dumps(a.manifest))
        m = a.manifest
        print(f"{name}: {m['reg']} registers, {m['stack']} B of stack, {m['smem']} B shared")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
