"""What several commands share: options, and the two ways of saying things."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

Model = Annotated[str, typer.Option(help="A known model's name or the path of a GGUF file.")]
Device = Annotated[str, typer.Option(help="auto or cpu.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Ctx = Annotated[int, typer.Option(help="Positions a request may use.")]
WeightType = Annotated[str | None, typer.Option(help="fp32 or bf16.")]
Draft = Annotated[str, typer.Option(help="auto, off or a drafter's path.")]
Budget = Annotated[str, typer.Option(help="Nodes to verify a step, or auto.")]
Shape = Annotated[str, typer.Option(help="tree or chain.")]


def print_json(value: Any) -> None:
    """One JSON value on a line of its own, at once: whoever reads a stream need not wait."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def notes() -> Console:
    """Where everything goes that is not the answer itself."""
    return Console(stderr=True, highlight=False)


def fail(message: str) -> int:
    """One red line on standard error; the exit code that belongs to it."""
    console = Console(stderr=True, soft_wrap=True)
    console.print(f"megadecode: {message}", style="red", markup=False, highlight=False)
    return 1


def budget_of(text: str) -> str | int:
    """`--budget` as the engine takes it."""
    return int(text) if text.isdigit() else text
