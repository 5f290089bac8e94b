"""Graph baselines: their step times, and that they decode the same tokens.

    python -m experiments.baseline_steps [--models smollm2-135m llama-3.2-1b] [--contexts 1024 8192]

Each rival of `experiments.baselines`, N rows, one sequence. `tokens`: what it writes behind chat
prompts, judged by the fp32 model: a token that fp32 would not have chosen is listed with how far
its logit lies below the largest. `steps`: time of a step behind a context of random keys, each step
committing a fixed number of tokens, so that nothing depends on the text: wall time of the whole
loop, and device time of each graph replayed alone. Forms with our phases need kernels (--pdl).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from experiments.baselines import Baseline, Setup, make
from experiments.baselines.models import OnDevice, gaps, open_model
from experiments.common import default_device, figure, parser, quiet, save
from experiments.cubins import PDL as PDL_KERNELS
from experiments.cubins import find

PROMPTS = Path(__file__).parent / "baselines" / "prompt_ids.json"
COMMITTED = 4
"""Tokens that a timed step commits: the shipped drafter's tau at N = 16, rounded."""

# name, kind, options; in the order of the table
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("graph_whole_step", dict(rows=1, attention="triton", fused=True)),
    "eager": ("eager", dict(attention="sdpa")),
    "graph_host_tree": ("graph_host_tree", dict(attention="sdpa")),
    "graph_host_tree, split-KV": ("graph_host_tree", dict(attention="triton")),
    "graph_host_tree, split-KV, fused": ("graph_host_tree", dict(attention="triton", fused=True)),
    "graph_device_tree, split-KV, fused": (
        "graph_device_tree", dict(attention="triton", fused=True),
    ),
    "graph_whole_step, split-KV": ("graph_whole_step", dict(attention="triton")),
    "graph_whole_step, split-KV, fused": ("graph_whole_step", dict(attention="triton", fused=True)),
    "graph_host_tree, our phases": ("host_pdl", dict(attention="triton", fused=True)),
    "graph_pdl, drafter in torch": ("graph_pdl", dict(attention="triton", fused=True)),
    "graph_pdl": ("graph_pdl", dict(attention="triton", fused=True)),
}  # fmt: skip
PDL, HOST_PDL = "graph_pdl", "host_pdl"  # kinds of our own phases
ON_CPU = ("plain", "eager", "graph_host_tree", "graph_whole_step")
FEW = (
    "graph_host_tree", "graph_host_tree, split-KV, fused", "graph_whole_step, split-KV, fused",
    "graph_host_tree, our phases", "graph_pdl",
)  # fmt: skip
"""The forms that every model but the first is measured in."""
MOST_SDPA = 16384  # beyond it torch's masked attention takes tens of milliseconds a step


def setup_of(form: str, weights: Any, drafter: Any, ctx: int, args: Any, **more: Any) -> Setup:
    options = dict(rows=args.rows) | FORMS[form][1]
    if args.device == "cpu":  # what a GPU's kernels and compiler do, plainly
        options |= dict(attention="sdpa", fused=False)
    return Setup(weights, drafter, ctx=ctx, device=args.device, **options, **more)


def open_rival(form: str, setup: Setup, args: Any) -> Baseline:
    """A rival of FORMS; graph_pdl from the kernels that args names."""
    kind = FORMS[form][0]
    if kind == HOST_PDL:
        from experiments.baselines.pdl_host import PdlHostTree

        return PdlHostTree(setup, args.pdl)
    if kind != PDL:
        return make(kind, setup)
    from experiments.baselines.pdl_loop import GraphPdl

    return GraphPdl(setup, args.pdl, drafter_too=form == PDL)


def replay_us(rival: Baseline, rounds: int) -> list[float]:
    """Device time of each captured piece, replayed alone, us; the rival's state is lost."""
    out = []
    for captured in rival.graphs():
        graphs = list(captured)
        if not graphs:  # launched from Python
            return []
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        rival.core._begin(rival.length)
        graphs[0].replay()
        start.record()
        for i in range(1, 2 * rounds + 1):
            graphs[i % len(graphs)].replay()
        end.record()
        torch.cuda.synchronize()
        out.append(start.elapsed_time(end) * 1e3 / (2 * rounds))
        rival.core._begin(rival.length)
    return out


def timed(rival: Baseline, context: int, steps: int, rounds: int) -> dict[str, Any]:
    """us of a step: of each round the mean, of the rounds the median, least and largest. tau: what
    was committed; less than the forced acceptance says where trees of random keys are shallow."""
    means = []
    for _ in range(rounds):
        rival.pretend(context, steps + 3)
        for _ in range(3):
            rival.step()
        rival.finish()
        begun = time.perf_counter()
        for _ in range(steps):
            rival.step()
        rival.finish()
        means.append((time.perf_counter() - begun) / steps * 1e6)
    row: dict[str, Any] = {
        "us": statistics.median(means), "us_min": min(means), "us_max": max(means),
        "rounds": means, "tau": (rival.length - context) / (steps + 3),
    }  # fmt: skip
    rival.pretend(context, steps + 3)
    rival.clock.on, rival.clock.seconds = True, {}
    for _ in range(steps):
        rival.step()
    rival.clock.on = False
    row["host_us"] = {k: v / steps * 1e6 for k, v in rival.clock.seconds.items()}
    if rival.core.device.type == "cuda":
        rival.pretend(context, 1)
        row["graphs_us"] = replay_us(rival, 5)
    return row


