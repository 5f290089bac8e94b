"""The persistent kernel's own time stamps as a file for Perfetto (ui.perfetto.dev).

A kernel built with timing leaves, of its last step, four stamps for each CTA and phase: it begins,
it has its activations, it is done with its own tiles, it is done. Attention has no stamps of its
own: it is what lies between a layer's `qkv` and its `o`. Used by dram_trace.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

KINDS = ("qkv", "o", "gu", "down")
PARTS = ("wait for activations", "own tiles", "sums of the team")
EVERY = 11
"""Of 132 CTAs the twelve that are shown."""


def slots(times: np.ndarray, zero_ns: int) -> Iterator[dict[str, Any]]:
    """Trace events of times int64 [ctas, phases, 4] ns, in us from zero_ns on: a slice for each CTA
    and phase, attention included, and in it one for each part that took time. Phases that a CTA has
    no part in, whose stamps are 0, have none."""
    phases = times.shape[1]
    for cta in range(0, len(times), EVERY):
        yield {"name": "thread_name", "ph": "M", "pid": 0, "tid": cta,
               "args": {"name": f"CTA {cta}"}}  # fmt: skip
        before = 0
        for i, stamps in enumerate(times[cta].tolist()):
            begin, *ends = stamps
            if begin == 0 or ends[-1] < begin:
                before = 0
                continue
            name = "lm" if i == phases - 1 else f"{KINDS[i % 4]} {i // 4}"
            common = {"ph": "X", "pid": 0, "tid": cta}
            if name.startswith("o ") and before:
                yield {"name": f"attention {i // 4}", **common, "ts": (before - zero_ns) / 1e3,
                       "dur": (begin - before) / 1e3}  # fmt: skip
            before = ends[-1]
            yield {"name": name, **common, "ts": (begin - zero_ns) / 1e3,
                   "dur": (ends[-1] - begin) / 1e3}  # fmt: skip
            for part, end in zip(PARTS, ends, strict=True):
                if end > begin:
                    yield {"name": part, **common, "ts": (begin - zero_ns) / 1e3,
                           "dur": (end - begin) / 1e3}  # fmt: skip
                    begin = end


def counters(name: str, start_ns: np.ndarray, values: np.ndarray, zero_ns: int) -> Iterator[Any]:
    """A counter's samples as trace events."""
    for at, value in zip(start_ns.tolist(), values.tolist(), strict=True):
        yield {"name": name, "ph": "C", "pid": 0, "ts": (at - zero_ns) / 1e3,
               "args": {"%": round(value, 1)}}  # fmt: skip


def write(path: Path, title: str, events: list[dict[str, Any]]) -> None:
    """A trace-event file, compressed; Perfetto opens it as it is."""
    named = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": title}}, *events]
    text = json.dumps({"displayTimeUnit": "ns", "traceEvents": named}, separators=(",", ":"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
