"""Folders of every family, shared by the tests of what is wrong with a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hf_models import write_folder

from megadecode import ModelConfig
from megadecode.errors import ModelError
from megadecode.models.hf_folder import load_folder
from megadecode.models.random_model import random_model

SHAPE = ModelConfig(
    name="tiny", layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=60,
    context_tokens=64, rope_theta=500.0, tied_embeddings=False, stop_ids=(2,), bos_id=1,
)  # fmt: skip
FAMILIES = {
    "llama": SHAPE,
    "qwen2": replace(SHAPE, qkv_bias=True),
    "qwen3": replace(SHAPE, qk_norm=True),
}
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each family, and one in shards."""
    home = tmp_path_factory.mktemp("models")
    for name, config in FAMILIES.items():
        write_folder(home / name, random_model(config, 5))
    write_folder(home / "sharded", random_model(SHAPE, 5), shard="8KB")
    return home


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: shutil.copytree(written / name, tmp_path / name)


def edit(path: Path, changes: dict[str, Any]) -> None:
    """Set keys of a JSON file; None removes one, ... stands for null."""
    values = json.loads(path.read_text())
    for key, value in changes.items():
        values.pop(key, None)
        if value is not None:
            values[key] = None if value is ... else value
    path.write_text(json.dumps(values))


def refused(path: Path, message: str, at: Path | None = None) -> None:
    with pytest.raises(ModelError) as caught:
        for _ in load_folder(path).tensors():
            pass
    assert str(caught.value) == f"{at or path}: {message}"
