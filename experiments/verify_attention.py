"""Verify attention by kernel, by splits of the keys, by width of loads; alone and end to end.

    python -m experiments.verify_attention [--cubins DIR]

`layer`: us of one layer's attention of N tree rows behind a context, over the caches of 16 layers
in turn, so that L2 does not keep a short one: torch's with an additive mask; split-KV in Triton
with 1 to 128 splits, with 128-bit loads and with loads value by value, in a captured graph; and the
megakernel's, with the splits it can have, a hand-off to the next layer in its figures. Ours loads
128 bits at a time or whole blocks by bulk copies: it has no form that loads value by value. More
than 16 rows have no attention kernel of their own: `growth of a step` is what a whole step of so
many rows takes longer than behind 16 positions, a layer.

`steps`: us of a whole step of `graph_host_tree` with the same choices, and without graphs: what is
left of a kernel's gain where a host's loop is around it; `ours`: the same loop around our phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.baseline_steps import COMMITTED, forget, timed
from experiments.baselines import Baseline, Eager, HostTree, Setup
from experiments.baselines.attention import Sdpa
from experiments.baselines.models import OnDevice, open_model
from experiments.common import figure, need_gpu, parser, quiet, save
from experiments.cubins import ATTENTION, PDL, TIMED, find
from experiments.kv_fragmentation import COPIES, SHAPES, graphs_us, layer_us, read_all

SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)
FEW_SPLITS = (16, 64)  # of a quick run, and of those value by value
ROWS = {"smollm2-135m": (1, 16, 64), "llama-3.1-8b": (16,)}
CONTEXTS = (4096, 16384, 65536)
MOST_MASKED = 16384  # context up to which torch's attention is part of the steps
OURS, SHORT = 16, 16  # rows of the decode form; positions of the shortest step


def triton_us(
    model: str, rows: int, context: int, rounds: int, every: Sequence[int]
) -> dict[str, list[float]]:
    """us by kernel: torch's and split-KV."""
    from experiments.baselines.split_kv import SplitKv

    device, (heads, kv_heads, d) = torch.device("cuda"), SHAPES[model]
    capacity = context + 256
    q = torch.randn(rows, heads, d, device=device).bfloat16()
    tree = torch.ones(rows, rows, dtype=torch.uint8, device=device).tril()
    length = torch.tensor([context], device=device)
    pool = torch.randn(COPIES, 2, kv_heads, capacity, d, device=device).bfloat16()
    masked = Sdpa(rows, heads, kv_heads)
    masked.begin(capacity, length, tree, pool)

    def torch_s() -> None:
        for keys, values in pool:
            masked(q, keys, values)

    works: dict[str, Any] = {"torch, masked": torch_s}
    for splits in every:
        for scalar in (False, True) if splits in FEW_SPLITS else (False,):
            kernel = SplitKv(rows, heads, kv_heads, d, device, splits=splits, scalar=scalar)
            name = f"{splits} splits" + (", value by value" if scalar else "")
            works[name] = partial(read_all, kernel, q, pool, tree, length, None)
    return {n: [us / COPIES for us in v] for n, v in graphs_us(works, rounds).items()}


def ours_us(
    model: str, rows: int, context: int, rounds: int, folder: Path
) -> dict[str, list[float]]:
    """us of the megakernel's attention."""
    from cute_kernels.gpu.load import Kernel
    from tests.gpu.attention_case import Case, chain
    from tests.gpu.attention_kernels import ALL, LAYERS

    if rows > OURS:
        return {"ours, growth of a step": tree_us(model, rows, context, rounds, folder)}
    name, out = f"attention-{model}", {}
    found = Case(Kernel.read(folder / name), ALL[name], context, chain(rows), 1, LAYERS)
    for other in (n for n in ATTENTION if n == name or n.startswith(f"{name}-splits")):
        found.kernel, found.c = Kernel.read(folder / other), ALL[other]
        out[f"ours, {found.c.splits} splits"] = layer_us(found, rounds)
    return dict(sorted(out.items(), key=lambda item: int(item[0].split()[1])))


def tree_us(model: str, rows: int, context: int, rounds: int, folder: Path) -> list[float]:
    """How much longer a whole step of so many rows takes behind the context than behind
    SHORT positions, a layer, by launches of a script of such steps."""
    import random

    from cute_kernels.gpu.config import product
    from cute_kernels.gpu.load import Kernel
    from cute_kernels.gpu.script import rows_step
    from tests.gpu.model import Context, Model
    from tests.gpu.rows_case import make_rig, random_tree

    c, rng = product(model), random.Random(1)
    weights = Model(c.shape, seed=11)
    held = Context(c.shape, context, 512, seed=2)
    rig, _ = make_rig(Kernel.read(folder / f"timed-{model}"), c, weights, weights.packed(c), held)
    parents = random_tree(rows, rng)
    tokens = [rng.randrange(c.shape.vocab) for _ in range(rows)]

    def step_us(position: int) -> float:
        rig.set_rows(tokens, position, parents)
        ns = rig.run([rows_step(rows, position, c.shape.layers)] * 8)["ns"][:, :rows]
        return float(np.median(ns[1:, 0] - ns[:-1, -1])) / 1000

    step_us(SHORT)
    return [(step_us(context) - step_us(SHORT)) / c.shape.layers for _ in range(rounds)]


