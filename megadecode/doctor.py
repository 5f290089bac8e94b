"""What `megadecode doctor` looks at."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import tempfile
from dataclasses import dataclass

from host.cache import cache_home


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `needed`: the default run does not work without it."""

    what: str
    ok: bool
    found: str
    advice: str = ""
    needed: bool = True


def checks() -> list[Check]:
    """Every check, none of which changes anything or uses the network."""
    return [_python(), _cpu(), _memory(), _cache(), _compiled(), _model(), _gpu()]


def _python() -> Check:
    version = platform.python_version()
    ok = (3, 11) <= sys.version_info[:2] <= (3, 13)
    return Check("Python", ok, version, "" if ok else "use Python 3.11, 3.12 or 3.13")


def _cpu() -> Check:
    import llvmlite.binding as llvm

    from megadecode.cpu_device import default_workers

    features = llvm.get_host_cpu_features()
    wide = next((f for f in ("avx512f", "avx2", "neon") if features.get(f)), "no wide vectors")
    return Check(
        "CPU device", True, f"{default_workers()} workers, {llvm.get_host_cpu_name()}, {wide}"
    )


def _memory() -> Check:
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    except (ValueError, OSError):
        return Check("memory", True, "unknown", needed=False)
    ok = free > 2
    advice = "" if ok else "the default model takes about 1.5 GiB, and 46 KB per context position"
    return Check("memory", ok, f"{free:.1f} GiB free", advice, needed=False)


def _cache() -> Check:
    home = cache_home()
    probe = home
    while not probe.exists():
        probe = probe.parent
    try:
        with tempfile.TemporaryFile(dir=probe):  # gone at once; permissions alone do not tell
            ok = True
    except OSError:
        ok = False
    return Check(
        "cache", ok, str(home), "" if ok else "set MEGADECODE_HOME to a folder you can write to"
    )


def _compiled() -> Check:
    from host.jit import cache_folder

    folder = cache_folder()
    files = sum(1 for _ in folder.rglob("*.nbc")) if folder.exists() else 0
    return Check(
        "compiled CPU code",
        files > 0,
        f"{files} functions in {folder}",
        "" if files else "made by the first run, in a minute or two",
        needed=False,
    )


def _model() -> Check:
    from megadecode.errors import ModelError
    from megadecode.models.store import status

    try:
        path = status("smollm2-135m")
    except ModelError as error:
        return Check("model smollm2-135m", False, "damaged", str(error), needed=False)
    if path is None:
        return Check(
            "model smollm2-135m", False, "not fetched", "fetched by the first run", needed=False
        )
    return Check("model smollm2-135m", True, str(path), needed=False)


def _gpu() -> Check:
    missing = [m for m in ("cutlass", "cuda.bindings") if not _has(m)]
    found = "no GPU kernel in this release" + (
        f"; not installed: {', '.join(missing)}" * bool(missing)
    )
    return Check("CUDA device", False, found, "the CPU device does everything", needed=False)


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
