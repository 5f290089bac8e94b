"""Building one draft tree: a heap in Python, the same compiled, tensor operations, the kernel.

    python -m experiments.tree_build [--cubins DIR]

Same candidates, same tree (checked). `python heap` is the heap alone, `python heap + mask` what a
host's loop does behind it; `numba heap` is the CPU device's own builder; `torch` are tensor
operations over a fixed table of candidates, on a GPU in a captured graph; `kernel` is the
megakernel's own tree phase alone on one of its CTAs, by the device's clock (up to 127 nodes). A
builder's ratio says little without its share of a step, which stands beside it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cute_kernels.cpu.tree import build_tree, make_frontier, make_tree
from experiments.baselines.graphs import Captured
from experiments.baselines.trees import DeviceTree, Planted, ancestor_mask, best_first
from experiments.common import RESULTS, default_device, figure, parser, save
from experiments.cubins import TREES, find
from host.atomics import now_ns
from host.jit import jit

BUDGETS = (8, 15, 31, 63, 127, 255)  # nodes; with the root a step's rows
DEPTH = 7  # the shipped drafter's
BESIDE = 15  # nodes of the steps that shares refer to
KERNEL, MOST = "kernel", 127


def candidates(depth: int, width: int, seed: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Sorted random log-probabilities and ids."""
    rng = np.random.default_rng(seed)
    logprobs = -np.sort(rng.exponential(2.0, (depth, width)).astype(np.float32), axis=1)
    return logprobs, np.tile(np.arange(width, dtype=np.int64), (depth, 1))


def python_us(work: Callable[[], Any], rounds: int) -> list[float]:
    """Times of a call, us."""
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        work()
        times.append((time.perf_counter() - begun) * 1e6)
    return times


@jit
def _time_trees(ids, logprobs, widths, budget, tree, frontier, rounds):
    start = now_ns()
    for _ in range(rounds):
        build_tree(0, ids, logprobs, widths, 15, budget, False, tree, frontier)
    return now_ns() - start


def numba_us(
    logprobs: np.ndarray, ids: np.ndarray, budget: int, rounds: int
) -> tuple[list[float], Any]:
    tree, frontier = make_tree(budget), make_frontier(budget)
    widths = np.full(len(ids), ids.shape[1], np.int32)
    few = ids.astype(np.int32)
    _time_trees(few, logprobs, widths, budget, tree, frontier, 1)
    times = [
        _time_trees(few, logprobs, widths, budget, tree, frontier, 50) / 50 for _ in range(rounds)
    ]
    return [t / 1e3 for t in times], tree


def torch_us(
    logprobs: np.ndarray, ids: np.ndarray, budget: int, device: str, rounds: int
) -> tuple[list[float], Planted]:
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
    return times, into


def kernel_us(
    folder: Path, logprobs: np.ndarray, ids: np.ndarray, budget: int, rounds: int
) -> tuple[list[float], np.ndarray]:
    """The megakernel's tree phase on the same candidates: us between the first warp's begin and the
    last one's end; the tree's tokens."""
    from cute_kernels.gpu.board import RowWord
    from cute_kernels.gpu.config import product
    from cute_kernels.gpu.load import Kernel
    from cute_kernels.gpu.rank_plan import pack_candidates
    from tests.gpu.speculate_case import Step
    from tests.gpu.speculate_rig import Rig

    c, (depth, width) = product("smollm2-135m"), ids.shape
    rig = Rig({"tree": Kernel.read(folder / TREES[0])}, c)
    ranked = pack_candidates(ids.astype(np.int32), logprobs, np.full(depth, width, np.int32))
    logits = np.zeros((depth + 1, 512), np.float32)  # not read: the candidates are given
    times = []
    for _ in range(rounds):
        step = Step(logits, budget=budget, depth=depth, root=0, ranked=ranked)
        rig.run("tree", step)
        times.append(float((rig.ns[:, 1] - rig.ns[:, 0]).max()) / 1000)
    return times, step.arrays["ROW_TABLE"][: budget + 1, RowWord.TOKEN]


