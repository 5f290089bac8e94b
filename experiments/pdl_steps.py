"""The persistent kernel against a graph of the same phases with dependent launch.

    python -m experiments.pdl_steps [--cubins DIR] [--kernels ENGINE]

`models`: a verify step from tokens to choices. Same weights, same pages, same rows: the logits of
both are compared bit for bit first. us of the kernel by its own clock, of graphs by events, in a
graph of two steps (a replay a pair of steps) and of twenty; `plain edges`: the same graph without
dependent launch. `whole`, with the engine's kernels: a whole speculative step of N rows, drafter,
tree and walk included, acceptance scripted: forced to COMMITTED tokens where the graph's trees of
random keys are as deep (a step's time hardly depends on it), about as many in the kernel.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch

from cute_kernels.gpu.config import product
from cute_kernels.gpu.load import Kernel
from cute_kernels.gpu.script import decode_step
from experiments.baseline_steps import COMMITTED, forget, open_rival, setup_of, timed
from experiments.baselines.models import OnDevice, open_model
from experiments.baselines.pdl_plan import MODELS
from experiments.common import figure, need_gpu, parser, quiet, save
from experiments.cubins import PDL, TIMED, engine_runs, find

CASES = ((1024, 1), (1024, 16), (8192, 16))  # context, rows
CONTEXTS, ROWS, NEW_TOKENS = (1024, 8192), 16, 192  # of whole steps


def main() -> None:
    """Command line."""
    made = parser(__doc__, "pdl_steps")
    made.add_argument("--cubins", type=Path, help="kernels of experiments.cubins, built beforehand")
    made.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    made.add_argument(
        "--kernels", help="the engine's kernels, built beforehand; without, built here"
    )
    args = made.parse_args()
    need_gpu("pdl_steps")
    folder = find(args.cubins, *TIMED, *PDL)
    if folder is None:
        raise SystemExit("pdl_steps needs its kernels: python -m experiments.cubins, then --cubins")
    torch.zeros(1, device="cuda")
    quiet()
    result: dict[str, Any] = {"rows": ROWS, "models": {}, "whole": {}, "failed": {}, "figures": {}}
    engine = engine_runs(args.kernels)
    for name in args.models:
        result["models"][name] = measure(folder, name, 3 if args.quick else 5)
        result["figures"] |= figures_of(name, result["models"][name])
        save("pdl_steps", args.json, "cuda", result, args.quick)
        forget()
        if not engine:
            continue
        try:
            result["whole"][name] = whole(name, folder, args)
            result["figures"] |= whole_figures(name, result["whole"][name])
        except Exception as error:  # the next model's figures all the same
            result["failed"][name] = f"{type(error).__name__}: {error}"[:400]
            print(f"{name}, whole steps: {type(error).__name__}: {error}", flush=True)
        save("pdl_steps", args.json, "cuda", result, args.quick)
        forget()


def figures_of(name: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Of verify steps, by the device's clock."""
    found = {}
    for case in cases:
        for form in ("kernel", "graph_pdl"):
            label = f"{name}, {case['rows']} rows at {case['context']}, {form}, us"
            found[label] = figure(case["rounds"][form])
    return found


