"""What the report says of the runs: their spread, how long they took, whether two agree."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from experiments.report_rivals import Result, table

Read = Callable[[str], Result | None]


def spread(result: Result) -> str:
    """The spread that a result states, in a sentence; nothing where it states none."""
    figures = {n: f for n, f in result.get("figures", {}).items() if f["value"]}
    if not figures:
        return ""
    shares = {name: f["spread"] / abs(f["value"]) for name, f in figures.items()}
    worst = max(shares, key=lambda name: shares[name])
    return (
        f"Stated spread of its {len(figures)} figures: {median(shares.values()):.1%} in the "
        f"median, {shares[worst]:.0%} at most ({worst})."
    )


def _agreement(found: Result) -> list[str]:
    rows: list[list[Any]] = []
    outside: list[str] = []
    for name, c in found["experiments"].items():
        n, out = len(c["figures"]), c["outside"]
        apart = [abs(x - y) / abs(x) for x, y, _ in c["figures"].values() if x]
        middle = f"{median(apart):.1%}" if apart else ""
        rows.append([name, n, n - len(out), middle])
        for which in out:
            x, y, stated = c["figures"][which]
            outside.append(f"{name}, {which}: {x:.4g} and {y:.4g}, stated {stated:.2g}")
    every, within = sum(row[1] for row in rows), sum(row[2] for row in rows)
    lines = [
        f"Two runs ({' and '.join(run['date'][:16] for run in found['runs'])}, "
        f"{found['runs'][1]['device']}): {within} of {every} figures differ by no more "
        "than the spread that was stated for them (the range of a run's rounds, and at least 3 % "
        "of a time by the device's clock, 10 % of one with Python in it, two points of a share).",
        "",
        *table(["experiment", "figures", "within", "differ by, median"], rows),
    ]
    if outside:
        lines += ["", "Outside: " + "; ".join(outside) + "."]
    return lines


def _times(runs: dict[str, Result]) -> list[str]:
    names = list(dict.fromkeys(name for run in runs.values() for name in run["seconds"]))
    rows = [
        [name, *(f"{s:.0f}" if (s := run["seconds"].get(name)) else "" for run in runs.values())]
        for name in names
    ]
    rows.append(["all", *(f"{run['total_s']:.0f}" for run in runs.values())])
    lines = ["Seconds of one GPU, each experiment a process of its own.", ""]
    lines += table(["", *(f"{size}, {run['device']}" for size, run in runs.items())], rows)
    for size, run in runs.items():
        if run["failed"]:
            said = "; ".join(f"{name}: {why}" for name, why in run["failed"].items())
            lines += ["", f"Failed in the {size} run: {said}."]
    return lines


def runs(read: Read) -> list[str]:
    """The section; nothing without results."""
    lines: list[str] = []
    if (found := read("agreement")) is not None:
        lines += ["## Do two runs agree?", "", *_agreement(found)]
    times = {size: r for size in ("full", "quick") if (r := read(f"run_{size}")) is not None}
    if times:
        lines += [*([""] if lines else []), "## How long it takes", "", *_times(times)]
    return lines
