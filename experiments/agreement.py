"""Do two runs of the experiments agree within the spread that they state?

    python -m experiments.agreement FOLDER OTHER

Every result file names its figures, each with a spread: what another run's value may differ by
(`common.figure`). Compared are the figures that both folders have; one agrees where the values
differ by no more than the larger of both spreads, as the runs stated them. Exit code 1 if one does
not.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from experiments.common import FLOORS, RESULTS
from experiments.provenance import provenance

Result = dict[str, Any]


def kind_of(*figures: dict[str, Any]) -> str:
    """Of a figure that is in both runs. Results before the field `kind` came: a time of which 10 %
    or more is stated in both was one of the host's."""
    if "kind" in figures[0]:
        return str(figures[0]["kind"])
    least = min(f["spread"] / abs(f["value"]) if f["value"] else 0.0 for f in figures)
    return "host" if least > 0.0999 else "device"


def compared(a: Result, b: Result) -> dict[str, Any]:
    """Of two results of one experiment: every figure's two values, its stated spread and its kind;
    names of those that differ by more; of those that would if today's FLOORS had been stated; of
    those that only one has."""
    ours, theirs = a["figures"], b["figures"]
    rows = {
        name: [ours[name]["value"], theirs[name]["value"],
               max(ours[name]["spread"], theirs[name]["spread"]),
               kind_of(ours[name], theirs[name])]
        for name in ours if name in theirs
    }  # fmt: skip
    outside = [name for name, (x, y, spread, _) in rows.items() if abs(x - y) > spread]
    return {
        "figures": rows,
        "outside": outside,
        "outside of today's floors": [
            name
            for name in outside
            if abs(rows[name][0] - rows[name][1])
            > FLOORS.get(rows[name][3], 0.0) * max(abs(rows[name][0]), abs(rows[name][1]))
        ],
        "in one only": sorted(set(ours) ^ set(theirs)),
    }


def folder_results(folder: Path) -> dict[str, Result]:
    """The result files whose figures state a spread, by name."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return {
        name: r
        for name, r in found.items()
        if "figures" in r
        and all(isinstance(f, dict) and "spread" in f for f in r["figures"].values())
    }


def agreement(folder: Path, other: Path) -> Result:
    """The whole comparison. SystemExit where the folders have no experiment in common."""
    ours, theirs = folder_results(folder), folder_results(other)
    both = [name for name in ours if name in theirs]
    if not both:
        raise SystemExit(f"{folder} and {other} have no experiment with figures in common")
    runs = [
        {key: some[both[0]].get(key) for key in ("device", "revision", "date")}
        for some in (ours, theirs)
    ]
    experiments = {name: compared(ours[name], theirs[name]) for name in both}
    return {
        "about": "python -m experiments.agreement", "device": ours[both[0]]["device"],
        **provenance(), "runs": runs, "experiments": experiments,
        "in one folder only": sorted(set(ours) ^ set(theirs)),
    }  # fmt: skip


def line(name: str, c: dict[str, Any]) -> str:
    """An experiment in a line, and a line for every figure outside of its spread."""
    n, out = len(c["figures"]), c["outside"]
    parts = [f"{name:18s} {n - len(out)} of {n} within the stated spread"]
    for which in out:
        x, y, spread, _ = c["figures"][which]
        parts.append(f"  {which}: {x:.4g} and {y:.4g}, stated {spread:.2g}")
    return "\n".join(parts)


def main() -> None:
    """Command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("folder", type=Path)
    made.add_argument("other", type=Path)
    made.add_argument("--json", type=Path, default=RESULTS / "agreement.json")
    args = made.parse_args()
    result = agreement(args.folder, args.other)
    for name, c in result["experiments"].items():
        print(line(name, c))
    args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if any(c["outside"] for c in result["experiments"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