def whole_figures(name: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Of whole steps."""
    return {
        f"{name}, whole step at {case['context']}, {form}, us": figure(case[form]["rounds"], kind)
        for case in cases for form, kind in (("kernel", "device"), ("graph_pdl", "host"))
    }  # fmt: skip


def whole(name: str, folder: Path, args: Any) -> list[dict[str, Any]]:
    """Speculative steps of both, by context."""
    rounds = 2 if args.quick else 3
    kernel = ours(name, args.kernels, rounds)
    forget()
    weights, drafter = open_model(name, "cuda")
    options = argparse.Namespace(rows=ROWS, device="cuda", pdl=folder)
    setup = setup_of(
        "graph_pdl", OnDevice(weights, "cuda", torch.bfloat16), drafter, max(CONTEXTS) + 160,
        options, forced=COMMITTED - 1,
    )  # fmt: skip
    rival = open_rival("graph_pdl", setup, options)
    out = []
    for context in CONTEXTS:
        graph = timed(rival, context, 32, rounds)
        row: dict[str, Any] = {"context": context, "kernel": kernel[context], "graph_pdl": graph}
        row["graph_pdl / kernel"] = graph["us"] / row["kernel"]["us"]
        out.append(row)
        print(
            f"{name:14s} context {context} whole step: kernel {row['kernel']['us']:.1f} us (tau "
            f"{row['kernel']['tau']:.2f}), graph_pdl {graph['us']:.1f} us (tau "
            f"{graph['tau']:.2f}), {row['graph_pdl / kernel']:.2f}x",
            flush=True,
        )
    return out


def ours(name: str, kernels: str, rounds: int) -> dict[int, dict[str, Any]]:
    """The engine's steps by context, its drafts scripted."""
    from experiments.megakernel import Megakernel, random_ids

    out, ctx = {}, max(CONTEXTS) + NEW_TOKENS
    with Megakernel(name, ctx, kernels, ROWS - 1, scripted=True) as kernel:
        for context in CONTEXTS:
            prompt = random_ids(context, kernel.vocab)
            kernel.prepare(prompt, NEW_TOKENS, 0.8)
            runs = [kernel.run(prompt, NEW_TOKENS) for _ in range(rounds)]
            us = [run["us"] for run in runs]
            row: dict[str, Any] = {"us": statistics.median(us), "rounds": us}
            out[context] = row | {"tau": runs[0]["tau"], "split_us": runs[0]["split_us"]}
    return out


def measure(folder: Path, name: str, rounds: int) -> list[dict[str, Any]]:
    """Every case of a model."""
    from experiments.baselines.pdl import PdlStep
    from experiments.gpu_steps import STEPS, step_us
    from tests.gpu.model import Context, Model
    from tests.gpu.rig import Rig

    c = product(name)
    weights = Model(c.shape, seed=3)
    packed = weights.packed(c)
    kernel = Kernel.read(folder / f"timed-{name}")
    out = []
    for context, rows in CASES:
        tokens = [(7 + 131 * i) % c.shape.vocab for i in range(rows)]
        step = decode_step(tokens, context, c.shape.layers)
        rig = Rig(kernel, c, packed, Context(c.shape, context, STEPS + 16, 4))
        record = rig.run([step])[0]
        want = rig.logits[:rows].clone()
        rival_context = Context(c.shape, context, STEPS + 16, 4)
        graph = PdlStep.of_test(folder, name, weights, rival_context)
        graph.begin(step, tokens)
        graph.run(0)
        got, chosen = graph.logits[:rows].clone(), graph.choose.chosen[:rows].tolist()
        graph.run(1)
        plain = PdlStep.of_test(folder, name, weights, rival_context, dependent=False)
        plain.begin(step, tokens)
        us: dict[str, list[float]] = {}
        for _ in range(rounds):  # in turn, so that a clock that drifts meets all of them
            for form, time in (
                ("kernel", lambda: step_us(rig, context, rows)["us"]),  # noqa: B023
                ("graph_pdl", lambda: graph.step_us(2, 20)),  # noqa: B023
                ("graph_pdl, 20 steps a graph", lambda: graph.step_us(20, 3)),  # noqa: B023
                ("graph of plain edges", lambda: plain.step_us(2, 20)),  # noqa: B023
            ):
                us.setdefault(form, []).append(time())
        row: dict[str, Any] = {
            "context": context, "rows": rows,
            "logits_equal": bool(torch.equal(got, want) and torch.equal(graph.logits[:rows], want)),
            "choices_equal": chosen == record["token"][:rows].tolist(),
            "us": {form: statistics.median(values) for form, values in us.items()},
            "rounds": us,
        }  # fmt: skip
        row["graph_pdl / kernel"] = row["us"]["graph_pdl"] / row["us"]["kernel"]
        out.append(row)
        print(
            f"{name:14s} context {context} rows {rows}: logits"
            f" {'equal' if row['logits_equal'] else 'DIFFERENT'}, choices"
            f" {'equal' if row['choices_equal'] else 'DIFFERENT'}, "
            + ", ".join(f"{form} {v:.1f} us" for form, v in row["us"].items()),
            flush=True,
        )
    return out


if __name__ == "__main__":
    main()