def step_us(folder: Path) -> dict[str, float]:
    """Step times that the shares refer to, from the other experiments' results in a folder, else
    from the project's own."""

    def path(name: str) -> Path:
        return next(p for f in (folder, RESULTS) if (p := f / name).exists() or f == RESULTS)

    out: dict[str, float] = {}
    cost = path("speculation_cost.json")
    if cost.exists():
        steps = json.loads(cost.read_text())["steps"]
        out |= {f"CPU device, {s['rows']} rows": s["step_us"] for s in steps if s["rows"] > 1}
    steps_of = path("baseline_steps.json")
    if steps_of.exists():
        models = json.loads(steps_of.read_text())["models"]
        for model, forms in models.items():
            for form, row in forms.items():
                if form != "plain":
                    out |= {f"{form}, {model}, {n}": s["us"] for n, s in row["steps"].items()}
    sweep = path("context_sweep.json")
    if sweep.exists():
        found = json.loads(sweep.read_text())
        for case in found["cases"]:
            if case["form"] == "megakernel":
                out[f"megakernel, {found['model']}, {case['context']}"] = case["us"]
    return out


def case(budget: int, depth: int, device: str, rounds: int, folder: Path | None) -> dict[str, Any]:
    """us by builder. SystemExit if their trees differ."""
    logprobs, ids = candidates(depth, budget)
    lists = logprobs.tolist(), ids.tolist()
    heap = partial(best_first, *lists, 0, budget)
    compiled, want = numba_us(logprobs, ids, budget, rounds)
    tensors, got = torch_us(logprobs, ids, budget, device, rounds)
    tokens, parents, _ = heap()
    same = np.array_equal(tokens, want.token) and np.array_equal(parents, want.parent)
    samples = {
        "python heap": python_us(heap, rounds),
        "python heap + mask": python_us(lambda: ancestor_mask(heap()[1]), rounds),
        "numba heap": compiled,
        f"torch, {device}": tensors,
    }
    same = same and np.array_equal(got.tokens.cpu(), want.token)
    if folder is not None and budget <= MOST:
        samples[KERNEL], own = kernel_us(folder, logprobs, ids, budget, rounds)
        same = same and np.array_equal(own, want.token)
    if not same:
        raise SystemExit(f"B = {budget}: the builders' trees differ; the figures are void")
    figures = {
        name: figure(us, "device" if name in (KERNEL, "torch, cuda") else "host")
        for name, us in samples.items()
    }
    us = {name: f["value"] for name, f in figures.items()}
    return {"budget": budget, "us": us, "figures": figures}


def main() -> None:
    """Command line."""
    made = parser(__doc__, "tree_build")
    made.add_argument("--device", default=default_device())
    made.add_argument("--depth", type=int, default=DEPTH, help="drafted positions")
    made.add_argument("--cubins", type=Path, help="kernels of experiments.cubins, built beforehand")
    args = made.parse_args()
    folder = find(args.cubins, *TREES) if args.device == "cuda" else None
    rows: list[dict[str, Any]] = []
    figures: dict[str, Any] = {}
    for budget in BUDGETS:
        row = case(budget, args.depth, args.device, 25 if args.quick else 61, folder)
        figures |= {f"{name}, B = {budget}, us": f for name, f in row.pop("figures").items()}
        rows.append(row)
        cells = "  ".join(f"{k}: {v:8.1f} us" for k, v in row["us"].items())
        print(f"B = {budget:3d}  {cells}", flush=True)
    fields = {
        "depth": args.depth, "rows": rows, "beside": BESIDE,
        "step_us": step_us(args.json.parent), "same_trees": True, "figures": figures,
    }  # fmt: skip
    save("tree_build", args.json, args.device, fields, args.quick)


if __name__ == "__main__":
    main()
