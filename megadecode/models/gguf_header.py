"""The header of a GGUF file: metadata and the table of tensors, read without trusting the file.

Our own reader because the `gguf` package's loops without end on an absurd array length, reports a
cut file as a numpy error, and takes two seconds over the vocabulary of a small model. Its constants
and its dequantisation are used as they are. Format: version 2 or 3, little-endian; see the GGUF
specification of the ggml project.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from megadecode.errors import ModelError

MAX_DIMS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",  # bool
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_BOOL = 7


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `shape` in elements, row-major; `offset` and `bytes` in the file."""

    name: str
    shape: tuple[int, ...]
    dtype: GGMLQuantizationType
    offset: int
    bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata values are int, float, bool, str, list[str] or a 1-D numpy array of scalars."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(path: str | os.PathLike[str]) -> GgufHeader:
    """Read and check the header. Every tensor it lists lies wholly inside the file.

    Raises ModelError naming the file and the key or tensor for anything that is not a sound GGUF.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            return _read(path, file, os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None


def _read(path: Path, file: BinaryIO, size: int) -> GgufHeader:
    cursor = _Cursor(path, file, size)
    cursor.where = "its first 24 bytes"
    if cursor.take(4) != b"GGUF":
        raise ModelError(f"{path}: not a GGUF file (it does not start with 'GGUF')")
    version = cursor.scalar("<u4")
    if version not in (2, 3):
        hint = " (a big-endian file?)" if version & 0xFFFF == 0 else ""
        raise ModelError(f"{path}: GGUF version {version}{hint}; versions 2 and 3 can be read")
    tensor_count, key_count = cursor.scalar("<u8"), cursor.scalar("<u8")

    metadata: dict[str, Any] = {}
    cursor.expect(key_count, 13, "metadata keys")
    for index in range(key_count):
        cursor.where = f"metadata key {index}"
        key = cursor.string()
        cursor.where = f"metadata key {key!r}"
        if key in metadata:
            raise ModelError(f"{path}: metadata key {key!r} appears twice")
        metadata[key] = cursor.value(cursor.scalar("<u4"))

    cursor.where = "the tensor table"
    cursor.expect(tensor_count, 24, "tensors")
    rows = []
    for index in range(tensor_count):
        cursor.where = f"tensor {index} of the tensor table"
        rows.append(_tensor_row(cursor))

    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise ModelError(f"{path}: general.alignment is {alignment!r}; it must be a power of two")
    data_start = -(-cursor.offset // alignment) * alignment
    return GgufHeader(path, metadata, _place(path, rows, data_start, alignment, size))


class _Cursor:
    """Reads forward; every length is compared with what is left of the file before it is used."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.file, self.size = path, file, size
        self.offset = 0
        self.where = ""

    def take(self, count: int) -> bytes:
        if count > self.size - self.offset:
            raise ModelError(
                f"{self.path}: the file ends inside {self.where}: {count} bytes wanted at byte "
                f"{self.offset}, {self.size - self.offset} left; it is truncated or damaged"
            )
        data = self.file.read(count)
        if len(data) != count:
            raise ModelError(f"{self.path}: the file shrank while it was read")
        self.offset += count
        return data

    def expect(self, count: int, least_bytes: int, what: str) -> None:
        """Refuse a count that cannot be true before anything loops over it."""
        if count * least_bytes > self.size - self.offset:
            raise ModelError(
                f"{self.path}: {self.where} claims {count} {what}, more than the file of "
                f"{self.size} bytes can hold; it is truncated or damaged"
            )

    def scalar(self, dtype: str) -> int:
        return int(np.frombuffer(self.take(int(dtype[-1])), dtype)[0])

    def string(self) -> str:
        (length,) = struct.unpack("<Q", self.take(8))
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise ModelError(
                f"{self.path}: {self.where} is not UTF-8 text; it is damaged"
            ) from None

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise ModelError(f"{self.path}: {self.where} has the unknown value type {kind}")
        dtype = _SCALARS[kind]
        value = np.frombuffer(self.take(int(dtype[-1])), dtype)[0].item()
        return bool(value) if kind == _BOOL else value

    def array(self) -> Any:
        kind, count = self.scalar("<u4"), self.scalar("<u8")
        if kind == _STRING:
            self.expect(count, 8, "strings")
            return [self.string() for _ in range(count)]
        if kind not in _SCALARS:
            raise ModelError(
                f"{self.path}: {self.where} is an array of value type {kind}; "
                "arrays of scalars and of strings can be read"
            )
        dtype = _SCALARS[kind]
        values = np.frombuffer(self.take(count * int(dtype[-1])), dtype)
        return values != 0 if kind == _BOOL else values


def _tensor_row(cursor: _Cursor) -> TensorInfo:
    """One row of the table, its offset still relative to the start of the data."""
    name = cursor.string()
    cursor.where = f"the table entry of tensor {name!r}"
    dims = cursor.scalar("<u4")
    if not 1 <= dims <= MAX_DIMS:
        raise ModelError(
            f"{cursor.path}: tensor {name!r} has {dims} dimensions; 1 to 4 are possible"
        )
    # GGUF lists the fastest dimension first.
    shape = tuple(cursor.scalar("<u8") for _ in range(dims))[::-1]
    kind = cursor.scalar("<u4")
    try:
        dtype = GGMLQuantizationType(kind)
        block, block_bytes = GGML_QUANT_SIZES[dtype]
    except (ValueError, KeyError):
        raise ModelError(f"{cursor.path}: tensor {name!r} has the unknown dtype {kind}") from None
    if 0 in shape:
        raise ModelError(f"{cursor.path}: tensor {name!r} has the empty shape {list(shape)}")
    if shape[-1] % block:
        raise ModelError(
            f"{cursor.path}: tensor {name!r} has rows of {shape[-1]} elements, "
            f"which {dtype.name} blocks of {block} do not divide"
        )
    elements = math.prod(shape)
    return TensorInfo(name, shape, dtype, cursor.scalar("<u8"), elements // block * block_bytes)


def _place(
    path: Path, rows: list[TensorInfo], data_start: int, alignment: int, size: int
) -> dict[str, TensorInfo]:
    """Absolute offsets, after the checks that make reading any tensor safe."""
    tensors: dict[str, TensorInfo] = {}
    end_before, name_before = data_start, ""
    for row in sorted(rows, key=lambda row: row.offset):
        begin = data_start + row.offset
        if row.name in tensors:
            raise ModelError(f"{path}: tensor {row.name!r} appears twice")
        if row.offset % alignment:
            raise ModelError(
                f"{path}: tensor {row.name!r} lies at offset {row.offset}, "
                f"not a multiple of the alignment {alignment}; the file is damaged"
            )
        if begin < end_before:
            raise ModelError(
                f"{path}: tensors {name_before!r} and {row.name!r} overlap; the file is damaged"
            )
        if begin + row.bytes > size:
            raise ModelError(
                f"{path}: tensor {row.name!r} needs bytes {begin} to {begin + row.bytes}, "
                f"but the file ends at {size}; it is truncated"
            )
        tensors[row.name] = TensorInfo(row.name, row.shape, row.dtype, begin, row.bytes)
        end_before, name_before = begin + row.bytes, row.name
    return tensors
