"""What was to be reached, and what was: a table whose every cell comes from the result files."""

from __future__ import annotations

from experiments.report_headline import FUSED, HOST, OURS, PDL, steps
from experiments.report_rivals import Result, table
from experiments.report_runs import Read
from experiments.run_all import EXPERIMENTS

GOALS = {"smollm2-135m": 1.25, "llama-3.2-1b": 1.10}  # against graph_pdl
QUICK_S = 480
Row = tuple[str, str, str, bool]
"""What, the limit (a goal in brackets), what was reached, whether that is within the limit."""


def _steps() -> list[Row]:
    rows: list[Row] = []
    for (model, n), us in steps().items():
        at = f"{model} at {n}"
        if model.startswith("smollm2") and HOST in us:
            rows.append(_ratio(f"{at}: times {HOST}", us[HOST] / us[OURS], 4.0))
        if model.startswith("smollm2") and FUSED in us:
            least = 2.5 if us[FUSED] >= 1100 else 1.5
            rows.append(_ratio(f"{at}: times its fused form", us[FUSED] / us[OURS], least))
        if PDL in us:
            rows.append(_ratio(f"{at}: times {PDL}", us[PDL] / us[OURS], 1.0, GOALS.get(model)))
    return rows


def _ratio(what: str, ratio: float, least: float, goal: float | None = None) -> Row:
    limit = f"{least:.1f}x" + (f" ({goal:.2f}x)" if goal else "")
    return what, f"at least {limit}", f"{ratio:.2f}x", ratio >= least


def _dram(r: Result) -> list[Row]:
    row = r["models"].get("llama-3.1-8b", {}).get(OURS)
    if row is None:
        return []
    d = row["dram"]
    return [
        ("llama-3.1-8b, DRAM as a share of the stream", "at least 75 % (90 %)",
         f"{d['of_the_stream']:.1%}", d["of_the_stream"] >= 0.75),
        ("its samples under 1 %", "at most 1 % (0.3 %)", f"{d['idle_share']:.2%}",
         d["idle_share"] <= 0.01),
        ("its longest gap", "25 us (10 us)", f"{d['longest_gap_us']:.0f} us",
         d["longest_gap_us"] <= 25),
    ]  # fmt: skip


def _stall(r: Result) -> list[Row]:
    return [
        (f"rate kept: {kind}", "at least 99 %", f"{row['kept']:.1%}", row["kept"] >= 0.99)
        for kind, row in r["contenders"].get(OURS, {}).items()
        if kind != "none"
    ]


def _agreement(r: Result) -> list[Row]:
    every = sum(len(c["figures"]) for c in r["experiments"].values())
    outside = sum(len(c["outside"]) for c in r["experiments"].values())
    said = f"{every - outside} of {every}"
    what = "figures of two full runs within the spread stated beforehand"
    return [(what, "all", said, outside == 0)]


def _quick(r: Result) -> list[Row]:
    total = r["total_s"]
    lacking = [e.name for e in EXPERIMENTS if e.name not in r["seconds"]]
    what = "the quick run" + (f" (without {', '.join(lacking)})" if lacking else "")
    return [(what, f"at most {QUICK_S} s", f"{total:.0f} s", total <= QUICK_S)]


def bars(read: Read) -> list[str]:
    """The section; nothing without results."""
    rows = _steps()
    parts = (("dram_trace", _dram), ("host_stall", _stall), ("agreement", _agreement),
             ("run_quick", _quick))  # fmt: skip
    for name, say in parts:
        if (r := read(name)) is not None:
            rows += say(r)
    if not rows:
        return []
    cells = [(*row[:3], "yes" if row[3] else "**no**") for row in rows]
    return [
        "## What was to be reached",
        "",
        "A step of N = 16 committing four tokens; goals in brackets.",
        "",
        *table(["what", "limit", "reached", "met"], cells),
    ]
