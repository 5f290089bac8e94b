"""Building one draft tree: a heap in Python, the same compiled, tensor operations, the kernel.

    python -m experiments.tree_build

Same candidates, same tree (checked). `python heap` is the heap alone, `python heap + mask` what a
host's loop does behind it; `numba heap` is the CPU device's own builder; `torch` are tensor
operations over a fixed table of candidates, on a GPU in a captured graph. A builder's ratio says
little without its share of a step, which stands beside it.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from cute_kernels.cpu.tree import build_tree, make_frontier, make_tree
from experiments.baselines.graphs import Captured
from experiments.baselines.trees import DeviceTree, Planted, ancestor_mask, best_first
from experiments.common import RESULTS, default_device, parser, save
from host.atomics import now_ns
from host.jit import jit

BUDGETS = (8, 16, 32, 64, 128, 255)
DEPTH = 7  # the shipped drafter's


def candidates(depth: int, width: int, seed: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Sorted random log-probabilities and ids."""
    rng = np.random.default_rng(seed)
    logprobs = -np.sort(rng.exponential(2.0, (depth, width)).astype(np.float32), axis=1)
    return logprobs, np.tile(np.arange(width, dtype=np.int64), (depth, 1))


def python_us(work: Callable[[], Any], rounds: int) -> float:
    """Median time of a call, us."""
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1e6


@jit
def _time_trees(ids, logprobs, widths, budget, tree, frontier, rounds):
    start = now_ns()
    for _ in range(rounds):
        build_tree(0, ids, logprobs, widths, 15, budget, False, tree, frontier)
    return now_ns() - start


def numba_us(logprobs: np.ndarray, ids: np.ndarray, budget: int, rounds: int) -> tuple[float, Any]:
    tree, frontier = make_tree(budget), make_frontier(budget)
    widths = np.full(len(ids), ids.shape[1], np.int32)
    few = ids.astype(np.int32)
    _time_trees(few, logprobs, widths, budget, tree, frontier, 1)
    times = [
        _time_trees(few, logprobs, widths, budget, tree, frontier, 50) / 50 for _ in range(rounds)
    ]
    return statistics.median(times) / 1e3, tree


def torch_us(
    logprobs: np.ndarray, ids: np.ndarray, budget: int, device: str, rounds: int
) -> tuple[float, Planted]:
    """On a GPU: a captured graph replayed back to back, by events."""
    rows, depth = budget + 1, len(ids)

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    into = Planted(
        zeros(rows), zeros(rows), zeros(rows, rows, dtype=torch.uint8), zeros(rows),
        zeros(rows, depth + 1),
    )  # fmt: skip
    build = DeviceTree(depth, budget, ids.shape[1], False, into)
    scores, tokens, root = (
        torch.from_numpy(x).to(device) for x in (logprobs, ids, np.zeros(1, np.int64))
    )
    if device == "cpu":
        return python_us(lambda: build(scores, tokens, root), rounds), into
    graph = Captured(lambda keys: build(scores, tokens, root), torch.cuda.graph_pool_handle())
    graph.prepare(0)
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(20):
            graph(0)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / 20)
    return statistics.median(times), into


def step_us() -> dict[str, float]:
    """Step times that the shares refer to, from the other experiments' results."""
    out = {}
    cost = RESULTS / "speculation_cost.json"
    if cost.exists():
        steps = json.loads(cost.read_text())["steps"]
        out |= {f"CPU device, {s['rows']} rows": s["step_us"] for s in steps if s["rows"] > 1}
    steps_of = RESULTS / "baseline_steps.json"
    if steps_of.exists():
        models = json.loads(steps_of.read_text())["models"]
        for model, forms in models.items():
            for form, row in forms.items():
                if form != "plain":
                    out |= {f"{form}, {model}, {n}": s["us"] for n, s in row["steps"].items()}
    return out


def case(budget: int, depth: int, device: str, rounds: int) -> dict[str, Any]:
    """us by builder. SystemExit if their trees differ."""
    logprobs, ids = candidates(depth, budget)
    lists = logprobs.tolist(), ids.tolist()
    heap = partial(best_first, *lists, 0, budget)
    compiled, want = numba_us(logprobs, ids, budget, rounds)
    tensors, got = torch_us(logprobs, ids, budget, device, rounds)
    tokens, parents, _ = heap()
    same = np.array_equal(tokens, want.token) and np.array_equal(parents, want.parent)
    if not (same and np.array_equal(got.tokens.cpu(), want.token)):
        raise SystemExit(f"B = {budget}: the builders' trees differ; the figures are void")
    us = {
        "python heap": python_us(heap, rounds),
        "python heap + mask": python_us(lambda: ancestor_mask(heap()[1]), rounds),
        "numba heap": compiled,
        f"torch, {device}": tensors,
    }
    return {"budget": budget, "us": us}


def main() -> None:
    """Command line."""
    made = parser(__doc__, "tree_build")
    made.add_argument("--device", default=default_device())
    made.add_argument("--depth", type=int, default=DEPTH, help="drafted positions")
    args = made.parse_args()
    rows = []
    for budget in BUDGETS:
        rows.append(case(budget, args.depth, args.device, 9 if args.quick else 31))
        cells = "  ".join(f"{k}: {v:8.1f} us" for k, v in rows[-1]["us"].items())
        print(f"B = {budget:3d}  {cells}", flush=True)
    fields = {"depth": args.depth, "rows": rows, "step_us": step_us(), "same_trees": True}
    save("tree_build", args.json, args.device, fields, args.quick)


if __name__ == "__main__":
    main()
