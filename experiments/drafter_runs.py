"""What was tried for the drafter and what came of it: results/drafter_runs.json as markdown.

python -m experiments.drafter_runs          # write experiments/drafter_runs.md
python -m experiments.drafter_runs --check  # exit code 1 when it is out of date

A run's record: name, what (what was changed, and why), recipe, drafter, corpus, steps, seconds,
device, tables (of `megadecode.training.evaluate`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCE, PAGE = HERE / "results" / "drafter_runs.json", HERE / "drafter_runs.md"
POLICIES = ("chain", "N=4", "N=8", "N=16", "N=32", "N=64", "N=128")


def tau(run: dict[str, Any], temperature: float, context: int | None = None) -> dict[str, float]:
    """Over all domains; empty where it was not measured."""
    for t in run["tables"]:
        if (t["domain"], t["context"], t["temperature"]) == (None, context, temperature):
            return dict(t["tau"]) if t["texts"] else {}
    return {}


def cells(values: dict[str, float], names: tuple[str, ...] = POLICIES) -> str:
    return " | ".join(f"{values[n]:.2f}" if n in values else "" for n in names)


def page(record: dict[str, Any]) -> str:
    """The whole page."""
    runs = record["runs"]
    lines = [
        "# Drafters that were tried",
        "",
        "Generated from `results/drafter_runs.json`. Tokens committed per verify step along the "
        "engine's own walk, held-out texts of all domains and contexts; N: rows of a tree.",
        "",
        f"| run | what | layers | b | steps | s | T | {' | '.join(POLICIES)} |",
        "|---|---|---|---|---|---|---|" + "---|" * len(POLICIES),
    ]
    for run in runs:
        d = run["drafter"]
        for temperature in (0.0, 1.0):
            if values := tau(run, temperature):
                lines.append(
                    f"| {run['name']} | {run['what']} | {d['layers']} | {d['block_size']} | "
                    f"{run['steps']} | {run['seconds']:.0f} | {temperature:g} | {cells(values)} |"
                )
    contexts = sorted({t["context"] for run in runs for t in run["tables"] if t["context"]})
    if contexts:
        lines += [
            "",
            "By context, greedy, N = 16:",
            "",
            f"| run | {' | '.join(map(str, contexts))} |",
            "|---|" + "---|" * len(contexts),
        ]
        for run in runs:
            found = [tau(run, 0.0, context).get("N=16") for context in contexts]
            values = " | ".join("" if v is None else f"{v:.2f}" for v in found)
            lines.append(f"| {run['name']} | {values} |")
    lines += [
        "",
        "While training, chain, greedy, short held-out answers (tau at step):",
        "",
        "| run | answer tokens | tau at step |",
        "|---|---|---|",
    ]
    for run in runs:
        curve = ", ".join(
            f"{value:.2f} at {int(step):,}" for step, value in run["chain_tau"].items()
        )
        lines.append(f"| {run['name']} | {run['corpus']['answer_tokens']:,} | {curve} |")
    lines += ["", record.get("about", "")]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    new = page(json.loads(SOURCE.read_text(encoding="utf-8")))
    if args.check:
        old = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
        sys.exit(0 if new == old else f"{PAGE.name} is out of date: run this without --check")
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
