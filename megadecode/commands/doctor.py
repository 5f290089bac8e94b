"""`megadecode doctor`: what works here, what is missing, and how to get it."""

from __future__ import annotations

from dataclasses import asdict

import typer
from rich.console import Console
from rich.table import Table

from megadecode.commands._common import Json, print_json


def doctor(as_json: Json = False) -> None:
    """Say what works here, what is missing, and how to get it."""
    from megadecode.doctor import checks

    found = checks()
    if as_json:
        print_json([asdict(check) for check in found])
    else:
        table = Table(box=None, pad_edge=False)
        for heading in ("", "what", "found", "to do"):
            table.add_column(heading, overflow="fold")
        for check in found:
            table.add_row("ok" if check.ok else "--", check.what, check.found, check.advice)
        Console().print(table)
    if not all(check.ok for check in found if check.needed):
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Add `doctor`."""
    app.command()(doctor)
