"""What scattered pages cost: the same attention over KV in order, shuffled pages, single rows.

    python -m experiments.kv_fragmentation [--cubins DIR]

One layer's verify attention (split-KV in Triton, N rows) in a captured graph, us by events: keys in
one piece, in pages of 64 that lie in order, the same shuffled over a pool four times as large, and
pages of one position, shuffled. Outputs are compared. `ours`: the megakernel's attention, whose
pages have 64 positions, in order and shuffled; a hand-off to the next layer is in its figures. The
caches of 16 layers are read in turn. The difference between pages in order and the others is what a
defragmentation could win; what it costs is one copy of the cache, in the last column.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from experiments.baselines.graphs import Captured
from experiments.common import figure, need_gpu, parser, save
from experiments.cubins import ATTENTION, find

if TYPE_CHECKING:
    from experiments.baselines.split_kv import SplitKv

SHAPES = {"smollm2-135m": (9, 3, 64), "llama-3.2-1b": (32, 8, 64), "llama-3.1-8b": (32, 8, 128)}
CONTEXTS = (1024, 4096, 16384, 65536)
LAYOUTS = {
    "contiguous": 0, "pages of 64 in order": 64, "pages of 64 shuffled": 64,
    "single rows shuffled": 1,
}  # fmt: skip
COPY = "one copy of the layer's cache"
POOL = 4  # the pool's size in contexts
COPIES = 16  # of the cache, read in turn: as many as `ours` has layers
LAUNCHES = 15  # of `ours` in a round
ROUND_US = 10_000.0  # of replays between two events


def graphs_us(works: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Device time of captured calls, back to back, us, by rounds, which alternate between them."""
    graphs, replays = {}, {}
    for name, work in works.items():
        graphs[name] = Captured(lambda keys, work=work: work(), torch.cuda.graph_pool_handle())
        graphs[name].prepare(0)

    def once(name: str, replays: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graphs[name](0)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3 / replays

    for name in works:
        once(name, 1)
        replays[name] = max(2, min(50, round(ROUND_US / once(name, 1))))
    out: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds):
        for name in list(works)[:: 1 if turn % 2 == 0 else -1]:
            out[name].append(once(name, replays[name]))
    return out


def case(model: str, context: int, rows: int, rounds: int, folder: Path | None) -> dict[str, Any]:
    """us by layout, and whether all of Triton's give the same bits."""
    from experiments.baselines.split_kv import SplitKv

    device, (heads, kv_heads, d) = torch.device("cuda"), SHAPES[model]
    capacity = context + 64
    q = torch.randn(rows, heads, d, device=device).bfloat16()
    tree = torch.ones(rows, rows, dtype=torch.uint8, device=device).tril()
    length = torch.tensor([context], device=device)
    plain = torch.randn(COPIES, 2, kv_heads, capacity, d, device=device).bfloat16()
    works: dict[str, Callable[[], Any]] = {}
    for name, page in LAYOUTS.items():
        kernel = SplitKv(rows, heads, kv_heads, d, device, page=page)
        table, pool = None, plain
        if page:
            pages, slots = capacity // page, POOL * capacity // page
            order = torch.arange(pages, device=device)
            if "shuffled" in name:
                order = torch.randperm(slots, device=device)[:pages]
            table = order.int()
            pool = plain.new_zeros(COPIES, 2, kv_heads, slots, page, d)
            pool[:, :, :, order] = plain.view(COPIES, 2, kv_heads, pages, page, d)
            pool = pool.flatten(3, 4)
        works[name] = partial(read_all, kernel, q, pool, tree, length, table)
    outputs = [work() for work in works.values()]
    works[COPY] = partial(torch.empty_like(plain).copy_, plain)
    samples = {n: [us / COPIES for us in v] for n, v in graphs_us(works, rounds).items()}
    copied = samples.pop(COPY)
    works.clear()
    if folder is not None:
        samples |= ours(model, context, rows, rounds, folder)
    samples[COPY] = copied
    equal = all(torch.equal(out, outputs[0]) for out in outputs)
    figures = {name: figure(us) for name, us in samples.items()}
    return {
        "model": model, "context": context, "us": {n: f["value"] for n, f in figures.items()},
        "outputs_equal": equal, "figures": figures,
    }  # fmt: skip


def ours(model: str, context: int, rows: int, rounds: int, folder: Path) -> dict[str, list[float]]:
    """The megakernel's attention over shuffled pages, and over the same in order."""
    from cute_kernels.gpu.load import Kernel
    from tests.gpu.attention_case import Case, chain
    from tests.gpu.attention_kernels import ALL, LAYERS

    name = f"attention-{model}"
    found = Case(Kernel.read(folder / name), ALL[name], context, chain(rows), 1, LAYERS)
    out = {"ours, pages shuffled": layer_us(found, rounds)}
    found.pool = found.pool[found.pages.long()]
    found.pages = torch.arange(len(found.pages), dtype=torch.int32, device="cuda")
    return {"ours, pages in order": layer_us(found, rounds)} | out


def layer_us(found: Any, rounds: int) -> list[float]:
    """us a layer of a case of tests.gpu.attention_case, by rounds: what LAYERS layers take longer
    than a quarter of them, so that launch and first layer cost nothing."""
    from tests.gpu.attention_kernels import LAYERS

    found.layers = LAYERS
    found.prepare()
    fresh = found.act.clone()

    def launch(layers: int) -> float:
        found.act.copy_(fresh)  # its words stand for what is not there yet
        found.layers = layers
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        found.launch()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3

    def once() -> float:
        times = [(launch(LAYERS), launch(LAYERS // 4)) for _ in range(LAUNCHES)]
        most, least = (statistics.median(some) for some in zip(*times))
        return (most - least) / (LAYERS * 3 / 4)

    once()
    return [once() for _ in range(rounds)]


def read_all(
    kernel: SplitKv, q: torch.Tensor, pool: torch.Tensor, tree: torch.Tensor,
    length: torch.Tensor, table: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Attention over each copy of the cache in turn; the last one's output."""
    for keys, values in pool:
        out = kernel(q, keys, values, tree, length, table)
    return out


def main() -> None:
    """Command line."""
    made = parser(__doc__, "kv_fragmentation")
    made.add_argument("--models", nargs="+", default=["smollm2-135m", "llama-3.1-8b"])
    made.add_argument("--rows", type=int, default=16)
    made.add_argument("--cubins", type=Path, help="kernels of experiments.cubins, built beforehand")
    args = made.parse_args()
    need_gpu("kv_fragmentation", "Triton")
    folder = find(args.cubins, *ATTENTION[:3])
    cases: list[dict[str, Any]] = []
    figures: dict[str, Any] = {}
    for model in args.models[: 1 if args.quick else None]:
        for context in CONTEXTS[:: 2 if args.quick else 1]:
            row = case(model, context, args.rows, 3 if args.quick else 5, folder)
            found = row.pop("figures").items()
            figures |= {f"{model} at {context}, {name}, us": f for name, f in found}
            cases.append(row)
            cells = "  ".join(f"{k}: {v:.1f}" for k, v in cases[-1]["us"].items())
            same = "equal" if cases[-1]["outputs_equal"] else "DIFFERENT"
            print(f"{model:14s} {context:6d} {cells} {same}", flush=True)
            torch.cuda.empty_cache()
    fields = {"rows": args.rows, "cases": cases, "figures": figures}
    save("kv_fragmentation", args.json, "cuda", fields, args.quick)


if __name__ == "__main__":
    main()
