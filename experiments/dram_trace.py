"""DRAM, SMs and tensor pipe over time, sampled every 5 us: where is the GPU idle, and how long?

    python -m experiments.dram_trace [--kernels DIR] [--pdl DIR] [--models llama-3.1-8b ...]

Each contender decodes for some 50 ms at N rows behind a context of --context positions: a host's
loop over captured graphs, our own phases in one graph, the persistent kernel. Beside them, in the
same run, our pure stream of bulk copies, which the means are a share of. The tensor pipe comes from
a second run, since it does not fit the same pass; both excerpts begin in the middle of their run
and share an axis, not a moment.

`phase_slots`, without --quick: a last step of the small model by the kernel's own stamps, with the
DRAM samples that were taken meanwhile, for Perfetto, beside the result file (the kernel is
timed-MODEL-phases). The megakernel is parked while the sampler is set up: calls beside a resident
kernel could wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments import phase_slots, pm_sampling
from experiments.baseline_steps import COMMITTED, FORMS, PDL, forget, open_rival, setup_of
from experiments.baselines.models import OnDevice, open_model
from experiments.baselines.pdl_plan import MODELS as PDL_MODELS
from experiments.common import figure, need_gpu, parser, quiet, save
from experiments.cubins import TRACED, engine_runs, find
from experiments.pm_sampling import DRAM, SM

MODELS = ("llama-3.1-8b", "smollm2-135m")
SHOWN = ("graph_host_tree", "graph_pdl")
SECONDS = 0.05
MOST_STEPS = 100  # of a rival's run
EXCERPT = 1000  # samples kept for the picture: 5 ms
SLOTS_OF = "smollm2-135m"  # its phase slots go to Perfetto
BEGUN = time.perf_counter()


def excerpt(trace: pm_sampling.Trace, metric: str) -> list[float]:
    """Samples from the middle of a trace."""
    middle = max((len(trace.start) - EXCERPT) // 2, 0)
    return [round(v, 1) for v in trace.column(metric)[middle : middle + EXCERPT].tolist()]


def record(work: Callable[[], float | None], tensor: bool = True) -> dict[str, Any]:
    """A pass over a contender, and one for the tensor pipe: figures, and excerpts from the middle,
    a sample every INTERVAL_NS. What work returns are seconds at the beginning that do not count: a
    prompt's."""
    trace = pm_sampling.sample(work, [DRAM, SM])
    row: dict[str, Any] = {"dram": trace.figures(DRAM), "sm_active": trace.figures(SM)}
    row["excerpt_dram"], row["excerpt_sm"] = excerpt(trace, DRAM), excerpt(trace, SM)
    if tensor and (second := pm_sampling.sample_tensor(work)) is not None:
        metric = second.metrics[0]
        row["tensor"] = second.figures(metric) | {"metric": metric}
        row["excerpt_tensor"] = excerpt(second, metric)
    return row


def streams(args: Any) -> dict[str, dict[str, Any]]:
    """Our pure stream; torch's reads where its kernel is missing."""
    source = torch.empty(8 << 30, dtype=torch.uint8, device="cuda").fill_(1)
    words = source.view(torch.float32)

    def read() -> None:
        for _ in range(8):
            words.amax()
        torch.cuda.synchronize()

    works: dict[str, Callable[[], None]] = {"reads": read}
    if args.pdl and (args.pdl / "pure-stream.json").exists():
        from cute_kernels.gpu.load import Kernel

        kernel = Kernel.read(args.pdl / "pure-stream")
        copies = len(source) // kernel.manifest["grid"] // (16 << 10)

        def stream() -> None:
            at = torch.cuda.current_stream().cuda_stream
            for _ in range(12):
                kernel.launch([source.data_ptr(), copies], "qi", at, cooperative=False)
            torch.cuda.synchronize()

        works = {"pure stream": stream}
    out = {}
    for name, work in works.items():
        work()  # loads what the first call loads, with the sampler as without
        pm_sampling.sample(work, [DRAM, SM])
        out[name] = record(work, tensor=False)
        say("", name, out[name])
    return out


