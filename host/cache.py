"""Where files that outlive the process go: models, and code compiled for this machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path:
    """The cache folder: `MEGADECODE_HOME`, else `megadecode` under the user's cache folder.

    The folder need not exist; whoever writes into it creates it.
    """
    chosen = os.environ.get("MEGADECODE_HOME")
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "megadecode"
