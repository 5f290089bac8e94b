"""What the report says of the runs: their spread, how long they took, whether two agree."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from experiments.common import FLOORS
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
    apart: dict[str, list[float]] = {}
    for name, c in found["experiments"].items():
        n, out = len(c["figures"]), c["outside"]
        for x, y, _, kind in c["figures"].values():
            apart.setdefault(kind, []).append(abs(x - y) / max(abs(x), abs(y), 1e-12))
        rows.append([name, n, n - len(out), n - len(c["outside of today's floors"])])
        for which in out:
            x, y, stated, _ = c["figures"][which]
            outside.append(f"{name}, {which}: {x:.4g} and {y:.4g}, stated {stated:.2g}")
    every, within, now = (sum(row[i] for row in rows) for i in (1, 2, 3))
    said = {
        kind: f"{median(some):.1%} in the median, nine of ten by less than "
        f"{sorted(some)[int(0.9 * len(some))]:.0%}"
        for kind, some in apart.items()
    }
    hosts = f"; those with the host's Python in them {said['host']}" if "host" in said else ""
    dates = " and ".join(f"{run['date'][:16]}, revision {run['revision']}" for run in found["runs"])
    lines = [
        f"Two full runs ({dates}, "
        f"{found['runs'][1]['device']}), each on a GPU of its own, other jobs on the host's other "
        f"cores: **{within} of {every} figures differ by no more than the spread that the runs "
        f"stated beforehand** (the range of a run's rounds, and at least 3 % or 10 %). Times by "
        f"the device's clock differ by {said.get('device', '')}{hosts}. So the least spread that "
        f"is stated has been set to {FLOORS['device']:.1%} and {FLOORS['host']:.0%} *after* these "
        f"runs: with it {now} of {every} would agree, which another run has yet to confirm.",
        "",
        *table(["experiment", "figures", "within as stated", "within today's"], rows),
    ]
    if outside:
        lines += ["", "Outside of what was stated: " + "; ".join(outside) + "."]
    return lines


def _times(runs: dict[str, Result]) -> list[str]:
    names = list(dict.fromkeys(name for run in runs.values() for name in run["seconds"]))
    rows = [
        [name, *(f"{s:.0f}" if (s := run["seconds"].get(name)) else "" for run in runs.values())]
        for name in names
    ]
    rows.append(["all", *(f"{run['total_s']:.0f}" for run in runs.values())])
    lines = ["Seconds of one GPU, each experiment a process of its own.", ""]
    for size, run in runs.items():
        if lacking := [n for n in names if n not in run["seconds"]]:
            lines[0] += f" The {size} run was without {', '.join(lacking)}."
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
