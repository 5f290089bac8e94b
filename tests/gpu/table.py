"""What GPU tests have measured: printed behind the last test, and kept as JSON.

MEGADECODE_RESULT: a file for the JSON, with provenance.
"""

from __future__ import annotations

import json
import os
from typing import Any

FIGURES: dict[str, Any] = {}
_lines: list[str] = []


def note(name: str, text: str, **figures: Any) -> None:
    """A line of the table, and its figures for the file."""
    FIGURES[name] = figures
    _lines.append(f"{name:34s} {text}")


def lines() -> list[str]:
    return list(_lines)


def write() -> None:
    """The file, if one was asked for."""
    path = os.environ.get("MEGADECODE_RESULT")
    if path and FIGURES:
        from experiments.provenance import provenance

        report = {"about": "tests/gpu/test_speculation.py", **provenance(), "figures": FIGURES}
        with open(path, "w") as file:
            file.write(json.dumps(report, indent=1) + "\n")
