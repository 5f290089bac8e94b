"""Write the README's figures, docs/figures.md and experiments/REPORT.md from the result files;
nothing in them is typed by hand.

python -m experiments.report            # README.md between its markers, both pages, pictures
python -m experiments.report --check    # exit code 1 when one of them is out of date
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from experiments.common import PICTURES, digest
from experiments.report_bars import bars
from experiments.report_claims import claims
from experiments.report_headline import headline
from experiments.report_pages import PAGES
from experiments.report_runs import runs, spread
from experiments.report_sections import (
    cpu_speed,
    drafter,
    gpu_attention,
    gpu_speculation,
    gpu_steps,
    gpu_truth,
    handoffs,
    ping,
    read,
    speculation,
    where,
)

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent.parent / "README.md"
REPORT = Path(__file__).parent / "REPORT.md"
FIGURES = Path(__file__).parent.parent / "docs" / "figures.md"
BEGIN, END = "<!-- figures -->", "<!-- /figures -->"


def report() -> str:
    """The whole of REPORT.md."""
    lines = [
        "# Report",
        "",
        "What the project measures against, and what came out. Written by "
        "`python -m experiments.report` from `experiments/results`; "
        "`python -m experiments.run_all --full` makes those. Absolute times hold on the machine "
        "named with them.",
    ]
    for section in (bars, claims, runs):
        if found := section(read):
            lines += ["", *found]
    missing = []
    for name, (title, page) in PAGES.items():
        results = [(n, r) for n in (name, f"{name}_cpu") if (r := read(n)) is not None]
        if not results:
            missing.append(f"- {title}: `python -m experiments.{name}`")
        for i, (file, result) in enumerate(results):
            lines += ["", f"## {title}" if i == 0 else "### The same on a CPU", "", *page(result)]
            if drawn_from(file) is not None:
                lines += ["", f"![{title}](pictures/{file}.svg)"]
            origin = f"`{result['about']}` on {result['device']}: {where(result)}."
            lines += ["", f"{origin} {spread(result)}".rstrip()]
    if missing:
        lines += ["", "## Not measured yet", "", *missing]
    return "\n".join(lines) + "\n"


def drawn_from(name: str) -> str | None:
    """The digest of the result file that a picture was drawn from; None without a picture."""
    path = PICTURES / f"{name}.svg"
    if not path.exists():
        return None
    found = re.search(r"drawn from \S+ ([0-9a-f]+)", path.read_text(encoding="utf-8"))
    return found.group(1) if found else ""


def stale_pictures() -> list[str]:
    """Pictures that their result file has left behind."""
    names = [path.stem for path in sorted(PICTURES.glob("*.svg"))]
    return [
        name
        for name in names
        if not (RESULTS / f"{name}.json").exists()
        or drawn_from(name) != digest(RESULTS / f"{name}.json")
    ]


def redraw() -> None:
    """Draw what is missing or stale. Needs matplotlib; without it pictures stay as they are."""
    try:
        import matplotlib  # noqa: F401

        from experiments.report_pictures import DRAWN, draw
    except ImportError:
        print("pictures are not drawn: matplotlib is not installed")
        return
    for name in (*DRAWN, *(f"{name}_cpu" for name in DRAWN)):
        result = read(name)
        if result is not None and drawn_from(name) != digest(RESULTS / f"{name}.json"):
            draw(name, result)


SECTIONS = (
    gpu_speculation, gpu_steps, gpu_attention, gpu_truth, cpu_speed, speculation, drafter, ping,
    handoffs,
)  # fmt: skip


def figures() -> str:
    """The whole of docs/figures.md."""
    lines = [
        "# Figures",
        "",
        "Written by `python -m experiments.report` from `experiments/results`, each with the "
        "revision that was measured. Absolute times hold on the machine named with them. Against "
        "rivals: [experiments/REPORT.md](../experiments/REPORT.md).",
    ]
    for part in (section() for section in SECTIONS):
        lines += ["", *part] if part else []
    return "\n".join(lines) + "\n"


def rewritten(text: str) -> str:
    """The README's text with the figures of the result files."""
    start, end = text.index(BEGIN), text.index(END) + len(END)
    return text[:start] + "\n".join([BEGIN, *headline(), END]) + text[end:]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if not args.check:
        redraw()
    pages = {README: rewritten(README.read_text(encoding="utf-8"))}
    pages |= {FIGURES: figures(), REPORT: report()}
    if args.check:
        old = [p.name for p, new in pages.items() if not p.exists() or p.read_text("utf-8") != new]
        old += stale_pictures()
        sys.exit(f"out of date: {', '.join(old)}: python -m experiments.report" if old else 0)
    for path, new in pages.items():
        path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
