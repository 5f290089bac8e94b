"""Moving accepted rows' keys and values to their places.

    python -m experiments.compaction [--cubins DIR]

us: `a copy a row and layer` from Python, as a plain loop does it; `all layers at once`:
one gather and one scatter for keys and values each, in a captured graph, as the baselines here do;
`nothing`: the same graph where the path is a chain already, which a kernel can skip and a graph
cannot; `kernel`: the megakernel's own phase alone on its CTAs, by the device's clock, and the same
with nothing to move.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from cute_kernels.gpu.config import SHAPES
from experiments.common import figure, need_gpu, parser, save
from experiments.cubins import MOVES, find
from experiments.kv_fragmentation import graphs_us
from experiments.marshaling import wall_us

MODELS = ("smollm2-135m", "llama-3.2-1b", "llama-3.1-8b")
FIRST = 1024  # position of the path's first row
CLOCK_US = 0.1  # what the device's clock tells apart, and a little
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


def kernel_us(model: str, path: tuple[int, ...], rounds: int, folder: Path) -> list[float]:
    """Of the slowest CTA, from its first warp's begin to its last one's end."""
    from cute_kernels.gpu.config import product
    from cute_kernels.gpu.load import Kernel
    from tests.gpu.speculate_rig import Pool, Rig

    c = product(model)
    rig, pool = Rig({"compact": Kernel.read(folder / f"compact-{model}")}, c), Pool(c, FIRST, 1)
    times = []
    for _ in range(rounds):
        pool.bits.view(-1)[: 1 << 24].clone()  # as a verify step would, over what L2 held
        pool.move(rig, FIRST - 100, list(path))
        times.append(float((rig.ns[:, 1] - rig.ns[:, 0]).max()) / 1000)
    return times


def case(model: str, rounds: int, folder: Path | None) -> dict[str, Any]:
    s = SHAPES[model]
    size = 2, s.layers, s.kv_heads, 2 * FIRST, s.head_dim
    cache = torch.randn(size, device="cuda").bfloat16()
    path, chain = torch.tensor(PATH, device="cuda"), torch.arange(len(PATH), device="cuda")
    first, second = cache.clone(), cache.clone()
    move(first, path)
    one_by_one(second)
    if not torch.equal(first, second):
        raise SystemExit(f"{model}: the two ways differ; the figures are void")
    ways = {
        "all layers at once": partial(move, cache, path),
        "nothing": partial(move, cache, chain),
    }
    figures = {
        "a copy a row and layer": figure(wall_us(partial(one_by_one, cache), rounds), "host"),
        **{name: figure(us) for name, us in graphs_us(ways, rounds).items()},
    }
    if folder is not None:
        still = tuple(range(len(PATH)))
        for name, way in (("kernel", PATH), ("kernel, nothing", still)):
            times = kernel_us(model, way, 5 * rounds, folder)
            figures[name] = figure(times, resolution=CLOCK_US)
    moved = 2 * s.layers * s.kv_heads * s.head_dim * 2 * (len(PATH) - 1)
    us = {name: f["value"] for name, f in figures.items()}
    return {"model": model, "us": us, "bytes_moved": moved, "figures": figures}


def main() -> None:
    """Command line."""
    made = parser(__doc__, "compaction")
    made.add_argument("--cubins", type=Path, help="kernels of experiments.cubins, built beforehand")
    args = made.parse_args()
    need_gpu("compaction")
    folder = find(args.cubins, *MOVES)
    cases: list[dict[str, Any]] = []
    figures: dict[str, Any] = {}
    for model in MODELS:
        row = case(model, 5 if args.quick else 21, folder)
        figures |= {f"{model}, {name}, us": f for name, f in row.pop("figures").items()}
        cases.append(row)
        cells = "  ".join(f"{k}: {v:.1f} us" for k, v in row["us"].items())
        print(f"{model:14s} {row['bytes_moved']} bytes  {cells}", flush=True)
    fields = {"path": PATH, "cases": cases, "figures": figures}
    save("compaction", args.json, "cuda", fields, args.quick)


if __name__ == "__main__":
    main()