def context_of(args: argparse.Namespace) -> int:
    """One size of the caches for all of a run, so that everything is compiled once."""
    return int(max(*args.contexts, 512) + (args.steps + 8) * COMMITTED)


def forget() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def check_tokens(rival: Baseline, weights: Any, args: Any) -> dict[str, Any]:
    """What a rival writes behind the prompts, against fp32."""
    prompts = json.loads(PROMPTS.read_text())[: args.prompts]
    differ, largest, steps, tokens, seconds, texts = 0, 0.0, 0, 0, 0.0, []
    for prompt in prompts:
        made = rival.generate(prompt, args.tokens)
        below = gaps(weights, args.device, prompt, made.tokens)
        differ += sum(gap > 0 for gap in below)
        largest = max(largest, *below)
        steps, tokens = steps + made.steps, tokens + sum(made.step_tokens)
        seconds += made.seconds
        texts.append(made.tokens)
    return {
        "tokens": sum(map(len, texts)), "not_fp32_s_choice": differ, "largest_gap": largest,
        "tau": tokens / steps, "tok_s": tokens / seconds, "texts": texts,
    }  # fmt: skip


def main() -> None:
    """Command line."""
    made = parser(__doc__, "baseline_steps")
    made.add_argument("--device", default=default_device())
    made.add_argument("--models", nargs="+", default=["smollm2-135m", "llama-3.2-1b"])
    made.add_argument("--contexts", nargs="+", type=int, default=[1024, 8192])
    made.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    made.add_argument("--skip", nargs="+", default=[], choices=list(FORMS))
    made.add_argument("--rows", type=int, default=16)
    made.add_argument("--pdl", type=Path, help="kernels of our phases, built beforehand")
    made.add_argument("--prompts", type=int, default=3)
    made.add_argument("--tokens", type=int, default=64)
    made.add_argument("--steps", type=int, default=32)
    made.add_argument("--rounds", type=int, default=3)
    args = made.parse_args()
    quiet()
    if args.quick:
        args.prompts, args.tokens, args.rounds = 2, 48, 2
    if args.device == "cuda":
        args.pdl = find(args.pdl, *PDL_KERNELS)
    if args.pdl is None:
        args.forms = [form for form in args.forms if FORMS[form][0] not in (PDL, HOST_PDL)]
    if args.device == "cpu":
        args.forms = [form for form in args.forms if form in ON_CPU]
    result: dict[str, Any] = {
        "rows": args.rows, "committed": COMMITTED, "steps": args.steps, "models": {}, "failed": {},
        "figures": {},
    }  # fmt: skip
    every = [form for form in args.forms if form not in args.skip]
    for i, name in enumerate(args.models):
        args.forms = [form for form in every if i == 0 or form in FEW]
        rows = result["models"][name] = measure(name, args, result["failed"])
        for form, row in rows.items():
            cells = " ".join(f"{n}: {s['us']:9.1f} us" for n, s in row["steps"].items())
            print(f"{name:14s} {form:36s} {cells}", flush=True)
        result["figures"] |= {
            f"{name}, {form} at {n}: step, us": figure(step["rounds"], "host")
            for form, row in rows.items() for n, step in row["steps"].items()
        }  # fmt: skip
        save("baseline_steps", args.json, args.device, result, args.quick)


def measure(name: str, args: argparse.Namespace, failed: dict[str, str]) -> dict[str, Any]:
    """All rivals on one model. One that fails is written down and does not stop the others."""
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    weights, drafter = open_model(name, args.device)
    real = name.startswith("smollm2") or Path(name).exists()
    rounded = OnDevice(weights, args.device, dtype)
    out: dict[str, Any] = {}
    plain: list[list[int]] = []
    for form in args.forms:
        row: dict[str, Any] = {"steps": {}}
        begun, rival = time.perf_counter(), None
        try:
            options = setup_of(form, rounded, drafter, context_of(args), args)
            rival = open_rival(form, options, args)
            if real:
                row["text"] = check_tokens(rival, rounded, args)
                texts = row["text"].pop("texts")
                plain = plain or texts
                row["text"]["texts_as_plain"] = sum(a == b for a, b in zip(texts, plain))
            rival.force(COMMITTED - 1)
            for context in args.contexts:
                if FORMS[form][1]["attention"] == "sdpa" and context > MOST_SDPA:
                    continue
                steps = 6 if form == "eager" else args.steps
                row["steps"][str(context)] = timed(rival, context, steps, args.rounds)
        except Exception as error:  # a compiler that is missing, a shape that does not fit
            failed[f"{name}, {form}"] = f"{type(error).__name__}: {error}"[:400]
            print(f"{name} {form}: {type(error).__name__}: {str(error)[:1500]}", flush=True)
        rival = None
        forget()
        row["seconds"] = time.perf_counter() - begun
        if row["steps"]:
            out[form] = row
        us = {n: round(step["us"]) for n, step in row["steps"].items()}
        print(f"{name}, {form}: {row['seconds']:.1f} s", us, row.get("text", ""), flush=True)
    return out


if __name__ == "__main__":
    main()
