"""Decoding while the host is busy or frozen: how much of its rate does each contender keep?

    python -m experiments.host_stall [--kernels DIR] [--pdl DIR]

Three disturbances of the process that decodes: `frozen`: SIGSTOP for half of the time;
`interpreter held`: another thread of the process runs Python without a pause; `cores busy`: as many
busy processes as cores. A rival's rate is its tokens over wall time: the host must have them before
it can go on. The persistent kernel writes into a ring meanwhile, so it has two: `tok_s` by the
device's own time stamps, over the same steps of the same text in every turn (a step takes longer
the further the context has grown: other steps would be other work), and `arrival_tok_s`, by the
host's clock as it reads them, which stands and catches up. Where the texts of two turns differ the
turn says so. `figures` leaves out what rivals keep where threads or
processes compete with them: that depends on the machine's scheduler from second to second (`turns`
has it).
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import default_device, figure, need_gpu, parser, quiet, save
from experiments.cubins import PDL as PDL_KERNELS
from experiments.cubins import engine_runs, find

KERNEL = "megakernel"
RIVALS = (
    "graph_pdl", "graph_host_tree", "graph_host_tree, split-KV, fused",
    "graph_device_tree, split-KV, fused", "graph_whole_step, split-KV, fused", "eager",
)  # fmt: skip
"""In this order: with the interpreter held one step of `eager` takes some 20 s."""
QUICK = ("graph_host_tree", "graph_pdl")
DISTURBANCES = ("none", "frozen", "interpreter held", "cores busy")
SECONDS, FROZEN = 0.8, 0.4
WARM_STEPS = 20
"""Steps in front of those that count: the first ones come while the others are still read."""
NEW_TOKENS = 6000  # of the megakernel: some 0.8 s
CONTEXT, GROWN = 1024, 256  # positions that a rival begins behind, and how many it adds
BEGUN = time.perf_counter()


def burn(stop: Any = None) -> None:
    """Python without a pause, until told."""
    n = 0
    while stop is None or not stop.is_set():
        n += sum(range(1000))


def child(args: argparse.Namespace) -> None:
    """Decode once told so, one contender after another; print each turn's figures as JSON."""
    quiet()
    for form, decode in contenders(args):
        decode(0.2)
        for _ in range(args.cycles * len(DISTURBANCES)):
            print(f"ready {form}", flush=True)
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


