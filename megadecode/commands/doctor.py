"""`megadecode doctor`: what works here, what is missing, and how to get it."""

from __future__ import annotations

from dataclasses import asdict

import typer
from rich.console import Console

from megadecode.commands._common import Json, print_json


def doctor(as_json: Json = False) -> None:
    """Say what works here, what is missing, and how to get it."""
    from megadecode.doctor import checks

    found = checks()
    if as_json:
        print_json([asdict(check) for check in found])
    else:
        # Lines as long as they come: a path that is cut into pieces cannot be copied.
        console, width = Console(highlight=False), max(len(check.what) for check in found)
        for check in found:
            line = f"{'ok' if check.ok else '--'}  {check.what:{width}}  {check.found}"
            console.print(line, soft_wrap=True, markup=False)
            if check.advice:
                advice = f"    {'':{width}}  {check.advice}"
                console.print(advice, soft_wrap=True, markup=False, style="bold")
    if not all(check.ok for check in found if check.needed):
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Add `doctor`."""
    app.command()(doctor)
