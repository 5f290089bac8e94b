"""Reading files that may be missing, damaged or changed under us: every error names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from megadecode.errors import ModelError
from megadecode.models.weights import FloatArray


def read_json(path: Path) -> dict[str, Any]:
    """A JSON table. Raises ModelError naming the file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path}: is not a JSON table")
    return values


def read_bytes(path: Path, name: str, dtype: str, count: int, offset: int) -> np.ndarray:
    """`count` elements of the stored tensor `name`; ModelError if they are not there any more."""
    try:
        with path.open("rb") as file:
            raw = np.fromfile(file, dtype, count, offset=offset)
    except OSError as error:
        raise ModelError(f"{path}: tensor {name!r} cannot be read: {error}") from None
    if raw.size != count:
        raise ModelError(f"{path}: tensor {name!r} is cut short; the file changed on disk")
    return raw


def check_finite(path: Path, name: str, values: FloatArray) -> FloatArray:
    """`values` themselves; ModelError if there is NaN or infinity among them."""
    # min and max both carry a NaN, and need no temporary.
    if not (np.isfinite(values.min()) and np.isfinite(values.max())):
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ModelError(
            f"{path}: tensor {name!r} holds {values.flat[bad]} at element {bad}; "
            "the file is damaged"
        )
    return values
