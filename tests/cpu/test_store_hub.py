"""Models of the hub: found in its own cache, and what is said where it cannot be had."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from hf_models import write_folder

from megadecode import ModelConfig
from megadecode.errors import ModelError
from megadecode.models.load import load_model
from megadecode.models.random_model import random_model
from megadecode.models.store import resolve

SHAPE = ModelConfig("tiny", 1, 32, 2, 1, 16, 32, 50, 64, tied_embeddings=False)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def test_a_hub_id_is_found_in_the_hubs_cache(hub_cache: Path) -> None:
    """Laid out as the hub's own client does: blobs, a snapshot of links to them, a branch."""
    weights = random_model(SHAPE, seed=1)
    write_folder(hub_cache / "written", weights)
    repo, commit = hub_cache / "models--some-org--Some.Model-1B", "0" * 39 + "a"
    snapshot = repo / "snapshots" / commit
    for folder in (repo / "blobs", repo / "refs", snapshot):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    for file in (hub_cache / "written").iterdir():
        blob = repo / "blobs" / hashlib.sha256(file.name.encode()).hexdigest()
        file.rename(blob)
        (snapshot / file.name).symlink_to(blob)
    assert resolve("some-org/Some.Model-1B", progress=False) == snapshot
    found = load_model("some-org/Some.Model-1B")
    assert found.config.name == "some-org/Some.Model-1B"
    assert (found.tensor("layers.0.q") == weights.tensor("layers.0.q")).all()


def test_a_path_comes_before_a_hub_id(hub_cache: Path) -> None:
    write_folder(hub_cache.parent / "org" / "name", random_model(SHAPE, seed=1))
    assert resolve("org/name") == Path("org/name")
    assert load_model("org/name").config.name == "name"


def hub_error(kind: str) -> Exception:
    """As the client raises it; how it is made differs from version to version."""
    cls = getattr(huggingface_hub.errors, kind)
    return cls.__new__(cls, "no")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            lambda: hub_error("RepositoryNotFoundError"),
            "org/name: there is no such path, and no such model on the hub that this login may see",
        ),
        (
            lambda: hub_error("GatedRepoError"),
            "org/name: its owner asks for a consent; give it on the model's page, then "
            "`hf auth login`",
        ),
        (
            lambda: hub_error("HfHubHTTPError"),
            "org/name: cannot be fetched from the hub: ",
        ),
        (
            lambda: OSError("No space left on device"),
            "org/name: cannot be fetched from the hub: No space left on device",
        ),
    ],
)
def test_what_the_hub_answers(
    hub_cache: Path, monkeypatch: pytest.MonkeyPatch, fault: Any, message: str
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise fault()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelError) as caught:
        resolve("org/name")
    assert str(caught.value).startswith(message)


def test_without_a_network_or_the_client(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError) as caught:
        resolve("org/name")
    assert str(caught.value) == (
        f"org/name: not in the hub's cache, {hub_cache}, and the hub cannot be reached. Copy that "
        "cache from a machine that has it, or give the path of a folder"
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError) as caught:
        resolve("org/name")
    assert str(caught.value) == (
        "org/name: there is no such path, and models of the hub need huggingface_hub; "
        "`pip install huggingface_hub` installs it"
    )
