"""The drafter inside the package: small, complete, found by its own target and by no other."""

from __future__ import annotations

import json

import pytest
from safetensors import safe_open
from tiny_gguf import write_gguf

from experiments import drafter_runs
from megadecode.drafter import load_drafter
from megadecode.drafter.find import SHIPPED, choose_drafter, find_drafter
from megadecode.drafter.io import tensor_shapes
from megadecode.errors import ModelError
from megadecode.models.gguf_file import load
from megadecode.models.random_model import random_model
from megadecode.training.card import card

FILE = SHIPPED / "smollm2-135m.safetensors"
RECORD = SHIPPED / "smollm2-135m.json"
CARD = SHIPPED / "smollm2-135m.md"
LARGEST_BYTES = 25_000_000


def test_auto_finds_it_for_the_default_model(model):
    found = find_drafter(model)
    assert found is not None
    assert found.config == load_drafter(FILE).config
    found.check_target(model)


def test_it_is_small_and_in_bfloat16():
    assert FILE.stat().st_size <= LARGEST_BYTES
    config = load_drafter(FILE).config
    with safe_open(FILE, framework="np") as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert kinds == dict.fromkeys(tensor_shapes(config), "BF16")


def test_another_target_is_refused(model, tmp_path):
    """One of the same shape with other weights, and one of another shape."""
    twin = random_model(model.config, seed=1)
    with pytest.raises(ModelError, match="fingerprint"):
        choose_drafter(FILE, twin)
    assert find_drafter(twin) is None
    with pytest.raises(ModelError, match="hidden"):
        choose_drafter(FILE, load(write_gguf(tmp_path / "tiny.gguf")))


def test_the_card_is_generated_from_the_record():
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert CARD.read_text(encoding="utf-8") == card(record)
    config = load_drafter(FILE).config
    stored = json.loads(json.dumps(config.to_dict()))
    assert record["drafter"] == stored | {"draft_tokens": len(config.draft_tokens)}


def test_the_page_of_runs_is_generated_from_its_records():
    record = json.loads(drafter_runs.SOURCE.read_text(encoding="utf-8"))
    assert drafter_runs.PAGE.read_text(encoding="utf-8") == drafter_runs.page(record)
