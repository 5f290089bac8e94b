"""What scattered pages cost: the same attention over KV in order, shuffled pages, single rows.

    python -m experiments.kv_fragmentation

One layer's verify attention (split-KV, N rows) in a captured graph, us by events: keys in one
piece, in pages of 64 that lie in order, the same shuffled over a pool four times as large, and
pages of one position, shuffled. Outputs are compared. The difference between the first column and
the others is what a defragmentation could win; what it costs is one copy of the cache, in the last
column.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from experiments.baselines.graphs import Captured
from experiments.common import need_gpu, parser, save

if TYPE_CHECKING:
    from experiments.baselines.split_kv import SplitKv

SHAPES = {"smollm2-135m": (9, 3, 64), "llama-3.2-1b": (32, 8, 64), "llama-3.1-8b": (32, 8, 128)}
CONTEXTS = (1024, 4096, 16384, 65536)
LAYOUTS = {
    "contiguous": 0, "pages of 64 in order": 64, "pages of 64 shuffled": 64,
    "single rows shuffled": 1,
}  # fmt: skip
POOL = 4  # the pool's size in contexts
COPIES = 6  # of the cache, read in turn, so that L2 does not keep a short one


def graph_us(work: Callable[[], Any], rounds: int) -> float:
    """Device time of a captured call, back to back, us."""
    graph = Captured(lambda keys: work(), torch.cuda.graph_pool_handle())
    graph.prepare(0)
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            graph(0)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e2)
    return statistics.median(times)


def case(model: str, context: int, rows: int, rounds: int) -> dict[str, Any]:
    """us by layout, and whether all give the same bits."""
    from experiments.baselines.split_kv import SplitKv

    device, (heads, kv_heads, d) = torch.device("cuda"), SHAPES[model]
    capacity = context + 64
    q = torch.randn(rows, heads, d, device=device).bfloat16()
    tree = torch.ones(rows, rows, dtype=torch.uint8, device=device).tril()
    length = torch.tensor([context], device=device)
    plain = torch.randn(COPIES, 2, kv_heads, capacity, d, device=device).bfloat16()
    us: dict[str, float] = {}
    outputs = []
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
        work = partial(read_all, kernel, q, pool, tree, length, table)
        us[name] = graph_us(work, rounds) / COPIES
        outputs.append(work())
    whole = torch.empty_like(plain[0])
    us["one copy of the layer's cache"] = graph_us(partial(whole.copy_, plain[0]), rounds)
    equal = all(torch.equal(out, outputs[0]) for out in outputs)
    return {"model": model, "context": context, "us": us, "outputs_equal": equal}


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
    made.add_argument("--rows", type=int, default=16)
    args = made.parse_args()
    need_gpu("kv_fragmentation", "Triton")
    cases = []
    for model in SHAPES:
        for context in CONTEXTS:
            cases.append(case(model, context, args.rows, 5 if args.quick else 15))
            cells = "  ".join(f"{k}: {v:.1f}" for k, v in cases[-1]["us"].items())
            same = "equal" if cases[-1]["outputs_equal"] else "DIFFERENT"
            print(f"{model:14s} {context:6d} {cells} {same}", flush=True)
    save("kv_fragmentation", args.json, "cuda", {"rows": args.rows, "cases": cases}, args.quick)


if __name__ == "__main__":
    main()
