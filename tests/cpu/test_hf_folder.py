"""Hugging Face folders that cannot be used: a message naming the file or the tensor."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_models import write_folder
from safetensors.numpy import load_file, save_file
from tiny_folders import SHAPE, UP, edit, folder, refused, written

from megadecode.errors import ModelError
from megadecode.models.hf_folder import load_folder
from megadecode.models.random_model import random_model
from megadecode.models.safetensors_file import INDEX, WEIGHTS

__all__ = ["folder", "written"]  # fixtures

# -- tensors --------------------------------------------------------------------------------------


def change(path: Path, tensors: dict[str, Any]) -> None:
    """Replace, add or (None) leave out tensors of a single file."""
    kept = load_file(path / WEIGHTS) | tensors
    save_file({name: values for name, values in kept.items() if values is not None}, path / WEIGHTS)


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


TENSORS: dict[str, tuple[str, dict[str, Any], str, bool]] = {
    "missing": ("llama", {UP: None}, f"tensor {UP!r} is missing; expected [48, 32]", False),
    "no bias": (
        "qwen2", {"model.layers.0.self_attn.k_proj.bias": None},
        "tensor 'model.layers.0.self_attn.k_proj.bias' is missing; expected [16]", False,
    ),
    "no head": (
        "llama", {"lm_head.weight": None},
        "tensor 'lm_head.weight' is missing; expected [60, 32]", False,
    ),
    "shape": (
        "llama", {UP: zeros(32, 48)},
        f"tensor {UP!r} has shape [32, 48]; its configuration asks for [48, 32]", True,
    ),
    "norm's shape": (
        "qwen3", {"model.layers.1.self_attn.q_norm.weight": zeros(32)},
        "tensor 'model.layers.1.self_attn.q_norm.weight' has shape [32]; its configuration asks "
        "for [8]", True,
    ),
    "dtype": (
        "llama", {UP: zeros(48, 32, dtype=np.int8)},
        f"tensor {UP!r} has dtype I8, which cannot be converted to fp32; F32, F16, BF16 can", True,
    ),
    "double": (
        "llama", {UP: zeros(48, 32, dtype=np.float64)},
        f"tensor {UP!r} has dtype F64, which cannot be converted to fp32; F32, F16, BF16 can", True,
    ),
    "output bias": (
        "qwen2", {"model.layers.0.self_attn.o_proj.bias": zeros(32)},
        "tensor 'model.layers.0.self_attn.o_proj.bias' is not part of a model of this "
        "configuration; it would change the result", False,
    ),
    "experts": (
        "llama", {"model.layers.0.mlp.experts.3.up_proj.weight": zeros(48, 32)},
        "tensor 'model.layers.0.mlp.experts.3.up_proj.weight' is not part of a model of this "
        "configuration; it would change the result", False,
    ),
    "infinity": (
        "llama", {UP: np.full((48, 32), np.inf, np.float32)},
        f"tensor {UP!r} holds inf at element 0; the file is damaged", True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(folder: Callable[[str], Path], name: str) -> None:
    family, changes, message, is_of_file = TENSORS[name]
    path = folder(family)
    change(path, changes)
    refused(path, message, path / WEIGHTS if is_of_file else path)


def test_more_layers_than_tensors(folder: Callable[[str], Path]) -> None:
    path = folder("llama")
    edit(path / "config.json", {"num_hidden_layers": 4_000_000_000})
    refused(path, "num_hidden_layers is 4000000000, but there are 21 tensors")


def test_what_changes_nothing_is_passed_over(folder: Callable[[str], Path]) -> None:
    path = folder("llama")
    change(path, {"model.layers.0.self_attn.rotary_emb.inv_freq": zeros(4)})
    edit(path / "config.json", {"tie_word_embeddings": True, "torch_dtype": "float32", "foo": 1})
    found = load_folder(path)
    assert found.config.tied_embeddings
    assert found.tensor("head") is found.tensor("embed")  # a stored head is not used then


# -- files ----------------------------------------------------------------------------------------


def test_folders_without_the_files(tmp_path: Path, folder: Callable[[str], Path]) -> None:
    refused(
        tmp_path,
        f"there is no config.json; a Hugging Face folder holds config.json, {WEIGHTS} (or shards "
        "and their index) and tokenizer.json",
    )
    path = folder("llama")
    (path / WEIGHTS).rename(path / "pytorch_model.bin")
    refused(path, f"there is neither {WEIGHTS} nor {INDEX}; pytorch_model.bin is not read")
    (path / "pytorch_model.bin").unlink()
    refused(path, f"there is neither {WEIGHTS} nor {INDEX}")


def test_shards(folder: Callable[[str], Path]) -> None:
    path = folder("sharded")
    index = path / INDEX
    places = json.loads(index.read_text())["weight_map"]
    shard = places[UP]
    moved = dict(places) | {UP: next(file for file in places.values() if file != shard)}
    edit(index, {"weight_map": moved})
    refused(path, f"tensor {UP!r} is not in {moved[UP]}, where it should be", index)
    edit(index, {"weight_map": {k: v for k, v in places.items() if k != UP}})
    refused(path, f"tensor {UP!r} is missing; expected [48, 32]")
    edit(index, {"weight_map": places | {UP: "../" + shard}})
    refused(path, f"'../{shard}' is not the name of a file in this folder", index)
    for wrong in (None, ["a"], {UP: 3}):
        edit(index, {"weight_map": wrong})
        refused(path, "weight_map is missing or is not a table of file names", index)
    edit(index, {"weight_map": places})
    first = next(name for name, file in places.items() if file == shard)
    (path / shard).unlink()
    refused(path, f"tensor {first!r} is in {shard}, which is missing", index)


def raw_file(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(**changes: Any) -> dict[str, Any]:
    return {UP: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


DAMAGED = {
    "empty": (b"", "its header claims 0 bytes, the file has 0; it is truncated or no safetensors"),
    "short": (b"1234567", "its header claims 15540725856023089 bytes, the file has 7;"),
    "long header": (struct.pack("<Q", 2**40), f"its header claims {2**40} bytes, the file has 8;"),
    "other file": (b"PK\3\4" + bytes(40), "its header claims 67324752 bytes, the file has 44;"),
    "GGUF": (b"GGUF" + bytes(40), "is a GGUF file; a safetensors file is needed here"),
    "not JSON": (raw_file(b"{not"), "its header is damaged: Expecting property name"),
    "no table": (raw_file([1]), "its header is damaged: not a JSON table"),
    "metadata": (
        raw_file({"__metadata__": 5}), "its header is damaged: __metadata__ is 5",
    ),
    "twice": (raw_file(b'{"a": {}, "a": {}}'), "its header is damaged: 'a' appears twice"),
    "no entry": (raw_file({UP: 5}), f"the entry of tensor {UP!r} is damaged: 5"),
    "no dtype": (raw_file(entry(dtype=None)), f"the entry of tensor {UP!r} is damaged: {{'dtype"),
    "negative": (raw_file(entry(shape=[-2])), f"the entry of tensor {UP!r} is damaged: {{'dtype"),
    "no elements": (raw_file(entry(shape=[0])), f"the entry of tensor {UP!r} is damaged"),
    "backwards": (raw_file(entry(data_offsets=[8, 0])), f"the entry of tensor {UP!r} is damaged"),
    "three offsets": (
        raw_file(entry(data_offsets=[0, 4, 8])), f"the entry of tensor {UP!r} is damaged",
    ),
    "cut": (
        raw_file(entry(), bytes(7)),
        f"tensor {UP!r} needs bytes 101 to 109, but the file ends at 108; it is truncated",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files(folder: Callable[[str], Path], name: str) -> None:
    data, message = DAMAGED[name]
    path = folder("llama")
    (path / WEIGHTS).write_bytes(data)
    with pytest.raises(ModelError) as caught:
        load_folder(path)
    assert str(caught.value).startswith(f"{path / WEIGHTS}: {message}")


def test_bytes_that_are_not_the_shapes(folder: Callable[[str], Path]) -> None:
    path = folder("llama")
    raw = (path / WEIGHTS).read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    begin, end = header[UP]["data_offsets"]
    header[UP]["data_offsets"] = [begin, end - 4]
    (path / WEIGHTS).write_bytes(raw_file(header, raw[8 + size :]))
    refused(
        path,
        f"tensor {UP!r} has {48 * 32 * 4 - 4} bytes; F32 [48, 32] takes {48 * 32 * 4}; "
        "the file is damaged",
        path / WEIGHTS,
    )


def test_cut_anywhere_is_refused(folder: Callable[[str], Path]) -> None:
    path = folder("llama")
    whole = (path / WEIGHTS).read_bytes()
    for length in [*range(12), *range(12, len(whole), 997), len(whole) - 1]:
        (path / WEIGHTS).write_bytes(whole[:length])
        with pytest.raises(ModelError, match="truncated"):
            load_folder(path)


def test_changed_headers_never_crash(folder: Callable[[str], Path]) -> None:
    """Any byte of the header may hold anything: a message, or a model with finite weights."""
    path = folder("llama")
    whole = (path / WEIGHTS).read_bytes()
    size = 8 + struct.unpack("<Q", whole[:8])[0]
    rng = np.random.default_rng(20)
    messages = 0
    for _ in range(300):
        changed = bytearray(whole)
        for at in rng.integers(0, size, rng.integers(1, 4)):
            changed[at] = rng.integers(0, 256)
        (path / WEIGHTS).write_bytes(changed)
        try:
            for _ in load_folder(path).tensors():
                pass
        except ModelError as error:
            messages += 1
            assert str(error).startswith(str(path))
    assert messages > 100


def test_file_cut_after_it_was_opened(folder: Callable[[str], Path]) -> None:
    path = folder("qwen3")
    model = load_folder(path)
    with (path / WEIGHTS).open("r+b") as file:
        file.truncate(9000)
    with pytest.raises(ModelError, match=r"tensor 'model\.norm\.weight' is cut short; the file"):
        model.tensor("final_norm")
    (path / WEIGHTS).unlink()
    with pytest.raises(ModelError, match=r"tensor 'model\.norm\.weight' cannot be read: "):
        model.tensor("final_norm")


def test_bfloat16_values_are_exact(folder: Callable[[str], Path], tmp_path: Path) -> None:
    weights = random_model(SHAPE, 5)
    write_folder(tmp_path / "half", weights, torch.bfloat16)
    got = load_folder(tmp_path / "half").tensor("layers.1.up")
    expected = torch.from_numpy(weights.tensor("layers.1.up")).bfloat16().float().numpy()
    np.testing.assert_array_equal(got, expected)
