"""Run every experiment that can run here, then write the report.

    python -m experiments.run_all --quick|--full [--only NAME ...] [--results FOLDER]
                                  [--kernels FOLDER] [--cubins FOLDER]

--quick takes at most 8 minutes of a GPU's time. Each experiment is a process of its own; one that
fails is said at the end and does not stop the others. Without a GPU only those of the CPU device
run, and the others are named with what they need. Kernels are built beforehand, on any machine:
`megadecode build --model MODEL --folder FOLDER` for --kernels; for --cubins
`python -m tests.gpu.kernels FOLDER timed-smollm2-135m timed-llama-3.2-1b` and
`python -m experiments.baselines.pdl_kernels FOLDER`. Without them the rivals run alone.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from experiments.common import RESULTS, default_device


@dataclass(frozen=True)
class Experiment:
    """gpu: needs one. kernels, pdl: takes those options. cubins: cannot run without the folder,
    its first argument. quick: options of a quick run beside --quick."""

    name: str
    gpu: bool = True
    kernels: bool = False
    pdl: bool = False
    cubins: bool = False
    quick: tuple[str, ...] = ()


EXPERIMENTS = (
    Experiment("pdl_steps", cubins=True),
    Experiment("baseline_steps", pdl=True, quick=("--models", "smollm2-135m")),
    Experiment("context_sweep", kernels=True, pdl=True, quick=("--contexts", "1024", "8192")),
    Experiment("dram_trace", kernels=True, pdl=True, quick=("--models", "smollm2-135m")),
    Experiment("host_stall", kernels=True, pdl=True),
    Experiment("public_megakernel", cubins=True),
    Experiment("tree_build", gpu=False),
    Experiment("step_breakdown", gpu=False),
    Experiment("chain_or_tree", gpu=False, kernels=True),
    Experiment("verify_attention"),
    Experiment("kv_fragmentation"),
    Experiment("marshaling"),
    Experiment("compaction"),
)


def missing(e: Experiment, gpu: bool, args: argparse.Namespace) -> str | None:
    """What keeps an experiment from running here, or None."""
    if e.gpu and not gpu:
        return "an NVIDIA GPU"
    if e.cubins and args.cubins is None:
        return "--cubins"
    return None


def command(e: Experiment, args: argparse.Namespace) -> list[str]:
    """The command line of an experiment."""
    words = [sys.executable, "-m", f"experiments.{e.name}"]
    words += [str(args.cubins)] if e.cubins else []
    words += ["--json", str(args.results / f"{e.name}.json")]
    words += ["--quick", *e.quick] if args.quick else []
    words += ["--kernels", str(args.kernels)] if e.kernels and args.kernels else []
    words += ["--pdl", str(args.cubins)] if e.pdl and args.cubins else []
    return words


def main() -> None:
    """Command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    size = made.add_mutually_exclusive_group(required=True)
    size.add_argument("--quick", action="store_true")
    size.add_argument("--full", action="store_true")
    made.add_argument("--only", nargs="+", choices=[e.name for e in EXPERIMENTS])
    made.add_argument("--results", type=Path, default=RESULTS)
    made.add_argument("--kernels", type=Path, help="the engine's kernels, built beforehand")
    made.add_argument("--cubins", type=Path, help="timed and phase kernels, built beforehand")
    made.add_argument("--no-report", action="store_true", help="result files only")
    args = made.parse_args()
    gpu = default_device() == "cuda"
    failed = []
    for e in EXPERIMENTS:
        if args.only and e.name not in args.only:
            continue
        if (need := missing(e, gpu, args)) is not None:
            print(f"{e.name} is not run: it needs {need}")
            continue
        words = command(e, args)
        print("#", *words[1:], flush=True)
        begun = time.perf_counter()
        code = subprocess.run(words, check=False).returncode
        print(f"# {e.name}: {time.perf_counter() - begun:.0f} s\n", flush=True)
        if code:
            failed.append(e.name)
    if not args.no_report:
        subprocess.run([sys.executable, "-m", "experiments.report"], check=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
