"""Fixtures that more than one folder needs. Nothing here asks for a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from megadecode.models.gguf_file import LoadedModel, load
from megadecode.models.store import DEFAULT_MODEL, resolve
from megadecode.models.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model's GGUF file; fetched by the first run on a machine, hashed by every one."""
    return resolve(DEFAULT_MODEL, progress=False, full_check=True)


@pytest.fixture(scope="session")
def model(model_path: Path) -> LoadedModel:
    return load(model_path)


@pytest.fixture(scope="session")
def tokenizer(model: LoadedModel) -> Tokenizer:
    return model.tokenizer()
