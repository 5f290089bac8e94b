"""Where a figure comes from: revision, machine, software, date. Every JSON result carries it."""

import datetime
import functools
import os
import pathlib
import platform
import subprocess
from typing import Any


@functools.cache
def _output(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=30, cwd=pathlib.Path(__file__).parent
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def revision() -> str:
    """The git revision, with `+changes` if tracked files differ from it. Where a checkout was
    copied without its history, or with another's, MEGADECODE_REVISION says it; else `unknown`."""
    told = os.environ.get("MEGADECODE_REVISION")
    if told:
        return told
    rev = _output("git", "rev-parse", "--short=12", "HEAD")
    if not rev:
        return "unknown"
    dirty = _output("git", "status", "--porcelain", "--untracked-files=no")
    return rev + ("+changes" if dirty else "")


def provenance() -> dict[str, Any]:
    """Plain data for a result file; fields of absent parts (GPU, torch) are left out."""
    out: dict[str, Any] = {
        "revision": revision(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
    }
    query = "--query-gpu=name,driver_version,clocks.sm,clocks.mem,power.limit"
    gpu = _output("nvidia-smi", query, "--format=csv,noheader")
    if gpu:
        names = ("gpu", "driver", "sm_clock", "memory_clock", "power_limit")
        out.update(zip(names, (v.strip() for v in gpu.splitlines()[0].split(",")), strict=False))
    try:
        import torch

        out["torch"] = str(torch.__version__)
    except ImportError:
        pass
    return out