class Rivals:
    """The rivals of one model; its weights are read when the first one is opened."""

    def __init__(self, model: str, args: Any) -> None:
        self.model, self.args = model, args
        self.held: tuple[Any, Any] | None = None

    def trace(self, form: str) -> dict[str, Any]:
        """Some steps behind random keys."""
        args = self.args
        if self.held is None:
            weights, drafter = open_model(self.model, "cuda")
            self.held = OnDevice(weights, "cuda", torch.bfloat16), drafter
        setup = setup_of(form, *self.held, args.ctx, args, forced=COMMITTED - 1)
        made = open_rival(form, setup, args)
        made.pretend(args.context, MOST_STEPS * COMMITTED // made.core.most + 4)
        for _ in range(5):
            made.step()
        made.finish()

        def decode() -> None:
            made.core._begin(args.context)
            made.begin(args.context)
            begun, steps = time.perf_counter(), 0
            while time.perf_counter() - begun < SECONDS and steps < MOST_STEPS:
                made.step()
                steps += 1
            made.finish()

        return record(decode)


def megakernel(model: str, args: Any) -> dict[str, Any]:
    """The engine, its drafts scripted."""
    from experiments.megakernel import Megakernel, random_ids

    new = args.new_tokens
    ctx = args.context + 2 * new
    with Megakernel(model, ctx, args.kernels, args.rows - 1, scripted=True) as kernel:
        prompt = random_ids(args.context, kernel.vocab)
        kernel.prepare(prompt, new, 0.8)
        step = kernel.run(prompt, new)

        def decode() -> float:
            row = kernel.run(prompt, new)
            kernel.engine.park()
            return float(row["ttft_s"]) + 0.002

        kernel.engine.park()
        row = record(decode)
        row["step"] = step
    return row


def slots(args: Any) -> dict[str, Any]:
    """A verify step of the timed kernel under the sampler, into a file for Perfetto."""
    from cute_kernels.gpu.config import product
    from cute_kernels.gpu.load import Kernel
    from cute_kernels.gpu.script import decode_step
    from tests.gpu.model import Context, Model
    from tests.gpu.rig import Rig

    c, steps = product(SLOTS_OF, timing=True), 40
    rig = Rig(
        Kernel.read(args.pdl / f"timed-{SLOTS_OF}-phases"), c, Model(c.shape, seed=3).packed(c),
        Context(c.shape, args.context, steps + 16, 4),
    )  # fmt: skip
    tokens = [(7 + 131 * i) % c.shape.vocab for i in range(args.rows)]
    script = [
        decode_step(tokens, args.context + i, c.shape.layers, free=i > 0) for i in range(steps)
    ]

    def work() -> None:
        rig.run(script)

    work()
    trace = pm_sampling.sample(work, [DRAM, SM])
    times = rig.times.cpu().numpy()
    begin, end = int(times[times > 0].min()), int(times.max())
    clock = "the sampler's"
    if not (trace.start[0] <= begin and end <= trace.end[-1] + 1e6):
        # Clocks of their own: the last step ends where the last busy sample does.
        shift = end - int(trace.end[-1])
        trace.start += shift
        trace.end += shift
        clock = "its own; laid over the samples by their last busy one"
    near = (trace.start > begin - 5e4) & (trace.start < end + 5e4)
    events = list(phase_slots.slots(times, begin))
    for metric, name in ((DRAM, "DRAM, % of the peak"), (SM, "SMs active, %")):
        values = trace.column(metric)[near]
        events += phase_slots.counters(name, trace.start[near], values, begin)
    path = args.json.with_name("phase_slots.perfetto.json.gz")
    title = f"{SLOTS_OF}, {args.rows} rows at {args.context}: the kernel's phase slots"
    phase_slots.write(path, title, events)
    print(f"{path}: {len(events)} events, {path.stat().st_size} bytes; clock: {clock}", flush=True)
    return {
        "file": path.name, "model": SLOTS_OF, "rows": args.rows, "context": args.context,
        "step_us": (end - begin) / 1e3, "clock": clock, "events": len(events),
        "phases": summary(times),
    }  # fmt: skip


def summary(times: np.ndarray) -> dict[str, dict[str, float]]:
    """us of a phase by part, means over CTAs and layers."""
    t, n = times.astype(np.float64) / 1e3, times.shape[1] - 1
    between = t[:, 1:n:4, 0] - t[:, 0:n:4, 3]
    both = (t[:, 1:n:4, 0] > 0) & (t[:, 0:n:4, 0] > 0)
    out = {"attention": {"between qkv and o": round(float(between[both].mean()), 2)}}
    for i, kind in enumerate((*phase_slots.KINDS, "lm")):
        v = t[:, i:n:4] if kind != "lm" else t[:, n:]
        v = np.maximum(v[v[..., 0] > 0], 0)
        parts = np.diff(np.maximum.accumulate(v, axis=1), axis=1).mean(0)
        names = phase_slots.PARTS
        out[kind] = {name: round(float(us), 2) for name, us in zip(names, parts, strict=True)}
    return out


def say(model: str, form: str, row: dict[str, Any]) -> None:
    d = row["dram"]
    print(
        f"{model:14s} {form:36s} DRAM {d['mean_percent']:5.1f} %, idle {d['idle_share']:6.2%} of "
        f"{d['samples']} samples, longest gap {d['longest_gap_us']:7.1f} us, "
        f"SMs active {row['sm_active']['mean_percent']:5.1f} %, "
        f"tensor {row.get('tensor', {}).get('mean_percent', float('nan')):.1f} % "
        f"[{time.perf_counter() - BEGUN:.0f} s]",
        flush=True,
    )


def main() -> None:
    """Command line."""
    made = parser(__doc__, "dram_trace")
    made.add_argument("--models", nargs="+", default=list(MODELS))
    made.add_argument("--context", type=int, default=1024)
    made.add_argument("--ctx", type=int, default=8352, help="positions of the rivals' caches")
    made.add_argument("--forms", nargs="*", default=list(SHOWN), choices=list(FORMS))
    made.add_argument("--rows", type=int, default=16)
    made.add_argument("--new-tokens", type=int, default=256)
    made.add_argument("--pdl", type=Path, help="kernels of graph_pdl, built beforehand")
    made.add_argument(
        "--kernels", help="the engine's kernels, built beforehand; without, built here"
    )
    args = made.parse_args()
    need_gpu("dram_trace", "cupti-python and nvidia-cuda-cupti")
    quiet()
    args.device = "cuda"
    args.pdl = find(args.pdl, *TRACED)
    if args.pdl is None:
        args.forms = [form for form in args.forms if FORMS[form][0] != PDL]
    torch.zeros(1, device="cuda")
    plain = streams(args)
    forget()
    # Over active samples: the window of a stream may begin before it does.
    best = max(
        row["dram"]["mean_percent"] / (1 - row["dram"]["idle_share"]) for row in plain.values()
    )
    fields: dict[str, Any] = {
        "context": args.context, "rows": args.rows, "interval_us": pm_sampling.INTERVAL_NS / 1e3,
        "streams": plain, "stream_mean_percent": best, "models": {}, "failed": {},
        "figures": {"stream, DRAM, % of the peak": figure([best])},
    }  # fmt: skip

    def attempt(name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """One that fails does not stop the others."""
        try:
            return work()
        except Exception as error:
            fields["failed"][name] = f"{type(error).__name__}: {error}"[:400]
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            return None

    shown = [*(["megakernel"] if engine_runs(args.kernels) else []), *args.forms]
    for model in args.models:
        rows: dict[str, Any] = {}
        fields["models"][model] = rows
        rivals = Rivals(model, args)
        # The engine first: whatever a rival does to the process, its trace is written.
        for form in shown:
            if FORMS.get(form, ("",))[0] == PDL and model not in PDL_MODELS:
                continue
            if form in FORMS:
                row = attempt(f"{model}, {form}", lambda: rivals.trace(form))  # noqa: B023
            else:
                row = attempt(f"{model}, {form}", lambda: megakernel(model, args))  # noqa: B023
            forget()
            if row is not None:
                row["dram"]["of_the_stream"] = row["dram"]["mean_percent"] / best
                rows[form] = row
                share = figure([row["dram"]["of_the_stream"]], "share")
                fields["figures"][f"{model}, {form}, DRAM, share of the stream"] = share
                say(model, form, row)
                save("dram_trace", args.json, "cuda", fields, args.quick)
        rivals.held = None
        forget()
    if args.pdl and not args.quick and (args.pdl / f"timed-{SLOTS_OF}-phases.json").exists():
        if (found := attempt("phase slots", lambda: slots(args))) is not None:
            fields["phase_slots"] = found
        save("dram_trace", args.json, "cuda", fields, args.quick)
    print(f"{time.perf_counter() - BEGUN:.0f} s")


if __name__ == "__main__":
    main()
