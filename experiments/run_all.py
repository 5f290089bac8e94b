"""Run every experiment that can run here, then write the report.

    python -m experiments.run_all --quick|--full [--only | --skip NAME ...] [--results FOLDER]
                                  [--kernels FOLDER] [--cubins FOLDER]

--quick takes at most 8 minutes of a GPU's time. Each experiment is a process of its own with a time
limit; one that fails or runs out of time is said at the end and does not stop the others, and what
it had written stays. How long each took goes to run_quick.json or run_full.json beside the results.
Without a GPU only those of the CPU device run, and the others are named with what they need.

Kernels may be built beforehand, on any machine: `megadecode build --model MODEL --folder FOLDER`
for --kernels, `python -m experiments.cubins FOLDER` for --cubins. Otherwise they are built here,
where the CuTe DSL is installed. Two runs: `python -m experiments.agreement FOLDER OTHER`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from experiments.common import RESULTS, default_device, other_place
from experiments.provenance import provenance


@dataclass(frozen=True)
class Experiment:
    """limit: seconds that a full run may take, quick_limit: a quick one. gpu: needs one. kernels,
    cubins, pdl: takes that option, the last two with the same folder. full, quick: options beside
    --quick of such a run."""

    name: str
    limit: int
    quick_limit: int
    gpu: bool = True
    kernels: bool = False
    cubins: bool = False
    pdl: bool = False
    full: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()


FEW = (  # forms of a quick run: as it is commonly written, fused, with our phases, without a host
    "graph_host_tree", "graph_host_tree, split-KV, fused", "graph_host_tree, our phases",
    "graph_pdl",
)  # fmt: skip
# The headline figures first; last the one that keeps all cores busy, and would disturb the others.
EXPERIMENTS = (
    Experiment("baseline_steps", 120, 60, pdl=True, full=("--skip", "plain"),
               quick=("--models", "smollm2-135m", "--forms", *FEW)),
    Experiment("context_sweep", 120, 50, kernels=True, pdl=True,
               quick=("--contexts", "1024", "16384", "--forms", "graph_host_tree", "graph_pdl")),
    Experiment("dram_trace", 90, 50, kernels=True, pdl=True, quick=("--models", "smollm2-135m")),
    Experiment("pdl_steps", 80, 40, kernels=True, cubins=True,
               quick=("--models", "smollm2-135m")),
    Experiment("chain_or_tree", 60, 40, gpu=False, kernels=True),
    Experiment("verify_attention", 90, 40, cubins=True),
    Experiment("tree_build", 25, 20, gpu=False, cubins=True),
    Experiment("kv_fragmentation", 35, 25, cubins=True),
    Experiment("public_megakernel", 25, 20, cubins=True),
    Experiment("compaction", 20, 15, cubins=True),
    Experiment("marshaling", 20, 15),
    Experiment("step_breakdown", 90, 55, gpu=False),
    Experiment("host_stall", 125, 60, kernels=True, pdl=True),
)  # fmt: skip


def missing(e: Experiment, gpu: bool, args: argparse.Namespace) -> str | None:
    """What keeps an experiment from running here, or None."""
    if e.gpu and not gpu:
        return "an NVIDIA GPU"
    return None


def command(e: Experiment, args: argparse.Namespace) -> list[str]:
    """The command line of an experiment."""
    words = [sys.executable, "-m", f"experiments.{e.name}"]
    words += ["--json", str(args.results / f"{e.name}.json")]
    words += ["--quick", *e.quick] if args.quick else [*e.full]
    words += ["--kernels", str(args.kernels)] if e.kernels and args.kernels else []
    words += ["--cubins", str(args.cubins)] if e.cubins and args.cubins else []
    words += ["--pdl", str(args.cubins)] if e.pdl and args.cubins else []
    return words


def run(words: list[str], limit: float) -> int | None:
    """Exit code, or None if it did not end in time: then it is stopped with all it has started."""
    with subprocess.Popen(words, start_new_session=True) as process:
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return None


class Log:
    """How long the experiments took: run_quick.json or run_full.json, written after each of them.
    A run of some of them goes on with the others' lines where they are of the same revision."""

    def __init__(self, args: argparse.Namespace, device: str) -> None:
        self.size, origin = "quick" if args.quick else "full", provenance()
        self.about = {
            "about": f"python -m experiments.run_all --{self.size}",
            "device": origin.get("gpu", "cuda") if device == "cuda" else "cpu", **origin,
        }  # fmt: skip
        self.path = other_place(args.results / f"run_{self.size}.json", device)
        self.seconds: dict[str, float] = {}
        self.failed: dict[str, str] = {}
        if args.only and self.path.exists():
            old = json.loads(self.path.read_text())
            if all(old[key] == self.about[key] for key in ("device", "revision")):
                self.seconds, self.failed = old["seconds"], old["failed"]

    def note(self, name: str, seconds: float, wrong: str | None) -> None:
        self.seconds[name] = seconds
        self.failed.pop(name, None)
        if wrong:
            self.failed[name] = wrong
        total = sum(self.seconds.values())
        fields = {"seconds": self.seconds, "total_s": total, "failed": self.failed}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.about | fields, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    size = made.add_mutually_exclusive_group(required=True)
    size.add_argument("--quick", action="store_true")
    size.add_argument("--full", action="store_true")
    names = [e.name for e in EXPERIMENTS]
    made.add_argument("--only", nargs="+", choices=names)
    made.add_argument("--skip", nargs="+", choices=names, default=[])
    made.add_argument("--results", type=Path, default=RESULTS)
    made.add_argument("--kernels", type=Path, help="the engine's kernels, built beforehand")
    made.add_argument("--cubins", type=Path, help="the experiments' own kernels, built beforehand")
    made.add_argument("--within", type=float, default=3600.0, help="seconds for all of them")
    made.add_argument("--no-report", action="store_true", help="result files only")
    args = made.parse_args()
    begun, device = time.perf_counter(), default_device()
    gpu, log, failed = device == "cuda", Log(args, device), {}
    for e in EXPERIMENTS:
        if (args.only and e.name not in args.only) or e.name in args.skip:
            continue
        if (need := missing(e, gpu, args)) is not None:
            print(f"{e.name} is not run: it needs {need}")
            continue
        left = args.within - (time.perf_counter() - begun)
        if left < 5:
            failed[e.name] = "no time was left"
            continue
        limit = min(left, e.quick_limit if args.quick else e.limit) if gpu else 3600.0
        words = command(e, args)
        print("#", *words[1:], flush=True)
        start = time.perf_counter()
        code = run(words, limit)
        seconds = time.perf_counter() - start
        if code != 0:
            failed[e.name] = f"not ready after {limit:.0f} s" if code is None else f"exit {code}"
        print(f"# {e.name}: {seconds:.0f} s {failed.get(e.name, '')}\n", flush=True)
        log.note(e.name, seconds, failed.get(e.name))
    if not args.no_report:
        subprocess.run([sys.executable, "-m", "experiments.report"], check=True)
    if not log.seconds and not failed:
        raise SystemExit("nothing was run")
    if failed:
        raise SystemExit("failed: " + "; ".join(f"{k}: {v}" for k, v in failed.items()))


if __name__ == "__main__":
    main()
