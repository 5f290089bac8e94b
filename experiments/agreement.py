"""Do two runs of the experiments agree within the spread that they state?

    python -m experiments.agreement FOLDER OTHER

Every result file names its figures, each with a spread: what another run's value may differ by
(`common.figure`). Compared are the figures that both folders have; one agrees where the values
differ by no more than the larger of both spreads. Exit code 1 if one does not.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from experiments.common import RESULTS
from experiments.provenance import provenance

Result = dict[str, Any]


def compared(a: Result, b: Result) -> dict[str, Any]:
    """Of two results of one experiment: every figure's two values and its spread; names of those
    that differ by more; names that only one has."""
    ours, theirs = a["figures"], b["figures"]
    rows = {
        name: [ours[name]["value"], theirs[name]["value"],
               max(ours[name]["spread"], theirs[name]["spread"])]
        for name in ours if name in theirs
    }  # fmt: skip
    return {
        "figures": rows,
        "outside": [name for name, (x, y, spread) in rows.items() if abs(x - y) > spread],
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
        x, y, spread = c["figures"][which]
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
