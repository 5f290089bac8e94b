"""DRAM, SMs and tensor pipe over time, sampled every 5 us: where is the GPU idle, and how long?

    python -m experiments.dram_trace [--kernels DIR] [--models llama-3.1-8b smollm2-135m]

Each contender decodes for some 50 ms at N rows behind a context of --context positions: a host's
loop over captured graphs, the same fused, a whole step in one graph, the persistent kernel. Beside
them, in the same run, a stream of plain reads and one of copies; the better of the two is what the
means are a share of. The tensor pipe comes from a second run, since it does not fit the same pass.
The megakernel is parked while the sampler is set up: calls beside a resident kernel could wait for
it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from experiments import pm_sampling
from experiments.baseline_steps import COMMITTED, FORMS, PDL, forget, open_rival, setup_of
from experiments.baselines.models import OnDevice, open_model
from experiments.baselines.pdl_plan import MODELS as PDL_MODELS
from experiments.common import need_gpu, parser, quiet, save
from experiments.pm_sampling import DRAM, SM, TENSOR, Trace

MODELS = ("smollm2-135m", "llama-3.1-8b")
SHOWN = (
    "graph_host_tree", "graph_host_tree, split-KV, fused", "graph_whole_step, split-KV, fused",
    "graph_pdl",
)  # fmt: skip
SECONDS = 0.05
EXCERPT = 1200  # samples kept for the picture: 6 ms


def record(work: Callable[[], float | None]) -> dict[str, Any]:
    """Two passes over a contender: figures, and an excerpt from the middle of the first. What work
    returns are seconds at the beginning that do not count: a prompt's."""
    trace = pm_sampling.sample(work, [DRAM, SM])
    row: dict[str, Any] = {"dram": trace.figures(DRAM), "sm_active": trace.figures(SM)}
    middle = max((len(trace.start) - EXCERPT) // 2, 0)
    cut = slice(middle, middle + EXCERPT)
    row["excerpt_us"] = ((trace.start[cut] - trace.start[cut][0]) / 1e3).round(1).tolist()
    row["excerpt_dram"] = trace.column(DRAM)[cut].round(1).tolist()
    row["excerpt_sm"] = trace.column(SM)[cut].round(1).tolist()
    if (tensor := tensor_pass(work)) is not None:
        row["tensor"] = tensor.figures(tensor.metrics[0])
        row["tensor"]["metric"] = tensor.metrics[0]
    return row


def tensor_pass(work: Callable[[], float | None]) -> Trace | None:
    """The first tensor metric that this chip knows, or None."""
    for metric in TENSOR:
        try:
            return pm_sampling.sample(work, [metric, SM])
        except (ValueError, RuntimeError):
            continue
    return None


def streams() -> dict[str, dict[str, Any]]:
    """Plain reads, and copies."""
    source = torch.empty(8 << 30, dtype=torch.uint8, device="cuda").fill_(1)
    target = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    words = source.view(torch.float32)

    def read() -> None:
        for _ in range(8):
            words.amax()
        torch.cuda.synchronize()

    def copy() -> None:
        for _ in range(16):
            target.copy_(source[: 4 << 30])
        torch.cuda.synchronize()

    read()  # loads what the first call loads
    copy()
    return {"reads": record(read), "copies": record(copy)}


def rival(form: str, model: str, args: Any) -> dict[str, Any]:
    weights, drafter = open_model(model, "cuda")
    rounded = OnDevice(weights, "cuda", torch.bfloat16)
    ctx = args.context + 4096 * COMMITTED
    setup = setup_of(form, rounded, drafter, ctx, args, forced=COMMITTED - 1)
    made = open_rival(form, setup, args)
    made.pretend(args.context, 400)
    for _ in range(5):
        made.step()

    def decode() -> None:
        made.core._begin(args.context)
        made.begin(args.context)
        begun = time.perf_counter()
        while time.perf_counter() - begun < SECONDS and made.length < args.context + 1500:
            made.step()
        made.finish()

    row = record(decode)
    say(model, form, row)
    return row


def megakernel(model: str, args: Any) -> dict[str, Any]:
    from experiments.megakernel import Megakernel

    new = args.new_tokens
    with Megakernel(model, args.context + 2 * new, args.kernels, args.rows - 1) as kernel:
        kernel.open(args.context, new, 0.8)
        kernel.run(new)
        assert kernel.engine is not None

        def decode() -> float:
            row = kernel.run(new)
            kernel.engine.park()
            return float(row["ttft_s"]) + 0.002

        kernel.engine.park()
        row = record(decode)
        row["step"] = kernel.run(new)
    say(model, "megakernel", row)
    return row


def say(model: str, form: str, row: dict[str, Any]) -> None:
    d = row["dram"]
    print(
        f"{model:14s} {form:36s} DRAM {d['mean_percent']:5.1f} %, idle {d['idle_share']:6.2%} of "
        f"{d['samples']} samples, longest gap {d['longest_gap_us']:7.1f} us, "
        f"SMs active {row['sm_active']['mean_percent']:5.1f} %, "
        f"tensor {row.get('tensor', {}).get('mean_percent', float('nan')):.1f} %",
        flush=True,
    )


def main() -> None:
    """Command line."""
    made = parser(__doc__, "dram_trace")
    made.add_argument("--models", nargs="+", default=list(MODELS))
    made.add_argument("--context", type=int, default=1024)
    made.add_argument("--forms", nargs="*", default=list(SHOWN), choices=list(FORMS))
    made.add_argument("--rows", type=int, default=16)
    made.add_argument("--new-tokens", type=int, default=256)
    made.add_argument("--pdl", type=Path, help="kernels of graph_pdl, built beforehand")
    made.add_argument("--kernels", help="kernels built beforehand; without, the rivals alone")
    args = made.parse_args()
    need_gpu("dram_trace", "cupti-python and nvidia-cuda-cupti")
    quiet()
    args.device = "cuda"
    if args.pdl is None:
        args.forms = [form for form in args.forms if FORMS[form][0] != PDL]
    torch.zeros(1, device="cuda")
    plain = streams()
    forget()
    best = max(row["dram"]["mean_percent"] for row in plain.values())
    fields: dict[str, Any] = {
        "context": args.context, "rows": args.rows, "interval_us": 5, "streams": plain,
        "stream_mean_percent": best, "models": {}, "failed": {},
    }  # fmt: skip
    for row in plain.items():
        say("", *row)
    for model in args.models:
        rows = fields["models"][model] = {}
        # The engine first: whatever a rival does to the process, its trace is written.
        shown = [*(["megakernel"] if args.kernels else []), *args.forms]
        for form in shown:
            if FORMS.get(form, ("",))[0] == PDL and model not in PDL_MODELS:
                continue
            try:
                traced = megakernel(model, args) if form not in FORMS else rival(form, model, args)
            except Exception as error:  # one that fails does not stop the others
                fields["failed"][f"{model}, {form}"] = f"{type(error).__name__}: {error}"[:400]
                print(f"{model}, {form}: {type(error).__name__}: {error}", flush=True)
                continue
            traced["dram"]["of_the_stream"] = traced["dram"]["mean_percent"] / best
            rows[form] = traced
            save("dram_trace", args.json, "cuda", fields, args.quick)
            forget()


if __name__ == "__main__":
    main()
