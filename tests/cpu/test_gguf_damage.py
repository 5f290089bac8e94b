"""Damaged GGUF files: a message that names the fault, never a crash."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest
from tiny_gguf import write_gguf

from megadecode.errors import ModelError
from megadecode.models.gguf_file import load
from megadecode.models.gguf_header import read_header


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def use_all(path: Path) -> None:
    """Everything a file can be asked for."""
    model = load(path)
    model.tokenizer()
    for _ in model.tensors():
        pass


def test_cut_anywhere_is_refused(tiny: Path, tmp_path: Path) -> None:
    """Every length in the first bytes, then a prime stride through header and weights."""
    whole = tiny.read_bytes()
    tensors = read_header(tiny).tensors.values()
    needed = max(info.offset + info.bytes for info in tensors)
    path = tmp_path / "cut.gguf"
    for length in [*range(200), *range(200, needed, 61), needed - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=re.escape(str(path))):
            load(path)
    path.write_bytes(whole[:needed])
    use_all(path)


def test_cut_weights_name_the_tensor(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    header = read_header(tiny)
    for info in header.tensors.values():
        end = info.offset + info.bytes
        path.write_bytes(tiny.read_bytes()[: end - 1])
        with pytest.raises(ModelError) as caught:
            load(path)
        assert str(caught.value) == (
            f"{path}: tensor {info.name!r} needs bytes {info.offset} to {end}, "
            f"but the file ends at {end - 1}; it is truncated"
        )


def test_file_cut_after_it_was_opened(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "shrinks.gguf"
    path.write_bytes(tiny.read_bytes())
    model = load(path)
    path.write_bytes(tiny.read_bytes()[:9000])
    with pytest.raises(ModelError, match=r"tensor 'token_embd\.weight' is cut short"):
        model.tensor("embed")
    path.unlink()
    with pytest.raises(ModelError, match="cannot be read: "):
        model.tensor("embed")


def test_changed_bytes_never_crash(tiny: Path, tmp_path: Path) -> None:
    """Any byte of the header may hold anything: a message, or a model with finite weights."""
    whole = bytearray(tiny.read_bytes())
    header_bytes = min(info.offset for info in read_header(tiny).tensors.values())
    rng = np.random.default_rng(20)
    path = tmp_path / "changed.gguf"
    messages = []
    for _ in range(1500):
        changed = bytearray(whole)
        for at in rng.integers(0, header_bytes, rng.integers(1, 4)):
            changed[at] = rng.integers(0, 256)
        path.write_bytes(changed)
        try:
            use_all(path)
        except ModelError as error:
            messages.append(str(error))
    assert len(messages) > 100
    assert all(message.startswith(str(path)) for message in messages)


def header_of(*pieces: bytes, tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"".join((b"GGUF", struct.pack("<IQQ", version, tensors, keys), *pieces))


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def table_row(
    name: str = "t", shape: tuple[int, ...] = (32,), dtype: int = 0, offset: int = 0
) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", dtype, offset)


HUGE = 2**62
DAMAGED = {
    "empty": (b"", "the file ends inside its first 24 bytes: 4 bytes wanted at byte 0, 0 left"),
    "other file": (b"PK\3\4" + bytes(40), "not a GGUF file (it does not start with 'GGUF')"),
    "version 1": (header_of(version=1), "GGUF version 1; versions 2 and 3 can be read"),
    "version 4": (header_of(version=4), "GGUF version 4; versions 2 and 3 can be read"),
    "big-endian": (
        header_of(version=0x03000000),
        "GGUF version 50331648 (a big-endian file?); versions 2 and 3 can be read",
    ),
    "keys": (header_of(keys=HUGE), f"claims {HUGE} metadata keys, more than the file of 24 bytes"),
    "tensors": (header_of(tensors=HUGE), f"the tensor table claims {HUGE} tensors, more than"),
    "key length": (header_of(struct.pack("<Q", HUGE), bytes(9), keys=1), f"{HUGE} bytes wanted"),
    "array length": (
        header_of(text("k"), struct.pack("<IIQ", 9, 0, HUGE), keys=1),
        f"the file ends inside metadata key 'k': {HUGE} bytes wanted",
    ),
    "strings": (
        header_of(text("k"), struct.pack("<IIQ", 9, 8, HUGE), keys=1),
        f"metadata key 'k' claims {HUGE} strings",
    ),
    "nested": (
        header_of(text("k"), struct.pack("<IIQ", 9, 9, 1), keys=1),
        "metadata key 'k' is an array of value type 9; arrays of scalars and of strings can be",
    ),
    "value type": (
        header_of(text("k"), struct.pack("<I", 13), bytes(8), keys=1),
        "metadata key 'k' has the unknown value type 13",
    ),
    "not UTF-8": (
        header_of(struct.pack("<Q", 1), b"\xff", bytes(8), keys=1),
        "metadata key 0 is not UTF-8 text; it is damaged",
    ),
    "key twice": (
        header_of(*[text("k") + struct.pack("<II", 4, 1)] * 2, keys=2),
        "metadata key 'k' appears twice",
    ),
    "alignment": (
        header_of(text("general.alignment"), struct.pack("<II", 4, 48), keys=1),
        "general.alignment is 48; it must be a power of two",
    ),
    "no dimensions": (
        header_of(table_row(shape=()), bytes(64), tensors=1),
        "tensor 't' has 0 dimensions; 1 to 4 are possible",
    ),
    "dimensions": (
        header_of(table_row(shape=(1,) * 5), tensors=1),
        "tensor 't' has 5 dimensions; 1 to 4 are possible",
    ),
    "tensor dtype": (header_of(table_row(dtype=999), tensors=1), "'t' has the unknown dtype 999"),
    "no elements": (header_of(table_row(shape=(0, 4)), tensors=1), "has the empty shape [4, 0]"),
    "half a block": (
        header_of(table_row(shape=(33, 2), dtype=8), tensors=1),
        "tensor 't' has rows of 33 elements, which Q8_0 blocks of 32 do not divide",
    ),
    "size overflow": (
        header_of(table_row(shape=(2**33, 2**33)), tensors=1),
        f"tensor 't' needs bytes 96 to {96 + 4 * 2**66}, but the file ends at",
    ),
    "offset": (header_of(table_row(offset=2**63), tensors=1), "tensor 't' needs bytes"),
    "misaligned": (
        header_of(table_row(offset=4), bytes(256), tensors=1),
        "tensor 't' lies at offset 4, not a multiple of the alignment 32; the file is damaged",
    ),
    "tensor twice": (
        header_of(table_row(), table_row(offset=128), bytes(512), tensors=2),
        "tensor 't' appears twice",
    ),
    "overlap": (
        header_of(table_row("a"), table_row("b", offset=96), bytes(512), tensors=2),
        "tensors 'a' and 'b' overlap; the file is damaged",
    ),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("damage", DAMAGED)
def test_damage_has_a_message(tmp_path: Path, damage: str) -> None:
    data, message = DAMAGED[damage]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        load(tmp_path / "nothing.gguf")
    with pytest.raises(ModelError, match="cannot be read: Is a directory"):
        load(tmp_path)
