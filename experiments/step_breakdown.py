"""Where a step's time goes in a host's loop, and which diagnosis each signature allows.

    python -m experiments.step_breakdown [--device cpu] [--context 512]

`host_us`: the host's clock over `graph_host_tree`: launches, waits, unpacking, heap, mask,
marshaling, acceptance; on a GPU beside it `device_us`, the device's own time of the two graphs and
of the copies between them (the candidates', the tree's, the choices'): what is left is idle. (On
the CPU a launch is the work itself.) On the CPU device the engine's own stages stand
beside it.

`switches`, on a GPU: one hypothesis at a time: the drafter with full attention in place of its
window, the verify launched kernel by kernel in place of replayed, and a scheduler of the host that
takes PAUSE_S every TURN steps. With CUPTI each has its traces, DRAM and in
a second pass the tensor pipe. A signature is `flat` where both lie under 1 % in most samples: that
is what "basically idle all the time" looks like, and the figures say which hypotheses give it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch

from experiments.baseline_steps import COMMITTED, FORMS, forget, replay_us, setup_of, timed
from experiments.baselines import TURN, Baseline, HostTree, Setup, make
from experiments.baselines.models import OnDevice, open_model
from experiments.common import default_device, figure, parser, quiet, save
from megadecode.drafter.config import FULL
from megadecode.drafter.io import Drafter

PAUSE_S = 0.07
FLAT = 0.8  # of both traces' samples idle
BINS = 400  # of a trace as it is kept
BEGUN = time.perf_counter()


class EagerVerify(HostTree):
    """Drafts from a graph, verifies kernel by kernel."""

    name = "eager verify"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        pool, self._pool = self._pool, None
        self._verify = self.graph("verify")
        self._pool = pool


def full_attention(drafter: Drafter) -> Drafter:
    """The same drafter without its window. What it drafts is another matter; its time is meant."""
    config = dataclasses.replace(
        drafter.config, layer_types=(FULL,) * drafter.config.layers, window=None, is_causal=False
    )
    return Drafter(config, drafter.tensors())


def copies_us(rival: HostTree, rounds: int = 20) -> dict[str, float]:
    """The device's time of the copies of a step, one of each."""
    core, out = rival.core, {}
    copies = {
        "top-k copy": (rival._ranked, core.ranked), "tree copy": (core.plan, rival._plan),
        "choices copy": (rival._decided, core.decided),
    }  # fmt: skip
    for name, (target, source) in copies.items():
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(rounds):
            target.copy_(source, non_blocking=True)
        end.record()
        torch.cuda.synchronize()
        out[name] = start.elapsed_time(end) * 1e3 / rounds
    return out


