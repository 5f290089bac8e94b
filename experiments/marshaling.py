"""What it costs to carry a step's data between host and device.

    python -m experiments.marshaling

The same contents four ways, us of wall time until the device has them and the host has the
candidates: `lists`: every field a Python list, made a tensor and sent by itself, the mask as rows
x (context + rows), as some engines keep it; `lists, tree mask`: the same with the mask of the
tree's own rows; `pinned`: one packed copy each way through pinned memory, as the baselines here do;
`none`: an empty replay and a wait, what remains where nothing is carried. One host thread: with
more, torch's waits for its own threads would be part of the figures. The megakernel carries nothing
during a request.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from experiments.baselines.graphs import Captured
from experiments.baselines.trees import ancestor_mask, best_first
from experiments.common import figure, need_gpu, parser, save
from experiments.tree_build import DEPTH, candidates

CONTEXTS = (1024, 16384, 46000)


def wall_us(work: Callable[[], object], rounds: int) -> list[float]:
    """us until the device is done, of each call but the first three."""
    times = []
    for i in range(rounds + 3):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if i >= 3:
            times.append((time.perf_counter() - begun) * 1e6)
    return times


class Carried:
    """A tree's data on both sides."""

    def __init__(self, rows: int) -> None:
        logprobs, ids = candidates(DEPTH, rows - 1)
        self.tokens, self.parents, self.depths = best_first(
            logprobs.tolist(), ids.tolist(), 0, rows - 1
        )
        self.rows, self.mask = rows, ancestor_mask(self.parents)
        self.ranked = torch.from_numpy(logprobs).cuda(), torch.from_numpy(ids).cuda()
        self.packed = torch.cat([x.flatten().view(torch.uint8) for x in self.ranked])
        self.plan = torch.zeros(16 * rows + rows * rows, dtype=torch.uint8, device="cuda")
        self.there = torch.zeros(self.plan.shape, dtype=torch.uint8).pin_memory()
        self.back = self.packed.cpu().pin_memory()

    def lists(self, context: int) -> None:
        """Field by field; context: positions in front of the tree that the mask has columns for."""
        for x in self.ranked:
            x.cpu().tolist()
        for field in (self.tokens, self.depths, self.parents):
            torch.tensor(field).cuda()
        own = torch.tensor(self.mask.tolist(), dtype=torch.bool)
        torch.cat([torch.ones(self.rows, context, dtype=torch.bool), own], 1).cuda()

    def pinned(self) -> None:
        """One packed copy each way."""
        n = self.rows
        self.back.copy_(self.packed, non_blocking=True)
        torch.cuda.synchronize()
        self.back.tolist()
        numbers = self.there[: 16 * n].view(torch.int64).numpy()
        numbers[:n], numbers[n:] = self.tokens, self.depths
        self.there[16 * n :].view(n, n).numpy()[:] = self.mask
        self.plan.copy_(self.there, non_blocking=True)


def main() -> None:
    """Command line."""
    args = parser(__doc__, "marshaling").parse_args()
    need_gpu("marshaling")
    torch.set_num_threads(1)
    rounds = 40 if args.quick else 200
    cases: list[dict[str, Any]] = []
    figures: dict[str, Any] = {}
    sink = torch.zeros(1, device="cuda")
    graph = Captured(lambda keys: sink.add_(1), torch.cuda.graph_pool_handle())
    graph.prepare(0)
    for rows in (16, 64):
        data = Carried(rows)
        works: dict[str, Callable[[], object]] = {
            f"lists, mask of {n} positions": partial(data.lists, n) for n in CONTEXTS
        }
        works |= {"lists, tree mask": partial(data.lists, 0), "pinned": data.pinned}
        works["none"] = partial(graph, 0)
        found = {name: figure(wall_us(work, rounds), "host") for name, work in works.items()}
        us = {name: f["value"] for name, f in found.items()}
        figures |= {f"N = {rows}, {name}, us": f for name, f in found.items()}
        cases.append({"rows": rows, "us": us})
        print(f"N = {rows}: " + "  ".join(f"{k}: {v:.0f} us" for k, v in us.items()), flush=True)
    save("marshaling", args.json, "cuda", {"cases": cases, "figures": figures}, args.quick)


if __name__ == "__main__":
    main()
