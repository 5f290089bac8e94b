"""One way to open a model, whatever it is stored as."""

from __future__ import annotations

import os
from pathlib import Path

from megadecode.models.gguf_file import load as load_gguf
from megadecode.models.hf_folder import load_folder
from megadecode.models.store import resolve
from megadecode.models.stored import StoredModel


def load_model(model: str | os.PathLike[str], *, progress: bool = True) -> StoredModel:
    """Find a model (see `store.resolve`), fetch it if need be, and open it.

    Reads configuration and headers only. Raises ModelError.
    """
    path = resolve(model, progress=progress)
    if not path.is_dir():
        return load_gguf(path)
    # A hub id is a better name than the commit its snapshot's folder is called after.
    name = os.fspath(model)
    return load_folder(path, None if Path(name).expanduser().is_dir() else name)