def binned(trace: Any, metric: str) -> dict[str, list[float]]:
    """A whole trace as means over BINS equal stretches: us of their beginnings, per cent."""
    values = trace.column(metric)
    parts = max(len(values) // BINS, 1)
    whole = values[: len(values) // parts * parts].reshape(-1, parts).mean(1)
    at = (trace.start[: len(whole) * parts : parts] - trace.start[0]) / 1e3
    return {"us": at.round(0).tolist(), "percent": whole.round(1).tolist()}


def traces(rival: Baseline, context: int, steps: int) -> dict[str, Any]:
    """DRAM and tensor pipe over some steps; empty without CUPTI."""
    from experiments import pm_sampling

    def work() -> None:
        rival.core._begin(context)
        rival.begin(context)
        for _ in range(steps):
            rival.step()
        rival.finish()

    try:
        first = pm_sampling.sample(work, [pm_sampling.DRAM, pm_sampling.SM])
        second = pm_sampling.sample_tensor(work)
    except (ImportError, RuntimeError, ValueError, PermissionError) as error:
        print(f"no trace: {error}")
        return {}
    out: dict[str, Any] = {
        "dram": first.figures(pm_sampling.DRAM), "trace_dram": binned(first, pm_sampling.DRAM),
    }  # fmt: skip
    if second is not None:
        metric = second.metrics[0]
        out["tensor"] = second.figures(metric) | {"metric": metric}
        out["trace_tensor"] = binned(second, metric)
        shares = out["dram"]["idle_share"], out["tensor"]["idle_share"]
        out["flat"] = min(shares) >= FLAT
    return out


LEFT_OUT = "drafter with full attention"
"""Of a quick run's switches."""


def switches(weights: Any, drafter: Drafter, args: Any) -> dict[str, dict[str, Any]]:
    """One hypothesis at a time."""
    ctx, steps = args.context + 80 * COMMITTED, TURN

    def base(kind: type[HostTree], draft: Drafter = drafter) -> HostTree:
        setup = setup_of("graph_host_tree, split-KV", weights, draft, ctx, args, forced=0)
        return kind(setup)

    def scheduled() -> HostTree:
        made = base(HostTree)
        made.scheduler_s = PAUSE_S
        return made

    cases: dict[str, Callable[[], HostTree]] = {
        "as it is": lambda: base(HostTree),
        "drafter with full attention": lambda: base(HostTree, full_attention(drafter)),
        "verify not replayed": lambda: base(EagerVerify),
        f"host scheduling: {PAUSE_S * 1e3:.0f} ms every {TURN} steps": scheduled,
    }
    out = {}
    for name, open_rival in cases.items():
        if args.quick and name == LEFT_OUT:
            continue
        rival = open_rival()
        row: dict[str, Any] = {"us": timed(rival, args.context, steps, 1)["us"]}
        row |= traces(rival, args.context, steps)
        out[name] = row
        said = f"{name:40s} {row['us']:9.1f} us"
        for what in ("dram", "tensor"):
            if what in row:
                said += (
                    f", {what} {row[what]['mean_percent']:.1f} %, idle "
                    f"{row[what]['idle_share']:.1%}, gap {row[what]['longest_gap_us']:.0f} us"
                )
        flat = ", flat" if row.get("flat") else ""
        print(f"{said}{flat} [{time.perf_counter() - BEGUN:.0f} s]", flush=True)
        del rival
        forget()
    return out


def engine_stages(args: Any) -> dict[str, float]:
    """The CPU device's own stages at the same size, us a step."""
    from megadecode import Engine, SamplingParams
    from megadecode.trace import stage_us

    ids = [1000 + i % 40000 for i in range(args.context)]
    with Engine(args.model, ctx=args.context + 64, slots=1, budget=args.rows - 1) as engine:
        engine.submit(ids[:64], SamplingParams(max_new_tokens=4)).result()
        engine.trace(reset=True)
        engine.submit(ids, SamplingParams(max_new_tokens=24, ignore_eos=True)).result()
        return stage_us([f for f in engine.trace() if f.kind == "decode"])


def main() -> None:
    """Command line."""
    made = parser(__doc__, "step_breakdown")
    made.add_argument("--device", default=default_device())
    made.add_argument("--model", default="smollm2-135m")
    made.add_argument("--context", type=int, default=0, help="0: 46,000 on a GPU, 512 elsewhere")
    made.add_argument("--rows", type=int, default=16)
    made.add_argument("--steps", type=int, default=24)
    args = made.parse_args()
    quiet()
    gpu = args.device == "cuda"
    args.context = args.context or (46000 if gpu else 512)
    if args.quick or not gpu:
        args.steps = min(args.steps, 8)
    weights, drafter = open_model(args.model, args.device)
    rounded = OnDevice(weights, args.device, torch.bfloat16 if gpu else torch.float32)
    form = "graph_host_tree, split-KV" if gpu else "graph_host_tree"
    ctx = args.context + (args.steps + 8) * COMMITTED
    rival = make(FORMS[form][0], setup_of(form, rounded, drafter, ctx, args, forced=COMMITTED - 1))
    row = timed(rival, args.context, args.steps, 1 if args.quick or not gpu else 3)
    stages = dict(row["host_us"])
    fields: dict[str, Any] = {
        "model": args.model, "context": args.context, "rows": args.rows, "form": form,
        "us": row["us"], "rounds": row["rounds"], "host_us": stages,
        "figures": {"a step, us": figure(row["rounds"], "host")},
    }  # fmt: skip
    if gpu:
        rival.pretend(args.context, 4)
        assert isinstance(rival, HostTree)
        device = dict(zip(("commit and draft", "verify"), replay_us(rival, 5))) | copies_us(rival)
        fields["device_us"], fields["idle_us"] = device, row["us"] - sum(device.values())
    del rival
    forget()
    spent = time.perf_counter() - BEGUN
    print(f"{form} at {args.context}: {row['us']:.0f} us a step [{spent:.0f} s]", flush=True)
    for stage, us in stages.items():
        print(f"  {stage:10s} {us:10.1f} us  {us / sum(stages.values()):6.1%}")
    if gpu:
        cells = ", ".join(f"{name} {us:.1f}" for name, us in fields["device_us"].items())
        print(f"  on the device: {cells}, idle {fields['idle_us']:.0f} us")
        fields["flat_share"] = FLAT
        fields["switches"] = switches(rounded, drafter, args)
        fields["figures"] |= {
            f"{name}, us": figure([row["us"]], "host") for name, row in fields["switches"].items()
        }
    else:
        fields["engine_us"] = engine_stages(args)
        print("engine:", {k: round(v) for k, v in fields["engine_us"].items()})
    save("step_breakdown", args.json, args.device, fields, args.quick)


if __name__ == "__main__":
    main()
