"""safetensors files and folders of them, one tensor at a time, read without trusting the header.

Our own reader because the `safetensors` package gives numpy no bfloat16, and names no tensor when a
file is cut or damaged. Format: 8 bytes little-endian header length, a JSON table, then the data.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megadecode.errors import ModelError
from megadecode.models.files import check_finite, read_bytes, read_json
from megadecode.models.weights import FloatArray

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_KINDS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class StoredTensor:
    """`dtype` as the file spells it; `offset` and `bytes` in the file."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int

    def check_readable(self) -> None:
        """ModelError unless the dtype can be converted and the bytes are as many as the shape's."""
        if self.dtype not in _KINDS:
            raise ModelError(
                f"{self.path}: tensor {self.name!r} has dtype {self.dtype}, which cannot be "
                f"converted to fp32; {', '.join(_KINDS)} can"
            )
        needed = math.prod(self.shape) * np.dtype(_KINDS[self.dtype]).itemsize
        if needed != self.bytes:
            raise ModelError(
                f"{self.path}: tensor {self.name!r} has {self.bytes} bytes; {self.dtype} "
                f"{list(self.shape)} takes {needed}; the file is damaged"
            )

    def read(self) -> FloatArray:
        """fp32 values in the tensor's shape."""
        kind = _KINDS[self.dtype]
        values = read_bytes(self.path, self.name, kind, math.prod(self.shape), self.offset)
        if self.dtype == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return check_finite(
            self.path, self.name, values.astype(np.float32, copy=False).reshape(self.shape)
        )


def open_weights(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder by its name; with an index, exactly what the index lists.

    Raises ModelError, also for a shard that is missing or does not hold what the index says.
    """
    index = folder / INDEX
    if not index.exists():
        if (folder / WEIGHTS).is_file():
            return read_safetensors(folder / WEIGHTS)[0]
        others = sorted(p.name for p in folder.glob("*.bin")) or sorted(
            p.name for p in folder.glob("*.safetensors")
        )
        found = f"; {others[0]} is not read" if others else ""
        raise ModelError(f"{folder}: there is neither {WEIGHTS} nor {INDEX}{found}")
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise ModelError(f"{index}: weight_map is missing or is not a table of file names")
    shards: dict[str, dict[str, StoredTensor]] = {}
    for name, file in places.items():
        if file not in shards:
            if Path(file).name != file:
                raise ModelError(f"{index}: {file!r} is not the name of a file in this folder")
            if not (folder / file).is_file():
                raise ModelError(f"{index}: tensor {name!r} is in {file}, which is missing")
            shards[file] = read_safetensors(folder / file)[0]
        if name not in shards[file]:
            raise ModelError(f"{index}: tensor {name!r} is not in {file}, where it should be")
    return {name: shards[file][name] for name, file in places.items()}


def read_safetensors(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of a file, each of which lies wholly inside it, and its metadata.

    Raises ModelError.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            first = file.read(8)
            length = int.from_bytes(first, "little")
            if first.startswith(b"GGUF"):
                raise ModelError(f"{path}: is a GGUF file; a safetensors file is needed here")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise ModelError(
                    f"{path}: its header claims {length} bytes, the file has {size}; it is "
                    "truncated or no safetensors file"
                )
            raw = file.read(length)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        header = json.loads(raw, object_pairs_hook=_unique)
    except ValueError as error:
        raise ModelError(f"{path}: its header is damaged: {error}") from None
    if not isinstance(header, dict):
        raise ModelError(f"{path}: its header is damaged: not a JSON table")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise ModelError(f"{path}: its header is damaged: __metadata__ is {metadata!r:.80}")
    start = 8 + length
    return {name: _entry(path, name, e, start, size) for name, e in header.items()}, metadata


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} appears twice")
    return table


def _entry(path: Path, name: str, entry: Any, start: int, size: int) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = (*shape, begin, end)
        sound = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in numbers)
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound or 0 in shape or end < begin:
        raise ModelError(f"{path}: the entry of tensor {name!r} is damaged: {entry!r:.200}")
    if start + end > size:
        raise ModelError(
            f"{path}: tensor {name!r} needs bytes {start + begin} to {start + end}, "
            f"but the file ends at {size}; it is truncated"
        )
    return StoredTensor(path, name, dtype, tuple(shape), start + begin, end - begin)
