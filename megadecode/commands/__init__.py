"""The commands of `megadecode`, one file each.

Every module here whose name does not begin with `_` has `register(app)`, which adds its command or
group of commands; nothing else need be touched to add one. What is slow to import is imported
inside the commands, so that `megadecode --help` answers at once.
"""

from __future__ import annotations

import importlib
import pkgutil

import typer

_FIRST = ("run", "chat")


def register_all(app: typer.Typer) -> None:
    """Add the commands of every module in this folder, the everyday ones first."""
    names = [m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")]
    for name in sorted(names, key=lambda name: (name not in _FIRST, name in _FIRST[1:], name)):
        importlib.import_module(f"{__name__}.{name}").register(app)
