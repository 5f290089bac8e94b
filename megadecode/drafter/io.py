"""Drafters on disk: the published checkpoint layout, and one safetensors file of our own.

Tensors keep their published names everywhere. A tensor that is missing, unknown or of another shape
is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from megadecode.drafter.config import DrafterConfig
from megadecode.drafter.published import published_values, read_published
from megadecode.drafter.target import fingerprint
from megadecode.errors import ModelError
from megadecode.models.files import read_json
from megadecode.models.safetensors_file import StoredTensor, open_weights, read_safetensors
from megadecode.models.weights import FloatArray, Weights

FORMAT = "megadecode-drafter"
VERSION = "1"

_LAYER = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "o": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_TOP = {"fc": "fc", "context_norm": "hidden_norm", "final_norm": "norm"}


def published_name(canonical: str) -> str:
    """The published name of `fc`, `context_norm`, `final_norm` or `layers.{i}.{part}`."""
    if canonical in _TOP:
        return _TOP[canonical] + ".weight"
    layers, number, part = canonical.split(".")
    return f"{layers}.{number}.{_LAYER[part]}.weight"


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a drafter: published name -> shape; linear weights are [outputs, inputs]."""
    c = config
    q_rows, kv_rows = c.heads * c.head_dim, c.kv_heads * c.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (c.hidden,),
        "q": (q_rows, c.hidden),
        "k": (kv_rows, c.hidden),
        "v": (kv_rows, c.hidden),
        "q_norm": (c.head_dim,),
        "k_norm": (c.head_dim,),
        "o": (c.hidden, q_rows),
        "ffn_norm": (c.hidden,),
        "gate": (c.ffn, c.hidden),
        "up": (c.ffn, c.hidden),
        "down": (c.hidden, c.ffn),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (c.hidden, c.feature_size),
        "context_norm": (c.hidden,),
    }
    for i in range(c.layers):
        shapes |= {f"layers.{i}.{part}": shape for part, shape in layer.items()}
    shapes["final_norm"] = (c.hidden,)
    return {published_name(name): shape for name, shape in shapes.items()}


class Drafter:
    """A drafter's configuration and its fp32 tensors by published name, read when asked for."""

    def __init__(self, config: DrafterConfig, tensors: Mapping[str, Any]) -> None:
        _check_tensors(config, {name: tuple(t.shape) for name, t in tensors.items()})
        self.config = config
        self._tensors = tensors

    def tensor(self, name: str) -> FloatArray:
        """fp32, C-contiguous; KeyError for a name that is not in `tensor_shapes`."""
        values = self._tensors[name]
        read = values.read() if isinstance(values, StoredTensor) else values
        return np.ascontiguousarray(read, np.float32)

    def get(self, canonical: str) -> FloatArray:
        """The tensor of a canonical name: `fc`, `context_norm`, `layers.0.q`, ..."""
        return self.tensor(published_name(canonical))

    def tensors(self) -> dict[str, FloatArray]:
        return {name: self.tensor(name) for name in tensor_shapes(self.config)}

    def check_target(self, target: Weights) -> None:
        """ModelError unless `target` has the right shape and, where known, the right weights."""
        self.config.check_target(target.config)
        expected = self.config.target_fingerprint
        if expected is not None and (found := fingerprint(target)) != expected:
            raise ModelError(
                f"drafter {self.config.name!r}: its target's fingerprint is {expected}; "
                f"{target.config.name!r} has {found}. It was made for another target, or for "
                f"another quantisation of this one"
            )


def load_drafter(path: str | os.PathLike[str], target: Weights | None = None) -> Drafter:
    """Read a checkpoint folder (`config.json`, safetensors) or our single file, and check it.

    With `target`, also that the drafter belongs to it. Raises ModelError.
    """
    where = Path(path)
    layers = None if target is None else target.config.layers
    if where.is_dir():
        config = read_published(where.name, read_json(where / "config.json"), layers)
        stored = open_weights(where)
    else:
        stored, metadata = read_safetensors(where)
        kind, version = metadata.get("format"), metadata.get("version")
        if (kind, version) != (FORMAT, VERSION):
            raise ModelError(
                f"{where}: format is {kind!r}, version {version!r}; expected {FORMAT!r}, "
                f"version {VERSION!r}. A published checkpoint is given as its folder"
            )
        config = DrafterConfig.from_dict(_parse(metadata.get("config", ""), f"{where}: config"))
    for tensor in stored.values():
        tensor.check_readable()
    try:
        drafter = Drafter(config, stored)
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from None
    if target is not None:
        drafter.check_target(target)
    return drafter


def write_checkpoint(
    folder: str | os.PathLike[str], config: DrafterConfig, tensors: Mapping[str, FloatArray]
) -> None:
    """Write the published layout: `config.json` and `model.safetensors` (fp32)."""
    where = Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    _save(where / "model.safetensors", config, tensors, {"format": "pt"})
    _replace(where / "config.json", json.dumps(published_values(config), indent=2) + "\n")


def write_single_file(
    path: str | os.PathLike[str], config: DrafterConfig, tensors: Mapping[str, FloatArray]
) -> None:
    """Write one safetensors file (fp32) that holds the configuration in its metadata."""
    _save(Path(path), config, tensors, single_file_metadata(config))


def single_file_metadata(config: DrafterConfig) -> dict[str, str]:
    """What makes a safetensors file with a drafter's tensors one that `load_drafter` reads."""
    text = json.dumps(config.to_dict(), sort_keys=True)
    return {"format": FORMAT, "version": VERSION, "config": text}


def _check_tensors(config: DrafterConfig, found: dict[str, tuple[int, ...]]) -> None:
    expected = tensor_shapes(config)
    for name, shape in expected.items():
        if name not in found:
            raise ModelError(f"drafter {config.name!r}: tensor {name!r} is missing")
        if found[name] != shape:
            raise ModelError(
                f"drafter {config.name!r}: tensor {name!r} has shape {list(found[name])}; "
                f"expected {list(shape)}"
            )
    if unknown := sorted(found.keys() - expected.keys()):
        raise ModelError(
            f"drafter {config.name!r}: tensor {unknown[0]!r} is not part of a drafter of this "
            f"configuration"
        )


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ModelError(f"{where} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{where} is not a JSON table")
    return values


def _save(
    path: Path, config: DrafterConfig, tensors: Mapping[str, Any], metadata: dict[str, str]
) -> None:
    _check_tensors(config, {name: tuple(t.shape) for name, t in tensors.items()})
    arrays = {n: np.ascontiguousarray(tensors[n], np.float32) for n in tensor_shapes(config)}
    part = path.with_name(path.name + ".part")
    save_file(arrays, part, metadata)
    os.replace(part, path)


def _replace(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
