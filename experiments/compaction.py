"""Moving accepted rows' keys and values to their places.

    python -m experiments.compaction

Three ways, us: `a copy a row and layer` from Python, as a plain loop does it; `all layers at once`:
one gather and one scatter for keys and values each, in a captured graph, as the baselines here do;
`nothing`: the same graph where the path is a chain already, which a kernel can skip and a graph
cannot. The megakernel's own figure comes from its phase stamps.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from cute_kernels.gpu.config import SHAPES
from experiments.common import need_gpu, parser, save
from experiments.kv_fragmentation import graph_us
from experiments.marshaling import wall_us

MODELS = ("smollm2-135m", "llama-3.2-1b", "llama-3.1-8b")
FIRST = 1024  # position of the path's first row
PATH = (0, 2, 5, 9)  # rows of an accepted path: four tokens, three of them to be moved


def move(cache: torch.Tensor, path: torch.Tensor) -> None:
    """All layers at once: reads everything, then writes. cache: [2, layers, kv heads, rows, d]."""
    there = FIRST + torch.arange(len(path), device=path.device)
    for half in cache:
        half[:, :, there] = half[:, :, FIRST + path]


def one_by_one(cache: torch.Tensor) -> None:
    """Ascending, so that no row is overwritten before it has moved."""
    for half in cache:
        for layer in half:
            for k, row in enumerate(PATH):
                if row != k:
                    layer[:, FIRST + k] = layer[:, FIRST + row]


def case(model: str, rounds: int) -> dict[str, Any]:
    s = SHAPES[model]
    size = 2, s.layers, s.kv_heads, 2 * FIRST, s.head_dim
    cache = torch.randn(size, device="cuda").bfloat16()
    path, chain = torch.tensor(PATH, device="cuda"), torch.arange(len(PATH), device="cuda")
    first, second = cache.clone(), cache.clone()
    move(first, path)
    one_by_one(second)
    if not torch.equal(first, second):
        raise SystemExit(f"{model}: the two ways differ; the figures are void")
    us = {
        "a copy a row and layer": wall_us(partial(one_by_one, cache), rounds),
        "all layers at once": graph_us(partial(move, cache, path), rounds),
        "nothing": graph_us(partial(move, cache, chain), rounds),
    }
    moved = 2 * s.layers * s.kv_heads * s.head_dim * 2 * (len(PATH) - 1)
    return {"model": model, "us": us, "bytes_moved": moved}


def main() -> None:
    """Command line."""
    args = parser(__doc__, "compaction").parse_args()
    need_gpu("compaction")
    cases = []
    for model in MODELS:
        cases.append(case(model, 5 if args.quick else 20))
        cells = "  ".join(f"{k}: {v:.1f} us" for k, v in cases[-1]["us"].items())
        print(f"{model:14s} {cases[-1]['bytes_moved']} bytes  {cells}", flush=True)
    save("compaction", args.json, "cuda", {"path": PATH, "cases": cases}, args.quick)


if __name__ == "__main__":
    main()
