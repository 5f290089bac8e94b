"""Checkpoints of drafters: both layouts there and back, number formats, every kind of damage."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_drafter import DRAFTER, TARGET, random_tensors, target, variant

from megadecode.drafter import Yarn, fingerprint, load_drafter, write_checkpoint, write_single_file
from megadecode.errors import ModelError
from megadecode.models.random_model import random_model


@pytest.fixture
def tensors():
    return random_tensors(DRAFTER)


def refused(message, call, *args):
    with pytest.raises(ModelError, match=f"^{re.escape(message)}$"):
        call(*args)


def equal(found, tensors) -> None:
    assert found.keys() == tensors.keys()
    for name, values in tensors.items():
        np.testing.assert_array_equal(found[name], values)


def test_the_published_layout(tmp_path, tensors) -> None:
    """Names and shapes as a checkpoint of z-lab has them, written out rather than derived."""
    assert tensors["fc.weight"].shape == (64, 3 * 64)
    assert tensors["hidden_norm.weight"].shape == tensors["norm.weight"].shape == (64,)
    of_layer = {
        "input_layernorm": (64,), "post_attention_layernorm": (64,),
        "self_attn.q_proj": (128, 64), "self_attn.k_proj": (64, 64), "self_attn.v_proj": (64, 64),
        "self_attn.o_proj": (64, 128), "self_attn.q_norm": (32,), "self_attn.k_norm": (32,),
        "mlp.gate_proj": (80, 64), "mlp.up_proj": (80, 64), "mlp.down_proj": (64, 80),
    }  # fmt: skip
    for layer in range(3):
        for name, shape in of_layer.items():
            assert tensors[f"layers.{layer}.{name}.weight"].shape == shape
    assert len(tensors) == 3 + 3 * len(of_layer)

    config = variant(
        name="published", target_fingerprint=fingerprint(target()),
        layer_types=("sliding_attention", "full_attention", "full_attention"), window=33,
        yarn=Yarn(4.0, 512), draft_tokens=tuple(range(9, 73)),
    )  # fmt: skip
    write_checkpoint(tmp_path / "published", config, tensors)
    read = load_drafter(tmp_path / "published", target())
    assert read.config == config
    equal(read.tensors(), tensors)
    np.testing.assert_array_equal(
        read.get("layers.1.q"), tensors["layers.1.self_attn.q_proj.weight"]
    )
    np.testing.assert_array_equal(read.get("context_norm"), tensors["hidden_norm.weight"])


def test_the_single_file(tmp_path, tensors) -> None:
    config = variant(prediction="next", target_fingerprint=fingerprint(target()))
    write_single_file(tmp_path / "d.safetensors", config, tensors)
    read = load_drafter(tmp_path / "d.safetensors", target())
    assert read.config == config
    equal(read.tensors(), tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_number_formats_and_sharded_checkpoints(tmp_path, tensors, dtype) -> None:
    config = variant(name=tmp_path.name, layer_types=("full_attention",) * 3)
    write_checkpoint(tmp_path, config, tensors)
    (tmp_path / "model.safetensors").unlink()
    rounded = {name: torch.from_numpy(values).to(dtype) for name, values in tensors.items()}
    half = len(rounded) // 2
    weight_map = {}
    for i, names in enumerate((list(rounded)[:half], list(rounded)[half:])):
        file = f"model-0000{i}.safetensors"
        save_file({name: rounded[name] for name in names}, tmp_path / file)
        weight_map |= dict.fromkeys(names, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    read = load_drafter(tmp_path)
    assert read.config == config
    equal(read.tensors(), {name: values.float().numpy() for name, values in rounded.items()})


def test_another_target_is_refused(tmp_path, tensors) -> None:
    file = tmp_path / "d.safetensors"
    mine, other = target(), random_model(TARGET, seed=6)
    write_single_file(file, variant(target_fingerprint=fingerprint(mine)), tensors)
    refused(
        f"drafter 'tiny drafter': its target's fingerprint is {fingerprint(mine)}; 'tiny target' "
        f"has {fingerprint(other)}. It was made for another target, or for another quantisation "
        "of this one",
        load_drafter, file, other,
    )  # fmt: skip
    write_single_file(file, DRAFTER, tensors)  # a drafter that does not know its target
    load_drafter(file, other)


def test_shapes_and_names_of_tensors(tmp_path, tensors) -> None:
    name = "layers.1.self_attn.k_norm.weight"
    wrong = tensors | {name: np.zeros(31, np.float32)}
    said = f"drafter 'tiny drafter': tensor '{name}' "
    refused(said + "has shape [31]; expected [32]", write_checkpoint, tmp_path, DRAFTER, wrong)

    write_checkpoint(tmp_path, variant(name=tmp_path.name), tensors)
    file = tmp_path / "model.safetensors"
    said = f"{tmp_path}: drafter '{tmp_path.name}': tensor "

    def stored(values):
        save_file({n: torch.from_numpy(v) for n, v in values.items()}, file)

    stored(wrong)
    refused(said + f"'{name}' has shape [31]; expected [32]", load_drafter, tmp_path)
    stored({n: v for n, v in tensors.items() if n != name})
    refused(said + f"'{name}' is missing", load_drafter, tmp_path)
    stored(tensors | {"lm_head.weight": np.zeros((203, 64), np.float32)})
    refused(
        said + "'lm_head.weight' is not part of a drafter of this configuration",
        load_drafter, tmp_path,
    )  # fmt: skip
    stored(tensors | {name: np.zeros(32, np.int32)})
    refused(
        f"{file}: tensor '{name}' has dtype I32, which cannot be converted to fp32; F32, F16, "
        "BF16 can",
        load_drafter, tmp_path,
    )  # fmt: skip


def test_damaged_and_foreign_files(tmp_path, tensors) -> None:
    file = tmp_path / "d.safetensors"
    write_single_file(file, DRAFTER, tensors)
    whole = file.read_bytes()
    for size in (0, 7, 100, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"d\.safetensors: .*; it is truncated"):
            load_drafter(file)
    save_file({"a": torch.zeros(1)}, file)
    refused(
        f"{file}: format is None, version None; expected 'megadecode-drafter', version '1'. "
        "A published checkpoint is given as its folder",
        load_drafter, file,
    )  # fmt: skip
    save_file({"a": torch.zeros(1)}, file, {"format": "megadecode-drafter", "version": "1"})
    with pytest.raises(ModelError, match="config is not JSON: "):
        load_drafter(file)
    with pytest.raises(ModelError, match=r"config\.json: cannot be read: "):
        load_drafter(tmp_path)
    with pytest.raises(ModelError, match="absent: cannot be read: No such file"):
        load_drafter(tmp_path / "absent")
    write_checkpoint(tmp_path, DRAFTER, tensors)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"fc.weight": "../elsewhere.safetensors"}}')
    refused(
        f"{index}: '../elsewhere.safetensors' is not the name of a file in this folder",
        load_drafter, tmp_path,
    )  # fmt: skip