def contenders(args: argparse.Namespace) -> Any:
    """(name, what decodes for so many seconds). One that cannot be opened is named as failed."""
    if args.forms == [KERNEL]:
        yield KERNEL, decode_kernel(args)
        return
    import torch

    from experiments.baseline_steps import COMMITTED, forget, open_rival, setup_of
    from experiments.baselines.models import OnDevice, open_model

    args.device = device = default_device()
    weights, drafter = open_model(args.model, device)
    rounded = OnDevice(weights, device, torch.bfloat16 if device == "cuda" else torch.float32)
    for form in args.forms:
        try:
            setup = setup_of(form, rounded, drafter, args.ctx, args, forced=COMMITTED - 1)
            rival = open_rival(form, setup, args)
            rival.pretend(CONTEXT, GROWN // rival.core.most + 1)
        except Exception as error:  # one that fails does not stop the others
            print(f"failed {form}: {type(error).__name__}: {error}".replace("\n", " "), flush=True)
            continue
        yield form, decoder(rival)
        rival.finish()
        del rival
        forget()


def decoder(rival: Any) -> Callable[[float], dict[str, float]]:
    """A function that decodes for so many seconds of wall time: tokens and seconds."""

    def decode(seconds: float) -> dict[str, float]:
        tokens, begun = 0, time.perf_counter()
        while (spent := time.perf_counter() - begun) < seconds:
            if rival.length >= CONTEXT + GROWN - rival.core.most:
                rival.core._begin(CONTEXT)
                rival.begin(CONTEXT)
            tokens += len(rival.step())
        return {"tokens": tokens, "seconds": spent}

    return decode


def decode_kernel(args: argparse.Namespace) -> Callable[[float], dict[str, Any]]:
    """The same of the persistent kernel, whatever the seconds: one request."""
    from experiments.megakernel import Megakernel, random_ids

    kernel = Megakernel(
        args.model, NEW_TOKENS + 2 * CONTEXT, args.kernels, args.rows - 1,
        completion_entries=1 << 15,
    )  # fmt: skip
    prompt = random_ids(CONTEXT, kernel.vocab)
    first: list[int] = []

    def decode(seconds: float) -> dict[str, Any]:
        sink = kernel.begin(prompt, NEW_TOKENS)
        if not sink.ended.wait(120):
            raise TimeoutError("the request did not end")
        if sink.error is not None:
            raise sink.error
        if not first:
            first.extend(sink.tokens)
        return rates(sink.stamps, sink.arrivals, sink.counts) | {"same_text": sink.tokens == first}

    return decode


def rates(stamps: list[int], arrivals: list[int], counts: list[int]) -> dict[str, float]:
    """Of one request's steps behind WARM_STEPS, by the device's clock and by the host's. The
    tokens of the first of them belong to the time in front of it."""
    device, host = np.array(stamps[WARM_STEPS:], np.int64), np.array(arrivals[WARM_STEPS:])
    tokens = sum(counts[WARM_STEPS + 1 :])
    gaps = np.diff(host)
    return {
        "tokens": tokens, "seconds": float(device[-1] - device[0]) / 1e9,
        "largest_step_us": float(np.diff(device).max()) / 1e3,
        "arrival_tok_s": tokens / (float(host[-1] - host[0]) / 1e9),
        "longest_silence_ms": float(gaps.max()) / 1e6,
    }  # fmt: skip


def run(
    forms: list[str], argv: list[str], cycles: int,
    keep: Callable[[str, dict[str, Any]], None], failed: dict[str, str],
) -> None:  # fmt: skip
    """All disturbances of some contenders, in one child process; each is kept when it is through.
    What fails is written into failed."""
    command = [sys.executable, "-m", "experiments.host_stall", "--child", *argv]
    command += ["--cycles", str(cycles), "--forms", *forms]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdin is not None and process.stdout is not None
    turns: dict[str, list[dict[str, Any]]] = {}
    try:
        while (form := next_ready(process, failed)) is not None:
            rows = turns.setdefault(form, [])
            disturbance = DISTURBANCES[len(rows) % len(DISTURBANCES)]
            process.stdin.write(disturbance + "\n")
            while process.stdout.readline().strip() != "begun":
                if process.poll() is not None:
                    raise RuntimeError("the decoding process ended before it began")
            rows.append(disturb(process, disturbance))
            if len(rows) == cycles * len(DISTURBANCES):
                done = finished(rows)
                say(form, done)
                keep(form, done)
        process.wait(30)
    except Exception as error:  # one that fails does not stop the others
        failed[", ".join(forms)] = f"{type(error).__name__}: {error}"
        print(f"{forms}: {type(error).__name__}: {error}", flush=True)
    finally:
        process.kill()
    for form, rows in turns.items():
        if len(rows) < cycles * len(DISTURBANCES):
            failed.setdefault(form, f"ended after {len(rows)} turns")


def next_ready(process: subprocess.Popen[str], failed: dict[str, str]) -> str | None:
    """The contender that waits for its next turn; None when the child has ended."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ready "):
            return line[6:].strip()
        if line.startswith("failed "):
            form, _, why = line[7:].strip().partition(": ")
            failed[form] = why[:400]
            print(f"{form}: {why}", flush=True)
    return None


def finished(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """A contender's turns by disturbance: rates over all of them, shares of the undisturbed."""
    rows: dict[str, Any] = {}
    for i, disturbance in enumerate(DISTURBANCES):
        mine = turns[i :: len(DISTURBANCES)]
        row: dict[str, Any] = {key: sum(t[key] for t in mine) for key in ("tokens", "seconds")}
        row["tok_s"] = row["tokens"] / row["seconds"]
        row["turns"] = [t["tokens"] / t["seconds"] for t in mine]
        for key in ("largest_step_us", "longest_silence_ms"):
            if key in mine[0]:
                row[key] = max(t[key] for t in mine)
        if "arrival_tok_s" in mine[0]:
            row["arrival_tok_s"] = sum(t["arrival_tok_s"] for t in mine) / len(mine)
            row["same_text"] = all(t["same_text"] for t in mine)
        rows[disturbance] = row
    for row in rows.values():
        row["kept"] = row["tok_s"] / rows["none"]["tok_s"]
        if "arrival_tok_s" in row:
            row["arrival_kept"] = row["arrival_tok_s"] / rows["none"]["arrival_tok_s"]
    return rows


def say(form: str, rows: dict[str, Any]) -> None:
    cells = "  ".join(f"{k}: {v['tok_s']:.0f} tok/s ({v['kept']:.1%})" for k, v in rows.items())
    print(f"{form:36s} {cells} [{time.perf_counter() - BEGUN:.0f} s]", flush=True)
    if "arrival_kept" in rows["none"]:
        cells = "  ".join(
            f"{k}: {v['arrival_kept']:.1%}, silent {v['longest_silence_ms']:.0f} ms, "
            f"{'same' if v['same_text'] else 'OTHER'} text"
            for k, v in rows.items()
        )
        print(f"{'  as the host reads them':36s} {cells}", flush=True)


def figures_of(contenders: dict[str, Any]) -> dict[str, Any]:
    """What another run should give too; see the module's docstring."""
    return {
        f"{form}, {name}, share kept": figure(
            [rate / rows["none"]["tok_s"] for rate in row["turns"]], "share"
        )
        for form, rows in contenders.items()
        for name, row in rows.items()
        if name == "frozen" or (form == KERNEL and name != "none")
    }


def disturb(process: subprocess.Popen[str], disturbance: str) -> dict[str, Any]:
    """One turn of the child under a disturbance: tokens, seconds, rate."""
    burners = []
    if disturbance == "cores busy":
        cores = len(os.sched_getaffinity(0))
        burners = [multiprocessing.Process(target=burn, daemon=True) for _ in range(cores)]
        for burner in burners:
            burner.start()
    if disturbance == "frozen":
        time.sleep(0.2)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(FROZEN)
        os.kill(process.pid, signal.SIGCONT)
    assert process.stdout is not None
    row: dict[str, Any] = json.loads(process.stdout.readline())
    for burner in burners:
        burner.kill()
    for burner in burners:
        burner.join()
    return row


def main() -> None:
    """Command line."""
    made = parser(__doc__, "host_stall")
    made.add_argument("--model", default="smollm2-135m")
    made.add_argument("--rows", type=int, default=16)
    made.add_argument("--ctx", type=int, default=8352, help="positions of the rivals' caches")
    made.add_argument("--forms", nargs="*", default=list(RIVALS))
    made.add_argument("--cycles", type=int, default=1, help="rounds of all disturbances")
    made.add_argument(
        "--kernels", help="the engine's kernels, built beforehand; without, built here"
    )
    made.add_argument("--pdl", type=Path, help="kernels of graph_pdl, built beforehand")
    made.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = made.parse_args()
    if args.child:
        child(args)
        return
    need_gpu("host_stall")
    argv = ["--model", args.model, "--rows", str(args.rows), "--ctx", str(args.ctx)]
    argv += ["--kernels", args.kernels] if args.kernels else []
    argv += ["--pdl", str(args.pdl)] if args.pdl else []
    fields: dict[str, Any] = {
        "model": args.model, "rows": args.rows, "context": CONTEXT, "frozen_s": FROZEN,
        "contenders": {}, "failed": {}, "figures": {},
    }  # fmt: skip
    if args.quick:
        args.forms = [form for form in args.forms if form in QUICK]
    if "graph_pdl" in args.forms:
        args.pdl = find(args.pdl, *PDL_KERNELS)
    if args.pdl is None:
        args.forms = [form for form in args.forms if form != "graph_pdl"]

    def write() -> None:
        save("host_stall", args.json, "cuda", fields, args.quick)

    def keep(form: str, rows: dict[str, Any]) -> None:
        fields["contenders"][form] = rows
        fields["figures"] = figures_of(fields["contenders"])
        write()

    for forms in ([KERNEL] if engine_runs(args.kernels) else [], args.forms):
        if forms:
            run(list(forms), argv, args.cycles, keep, fields["failed"])
            write()


if __name__ == "__main__":
    main()