def layer(
    model: str, rows: int, context: int, rounds: int, folder: Path | None, every: Sequence[int]
) -> dict[str, Any]:
    """A row of the table, its figures with it."""
    samples = triton_us(model, rows, context, rounds, every)
    forget()
    if folder is not None:
        samples |= ours_us(model, rows, context, rounds, folder)
    figures = {name: figure(us) for name, us in samples.items()}
    us = {name: f["value"] for name, f in figures.items()}
    return {"model": model, "rows": rows, "context": context, "us": us, "figures": figures}


class Ours:
    """The host's loop around our phases, opened like the others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, setup: Setup) -> Baseline:
        from experiments.baselines.pdl_host import PdlHostTree

        return PdlHostTree(setup, self.folder)


def steps(
    name: str, contexts: list[int], rows: int, rounds: int, folder: Path | None
) -> list[dict[str, Any]]:
    """Whole steps of the host's loop."""
    weights, drafter = open_model(name, "cuda")
    rounded, out = OnDevice(weights, "cuda", torch.bfloat16), []
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "torch, masked": (HostTree, dict(attention="sdpa")),
        "16 splits, value by value": (HostTree, dict(attention="triton", splits=16, scalar=True)),
        "16 splits": (HostTree, dict(attention="triton", splits=16)),
        "64 splits": (HostTree, dict(attention="triton", splits=64)),
        "64 splits, not captured": (Eager, dict(attention="triton", splits=64)),
    }
    if folder is not None:
        cases["ours"] = Ours(folder), dict(attention="triton")
    for case, (kind, options) in cases.items():
        rival = kind(
            Setup(
                rounded, drafter, rows=rows, ctx=max(contexts) + 40 * COMMITTED, device="cuda",
                forced=COMMITTED - 1, **options,
            )
        )  # fmt: skip
        row: dict[str, Any] = {"case": case, "us": {}, "rounds": {}}
        for context in contexts:
            if options["attention"] == "triton" or context <= MOST_MASKED:
                found = timed(rival, context, 12, rounds)
                row["us"][str(context)] = found["us"]
                row["rounds"][str(context)] = found["rounds"]
        out.append(row)
        print(
            f"{case:28s} " + "  ".join(f"{n}: {v:.0f} us" for n, v in row["us"].items()), flush=True
        )
        del rival
        forget()
    return out


def layer_cases(quick: bool) -> list[tuple[str, int, int, Sequence[int]]]:
    """Model, rows, context, numbers of splits."""
    if quick:
        return [("smollm2-135m", OURS, CONTEXTS[1], FEW_SPLITS)]
    return [
        (model, rows, context, SPLITS)
        for model, counts in ROWS.items()
        for rows in counts
        for context in (CONTEXTS if rows == OURS else CONTEXTS[::2])
    ]


def main() -> None:
    """Command line."""
    made = parser(__doc__, "verify_attention")
    made.add_argument("--model", default="smollm2-135m", help="of the whole steps")
    made.add_argument("--cubins", type=Path, help="kernels of experiments.cubins, built beforehand")
    args = made.parse_args()
    need_gpu("verify_attention", "Triton")
    quiet()
    folder = find(args.cubins, *ATTENTION, TIMED[0], PDL[0])
    contexts = list(CONTEXTS[1:2] if args.quick else CONTEXTS)
    fields: dict[str, Any] = {"layer": [], "model": args.model, "steps": [], "figures": {}}
    # The steps first: they are what the claim is about.
    whole = fields["steps"] = steps(
        args.model, [1024, *contexts], 16, 2 if args.quick else 3, folder
    )
    fields["figures"] = {
        f"a step of {row['case']} at {n}, us": figure(rounds, "host")
        for row in whole for n, rounds in row["rounds"].items()
    }  # fmt: skip
    for model, rows, context, splits in layer_cases(args.quick):
        found = layer(model, rows, context, 3 if args.quick else 4, folder, splits)
        label = f"{model}, N = {rows} at {context}"
        named = found.pop("figures").items()
        fields["figures"] |= {f"{label}, {name}, us": f for name, f in named}
        fields["layer"].append(found)
        cells = "  ".join(f"{k}: {v:.1f}" for k, v in found["us"].items())
        print(f"{label}: {cells}", flush=True)
        save("verify_attention", args.json, "cuda", fields, args.quick)
        forget()


if __name__ == "__main__":
    main()
