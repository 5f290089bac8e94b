"""Run every experiment that can run here, then write the report.

    python -m experiments.run_all --quick|--full [--only NAME ...] [--results FOLDER]

--quick takes at most 8 minutes of a GPU's time. Each experiment is a process of its own; one that
fails is said at the end and does not stop the others. Without a GPU only those of the CPU device
run, and the others are named with what they need.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from experiments.common import RESULTS, default_device

# name, needs a GPU, options for --quick beside --quick itself
EXPERIMENTS: tuple[tuple[str, bool, tuple[str, ...]], ...] = (
    ("baseline_steps", True, ("--models", "smollm2-135m")),
    ("tree_build", False, ()),
    ("verify_attention", True, ()),
    ("kv_fragmentation", True, ()),
    ("step_breakdown", False, ()),
    ("chain_or_tree", False, ()),
    ("marshaling", True, ()),
    ("compaction", True, ()),
    ("context_sweep", True, ("--contexts", "1024", "8192")),
    ("dram_trace", True, ("--models", "smollm2-135m")),
    ("host_stall", True, ()),
)
KERNELS = ("chain_or_tree", "context_sweep", "dram_trace", "host_stall")  # take --kernels


def main() -> None:
    """Command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    size = made.add_mutually_exclusive_group(required=True)
    size.add_argument("--quick", action="store_true")
    size.add_argument("--full", action="store_true")
    made.add_argument("--only", nargs="+", choices=[name for name, _, _ in EXPERIMENTS])
    made.add_argument("--results", type=Path, default=RESULTS)
    made.add_argument("--kernels", help="kernels built beforehand (`megadecode build --folder`)")
    made.add_argument("--no-report", action="store_true", help="result files only")
    args = made.parse_args()
    gpu = default_device() == "cuda"
    failed, left = [], []
    for name, needs_gpu, quick in EXPERIMENTS:
        if args.only and name not in args.only:
            continue
        if needs_gpu and not gpu:
            left.append(name)
            continue
        command = [sys.executable, "-m", f"experiments.{name}"]
        command += ["--json", str(args.results / f"{name}.json")]
        command += ["--quick", *quick] if args.quick else []
        command += ["--kernels", args.kernels] if args.kernels and name in KERNELS else []
        print("#", *command[1:], flush=True)
        begun = time.perf_counter()
        code = subprocess.run(command, check=False).returncode
        print(f"# {name}: {time.perf_counter() - begun:.0f} s\n", flush=True)
        if code:
            failed.append(name)
    if left:
        print(f"not run, they need an NVIDIA GPU: {', '.join(left)}")
    if not args.no_report:
        subprocess.run([sys.executable, "-m", "experiments.report"], check=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
