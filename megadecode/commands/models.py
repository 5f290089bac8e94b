"""`megadecode models`: what can be run by name, and what of it is on this machine."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from megadecode.commands._common import Json, notes, print_json

group = typer.Typer(no_args_is_help=True, help="List, fetch and remove models.")
Name = Annotated[str, typer.Argument(help="A known model's name.")]


@group.command("list")
def list_models(as_json: Json = False) -> None:
    """Known models, and whether they are in the cache."""
    from megadecode.errors import ModelError
    from megadecode.models.store import KNOWN, status

    found = []
    for known in KNOWN.values():
        try:
            state = "fetched" if status(known.name) else "not fetched"
        except ModelError:
            state = "damaged"
        found.append(
            {
                "name": known.name, "title": known.title, "license": known.license,
                "bytes": known.bytes, "state": state, "path": str(known.path),
            }
        )  # fmt: skip
    if as_json:
        print_json(found)
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "what", "license", "size", "state"):
        table.add_column(heading, overflow="fold")
    for m in found:
        size = f"{m['bytes'] / 1e6:.0f} MB"  # type: ignore[operator]
        table.add_row(*(str(m[k]) for k in ("name", "title", "license")), size, str(m["state"]))
    Console().print(table)


@group.command()
def fetch(name: Name, as_json: Json = False) -> None:
    """Bring a model into the cache, or check the one that is there, byte by byte."""
    from megadecode.models.store import KNOWN, resolve, status

    if name not in KNOWN:
        status(name)  # says which there are
    path = resolve(name, full_check=True)
    if as_json:
        print_json({"name": name, "path": str(path)})
    else:
        notes().print(f"{name} is at {path}", soft_wrap=True)


@group.command()
def remove(name: Name, as_json: Json = False) -> None:
    """Delete a model from the cache."""
    from megadecode.models.store import remove as remove_model

    freed = remove_model(name)
    if as_json:
        print_json({"name": name, "freed_bytes": freed})
    else:
        notes().print(f"{freed / 1e6:.0f} MB freed" if freed else f"{name} was not there")


def register(app: typer.Typer) -> None:
    """Add the group `models`."""
    app.add_typer(group, name="models")
