"""Is the host out of the loop? Driver calls while decoding, and decoding while the host stops.

    python -m experiments.host_stop RESULT.json [--model NAME] [--device cuda]

Calls: CUPTI counts every driver and runtime API call of this process from the first token on while
the device writes 1,000 tokens; the bound is 0, and the calls of the engine's start show that the
counter counts. Needs the package cupti-python; without it the calls are reported as null.

Stop: a child process decodes while this one sends it SIGSTOP for a second and then SIGCONT. The
intervals between the device's own time stamps, over the whole run, come from the completions and
stand beside those of an undisturbed run, whose tokens must be the same. The rings hold more than a
second of tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import megadecode
from experiments.provenance import provenance

COUNTED, DECODED = 1_000, 20_000
STOP_S = 1.0


class Stamps:
    """A request's reader that keeps tokens and the device's time stamp of each step, ns."""

    request_id = -1

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.stamps: list[int] = []
        self.error: BaseException | None = None
        self.ended = threading.Event()

    def on_pairs(self, ids: list[int], logprobs: Any, accepted: int, step: int, stamp: int) -> None:
        self.tokens += ids
        self.stamps.append(stamp)

    def on_end(self, reason: Any, details: list[int], stamp_ns: int) -> None:
        self.ended.set()

    def on_lost(self, error: BaseException) -> None:
        self.error = error
        self.ended.set()


def start(engine: megadecode.Engine, new_tokens: int) -> Stamps:
    """A request of token ids that no stop ends."""
    params = megadecode.SamplingParams(max_new_tokens=new_tokens)
    sink = Stamps()
    prompt = np.arange(100, 116, dtype=np.int32)
    engine._link.submit(prompt, new_tokens, params.record(()), sink)
    return sink


def wait_for(sink: Stamps, tokens: int, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while len(sink.tokens) < tokens:
        if sink.error is not None:
            raise sink.error
        if time.monotonic() > end:
            raise TimeoutError(f"{len(sink.tokens)} of {tokens} tokens after {timeout_s:g} s")
        time.sleep(0.001)


class Calls:
    """Driver and runtime API calls of this process by name, from construction on.

    It must exist before the kernel is resident: CUPTI sets itself up with calls of its own.
    """

    def __init__(self) -> None:
        from cupti import cupti

        self.seen: dict[str, int] = {}
        self._cupti = cupti
        self._subscriber = cupti.subscribe(self._note, None)
        for domain in (cupti.CallbackDomain.DRIVER_API, cupti.CallbackDomain.RUNTIME_API):
            cupti.enable_domain(1, self._subscriber, domain)

    def _note(self, userdata: Any, domain: Any, number: int, data: Any) -> None:
        if data.callback_site == self._cupti.ApiCallbackSite.API_ENTER:
            self.seen[data.function_name] = self.seen.get(data.function_name, 0) + 1


def count_calls(asked: argparse.Namespace) -> dict[str, Any] | None:
    """Calls while the device writes COUNTED tokens, and those of the engine's start and end, which
    show that the counter counts. None without cupti-python."""
    try:
        calls = Calls()
    except ImportError:
        return None
    with open_engine(asked) as engine:
        sink = start(engine, COUNTED + 200)
        wait_for(sink, 10)
        before, first = dict(calls.seen), len(sink.tokens)
        wait_for(sink, first + COUNTED)
        tokens, after = len(sink.tokens) - first, dict(calls.seen)
        sink.ended.wait(60)
    during = {name: n - before.get(name, 0) for name, n in after.items()}
    return {
        "tokens": tokens,
        "calls": sum(during.values()),
        "by_name": {name: n for name, n in during.items() if n},
        "calls_at_start": sum(before.values()),
        "calls_at_end": sum(calls.seen.values()) - sum(after.values()),
    }


def child(asked: argparse.Namespace) -> None:
    """Decode; say when; report stamps as JSON on standard output."""
    with open_engine(asked) as engine:
        wait_for(start(engine, 50), 50)
        sink = start(engine, asked.tokens)
        wait_for(sink, asked.tokens // 8)
        print("decoding", flush=True)
        if not sink.ended.wait(300):
            raise TimeoutError("the request did not end")
        if sink.error is not None:
            raise sink.error
        print(json.dumps({"tokens": sink.tokens, "stamps": sink.stamps}), flush=True)


def open_engine(asked: argparse.Namespace) -> megadecode.Engine:
    return megadecode.Engine(
        asked.model, ctx=asked.tokens + 64, slots=1, device=asked.device, draft="off",
        completion_entries=asked.entries, **({"kernels": asked.kernels} if asked.kernels else {}),
    )  # fmt: skip


def run_child(asked: argparse.Namespace, stop: bool) -> dict[str, Any]:
    """One decoding child, stopped for a second or not."""
    command = [sys.executable, "-m", "experiments.host_stop", "--child", *sys.argv[1:]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline().strip()
        if line != "decoding":
            raise RuntimeError(f"the child said {line!r}")
        stopped = [time.time_ns(), 0]
        if stop:
            os.kill(process.pid, signal.SIGSTOP)
            stopped[0] = time.monotonic_ns()
            time.sleep(STOP_S)
            stopped[1] = time.monotonic_ns()
            os.kill(process.pid, signal.SIGCONT)
        report: dict[str, Any] = json.loads(process.stdout.readline())
        process.wait(60)
    finally:
        process.kill()
    report["stopped_s"] = (stopped[1] - stopped[0]) / 1e9 if stop else 0.0
    return report


def intervals(report: dict[str, Any]) -> dict[str, float]:
    """Median and largest interval between steps, us, over the whole run."""
    steps = np.diff(np.array(report["stamps"], np.int64)) / 1e3
    return {
        "median_us": round(float(np.median(steps)), 2),
        "p99_us": round(float(np.percentile(steps, 99)), 2),
        "largest_us": round(float(steps.max()), 2),
        "run_s": round(float(steps.sum()) / 1e6, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=DECODED)
    parser.add_argument(
        "--entries", type=int, default=1 << 15, help="entries of the completion ring"
    )
    parser.add_argument("--kernels", help="a folder of kernels that another machine has built")
    parser.add_argument("--calls-only", action="store_true", help="count calls, print them, end")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(asked)
        return
    calls = None
    if asked.device == "cuda":
        calls = count_calls(asked)
    if asked.calls_only:
        print(json.dumps(calls))
        return
    calm, stopped = run_child(asked, stop=False), run_child(asked, stop=True)
    result = {
        "about": "python -m experiments.host_stop; its docstring has the fields",
        "device": provenance().get("gpu", "cpu"),
        **provenance(),
        "model": asked.model,
        "calls": calls,
        "stopped_s": stopped["stopped_s"],
        "undisturbed": intervals(calm),
        "stopped": intervals(stopped),
        "same_tokens": calm["tokens"] == stopped["tokens"],
        "tokens": len(stopped["tokens"]),
    }
    asked.result.parent.mkdir(parents=True, exist_ok=True)
    asked.result.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "about"}, indent=1))


if __name__ == "__main__":
    main()
