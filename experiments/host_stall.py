"""Decoding while the host is busy or frozen: how much of its rate does each contender keep?

    python -m experiments.host_stall [--kernels DIR]

Three disturbances of the process that decodes: `frozen`: SIGSTOP for a second in every two;
`interpreter held`: another thread of the process runs Python without a pause; `cores busy`: as many
busy processes as the machine has cores. Rates are tokens over wall time while it lasts, as a share
of the undisturbed rate of the same contender. The persistent kernel writes into its ring meanwhile:
its rate comes from the device's own time stamps.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import need_gpu, parser, quiet, save

RIVALS = (
    "graph_host_tree", "graph_host_tree, split-KV, fused", "graph_whole_step, split-KV, fused",
    "graph_pdl",
)  # fmt: skip
DISTURBANCES = ("none", "frozen", "interpreter held", "cores busy")
SECONDS = 2.0


def burn(stop: Any = None) -> None:
    """Python without a pause, until told."""
    n = 0
    while stop is None or not stop.is_set():
        n += sum(range(1000))


def child(args: argparse.Namespace) -> None:
    """Decode for SECONDS once told so; print tokens and seconds as JSON, a line a turn."""
    quiet()
    decode = decode_kernel(args) if args.child == "megakernel" else decode_rival(args)
    decode(0.2)
    for _ in range(len(DISTURBANCES)):
        print("ready", flush=True)
        disturbance = sys.stdin.readline().strip()
        stop = threading.Event()
        holders = []
        if disturbance == "interpreter held":
            holders = [threading.Thread(target=burn, args=(stop,), daemon=True)]
            holders[0].start()
        print("begun", flush=True)
        print(json.dumps(decode(SECONDS)), flush=True)
        stop.set()
        for holder in holders:
            holder.join()


def decode_rival(args: argparse.Namespace) -> Any:
    """A function that decodes for so many seconds of wall time: tokens and seconds."""
    import torch

    from experiments.baseline_steps import COMMITTED, open_rival, setup_of
    from experiments.baselines.models import OnDevice, open_model

    args.device = "cuda"
    weights, drafter = open_model(args.model, "cuda")
    rounded = OnDevice(weights, "cuda", torch.bfloat16)
    setup = setup_of(args.child, rounded, drafter, 4096, args, forced=COMMITTED - 1)
    rival = open_rival(args.child, setup, args)
    rival.pretend(1024, 500)

    def decode(seconds: float) -> dict[str, float]:
        tokens, begun = 0, time.perf_counter()
        while (spent := time.perf_counter() - begun) < seconds:
            if rival.length > 2048:
                rival.core._begin(1024)
                rival.begin(1024)
            tokens += len(rival.step())
        return {"tokens": tokens, "seconds": spent}

    return decode


def decode_kernel(args: argparse.Namespace) -> Any:
    """The same of the persistent kernel, by the device's time stamps."""
    from experiments.host_stop import wait_for
    from experiments.megakernel import Megakernel

    new = 16000
    kernel = Megakernel(args.model, new + 2048, args.kernels, args.rows - 1)
    kernel.options["completion_entries"] = 1 << 15
    kernel.open(1024, new, None)

    def decode(seconds: float) -> dict[str, float]:
        sink = kernel.stamps(new)
        wait_for(sink, 50)
        first = len(sink.stamps)
        if not sink.ended.wait(120):
            raise TimeoutError("the request did not end")
        stamps = np.array(sink.stamps[first:], np.int64)
        stamps = stamps[stamps <= stamps[0] + int(seconds * 1e9)]
        tokens = len(sink.tokens) * (len(stamps) - 1) / len(sink.stamps)
        return {
            "tokens": float(tokens), "seconds": float(stamps[-1] - stamps[0]) / 1e9,
            "largest_step_us": float(np.diff(stamps).max()) / 1e3,
        }  # fmt: skip

    return decode


def run(form: str, argv: list[str]) -> dict[str, Any]:
    """All disturbances of one contender, in one child process."""
    command = [sys.executable, "-m", "experiments.host_stall", "--child", form, *argv]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdin is not None and process.stdout is not None
    out: dict[str, Any] = {}
    try:
        for disturbance in DISTURBANCES:
            await_line(process, "ready")
            process.stdin.write(disturbance + "\n")
            await_line(process, "begun")
            out[disturbance] = disturb(process, disturbance)
    finally:
        process.kill()
    calm = out["none"]["tok_s"]
    for row in out.values():
        row["kept"] = row["tok_s"] / calm
    return out


def await_line(process: subprocess.Popen[str], wanted: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == wanted:
            return
    raise RuntimeError(f"the decoding process ended before it said {wanted!r}")


def disturb(process: subprocess.Popen[str], disturbance: str) -> dict[str, Any]:
    """One turn of the child under a disturbance: tokens, seconds, rate."""
    burners = []
    if disturbance == "cores busy":
        burners = [
            multiprocessing.Process(target=burn, daemon=True) for _ in range(os.cpu_count() or 1)
        ]
        for burner in burners:
            burner.start()
    if disturbance == "frozen":
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(1.0)
        os.kill(process.pid, signal.SIGCONT)
    assert process.stdout is not None
    row = json.loads(process.stdout.readline())
    for burner in burners:
        burner.kill()
    return row | {"tok_s": row["tokens"] / row["seconds"]}


def main() -> None:
    """Command line."""
    made = parser(__doc__, "host_stall")
    made.add_argument("--model", default="smollm2-135m")
    made.add_argument("--rows", type=int, default=16)
    made.add_argument("--forms", nargs="*", default=list(RIVALS))
    made.add_argument("--kernels", help="kernels built beforehand; without, the rivals alone")
    made.add_argument("--pdl", type=Path, help="kernels of graph_pdl, built beforehand")
    made.add_argument("--child", help=argparse.SUPPRESS)
    args = made.parse_args()
    if args.child:
        child(args)
        return
    need_gpu("host_stall")
    argv = ["--model", args.model, "--rows", str(args.rows)]
    argv += ["--kernels", args.kernels] if args.kernels else []
    argv += ["--pdl", str(args.pdl)] if args.pdl else []
    fields: dict[str, Any] = {
        "model": args.model,
        "rows": args.rows,
        "contenders": {},
        "failed": {},
    }
    if args.pdl is None:
        args.forms = [form for form in args.forms if form != "graph_pdl"]
    for form in [*args.forms, *(["megakernel"] if args.kernels else [])]:
        try:
            rows = fields["contenders"][form] = run(form, argv)
        except Exception as error:  # one that fails does not stop the others
            fields["failed"][form] = f"{type(error).__name__}: {error}"
            print(f"{form}: {fields['failed'][form]}", flush=True)
            continue
        cells = "  ".join(f"{k}: {v['tok_s']:.0f} tok/s ({v['kept']:.1%})" for k, v in rows.items())
        print(f"{form:36s} {cells}", flush=True)
        save("host_stall", args.json, "cuda", fields, args.quick)


if __name__ == "__main__":
    main()
