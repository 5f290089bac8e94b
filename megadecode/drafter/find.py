"""Which drafter an engine uses: the one it was given, or one that fits its target."""

from __future__ import annotations

import os
from pathlib import Path

from host.cache import cache_home
from megadecode.drafter.io import Drafter, load_drafter
from megadecode.drafter.target import fingerprint
from megadecode.errors import ModelError
from megadecode.models.weights import Weights

SHIPPED = Path(__file__).parent / "shipped"


def places() -> list[Path]:
    """Folders that `auto` looks through, in order: inside the package, then the user's cache."""
    return [SHIPPED, cache_home() / "drafters"]


def find_drafter(target: Weights) -> Drafter | None:
    """The first single-file drafter whose target fingerprint is this target's, or None.

    A file that cannot be read is passed over: it was not asked for.
    """
    files = [file for folder in places() for file in sorted(folder.glob("*.safetensors"))]
    mine = fingerprint(target) if files else ""
    for file in files:
        try:
            drafter = load_drafter(file)
        except ModelError:
            continue
        if drafter.config.target_fingerprint == mine:
            return drafter
    return None


def choose_drafter(draft: str | os.PathLike[str] | Drafter, target: Weights) -> Drafter | None:
    """`off`: none; `auto`: one that fits, if there is; `random`: a preset's own; a path or a
    drafter: that one, checked against the target. Raises ModelError for one that does not fit."""
    if isinstance(draft, Drafter):
        draft.check_target(target)
        return draft
    if draft == "off":
        return None
    make = getattr(target, "drafter", None)
    if draft == "random" and callable(make):
        return make()
    if draft == "auto":
        return None if callable(make) else find_drafter(target)
    return load_drafter(draft, target)
