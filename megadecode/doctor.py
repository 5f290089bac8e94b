"""What `megadecode doctor` looks at."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from host.cache import cache_home

_CUDA = {"cuda.bindings": "cuda-bindings", "torch": "torch"}
_GPU_EXTRA = "pip install 'megadecode[gpu]'; the CPU device needs none of it"
_DRIVER = "install NVIDIA's driver where a GPU is to be used; the CPU device needs none of it"


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
    return [
        _python(), _cpu(), _memory(), _cache(), _compiled(), _model(), _drafters(), _gpu(),
        _kernels(), _compiler(),
    ]  # fmt: skip


def machine_name() -> str:
    """The processor's name, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _python() -> Check:
    version = platform.python_version()
    ok = (3, 11) <= sys.version_info[:2] <= (3, 13)
    return Check("Python", ok, version, "" if ok else "use Python 3.11, 3.12 or 3.13")


def _cpu() -> Check:
    import llvmlite.binding as llvm

    from megadecode.cpu_device import default_workers

    features = llvm.get_host_cpu_features()
    wide = next((f for f in ("avx512f", "avx2", "neon") if features.get(f)), "no wide vectors")
    found = f"{default_workers()} workers, {llvm.get_host_cpu_name()}, {wide}"
    return Check("CPU device", True, found)


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
    parts = [
        f"{name} {_bytes_in(home / name) / 1e6:.0f} MB"
        for name in ("models", "numba", "drafters", "kernels")
        if (home / name).exists()
    ]
    found = f"{_short(home)}: {', '.join(parts) or 'empty'}"
    return Check("cache", ok, found, "" if ok else "set MEGADECODE_HOME to a folder of your own")


def _short(path: Path) -> str:
    """A path as people write it, the home folder as ~."""
    with suppress(ValueError, RuntimeError):
        return f"~/{path.relative_to(Path.home())}"
    return str(path)


def _bytes_in(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with suppress(OSError):  # somebody may be cleaning up
            total += file.stat().st_size if file.is_file() else 0
    return total


def _compiled() -> Check:
    from host.jit import cache_folder

    folder = cache_folder()
    files = sum(1 for _ in folder.rglob("*.nbc")) if folder.exists() else 0
    return Check(
        "compiled CPU code",
        files > 0,
        f"{files} functions in {_short(folder)}",
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
    return Check("model smollm2-135m", True, _short(path), needed=False)


def _drafters() -> Check:
    from megadecode.drafter.find import places

    files = [file for folder in places() for file in sorted(folder.glob("*.safetensors"))]
    if files:
        return Check("drafters", True, ", ".join(map(_short, files)), needed=False)
    return Check(
        "drafters",
        False,
        "none: speculation is off unless draft=PATH names one",
        f"put a drafter's .safetensors file into {_short(places()[-1])}",
        needed=False,
    )


def _gpu() -> Check:
    missing = [package for module, package in _CUDA.items() if not _has(module)]
    if missing:
        return Check(
            "CUDA device", False, f"not installed: {', '.join(missing)}", _GPU_EXTRA, needed=False
        )
    try:
        names = _gpu_names()
    except Exception as error:  # the bindings have one of their own for every way to fail
        said = str(error).partition("\n")[0]
        if not isinstance(error, _Refused):
            said = "there is no NVIDIA driver"
        return Check("CUDA device", False, said, _DRIVER, needed=False)
    if not names:
        said = "the driver shows no GPU"
        return Check("CUDA device", False, said, "is one hidden by CUDA_VISIBLE_DEVICES?", False)
    found = f"{', '.join(names)}; used when asked for: device='cuda'"
    return Check("CUDA device", True, found, needed=False)


class _Refused(RuntimeError):
    """What a driver that is there says."""


def _gpu_names() -> list[str]:
    from cuda.bindings import driver as cu

    def call(result: tuple[Any, ...]) -> Any:
        if result[0] != cu.CUresult.CUDA_SUCCESS:
            raise _Refused(f"the driver says {result[0].name}")
        return result[1] if len(result) > 1 else None

    call(cu.cuInit(0))
    gpus = [call(cu.cuDeviceGet(i)) for i in range(call(cu.cuDeviceGetCount()))]
    return [call(cu.cuDeviceGetName(256, gpu)).split(b"\0")[0].decode() for gpu in gpus]


def _kernels() -> Check:
    """Kernels that have been compiled for a GPU: each has a manifest beside it."""
    folder = cache_home() / "kernels"
    manifests = sorted(folder.rglob("*.json")) if folder.exists() else []
    targets = sorted({manifest.parent.name for manifest in manifests})
    return Check(
        "compiled GPU kernels",
        bool(manifests),
        f"{len(manifests)} in {_short(folder)}" + f" for {', '.join(targets)}" * bool(targets),
        "" if manifests else "`megadecode build --model NAME` compiles one, on any machine",
        needed=False,
    )


def _compiler() -> Check:
    ok = _has("cutlass")
    found = "CuTe DSL " + (_version("nvidia-cutlass-dsl") if ok else "is not installed")
    return Check("GPU compiler", ok, found, "" if ok else _GPU_EXTRA, needed=False)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
