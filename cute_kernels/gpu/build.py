"""Compile kernels on a machine without a GPU and keep the results by content.

An artefact is a cubin and a JSON manifest (entry point, launch geometry, registers, configuration).
Its key is the hash of every source that shapes it (this package and the layout of the wire), the
DSL version, the target and the configuration, so that an artefact is never stale; it is written
under a temporary name and renamed, the manifest last, and anything unreadable is built again.
A folder of artefacts can be copied: a machine without the DSL finds in it what another has built
from the same sources.
"""

import ctypes
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

PACKAGE = pathlib.Path(__file__).parent
WIRE = PACKAGE.parent.parent / "host" / "wire.py"


@dataclass(frozen=True)
class Artefact:
    """A compiled kernel. `ptx` is empty where it came from the cache."""

    cubin: bytes
    manifest: dict[str, Any]
    ptx: str = ""


def source_hash(source: pathlib.Path = PACKAGE) -> str:
    """Of the package's sources and the wire's layout, which device code is made from."""
    h = hashlib.sha256()
    for p in (*sorted(source.glob("*.py")), WIRE):
        h.update(p.name.encode() + p.read_bytes())
    return h.hexdigest()[:16]


def dsl_version() -> str | None:
    """Of the installed DSL; None where there is none."""
    try:
        return importlib.metadata.version("nvidia-cutlass-dsl")
    except importlib.metadata.PackageNotFoundError:
        return None


def content_key(what: str, arch: str, source: pathlib.Path = PACKAGE) -> str:
    text = f"{source_hash(source)}|{dsl_version()}|{arch}|{what}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compile_kernel(launcher: Callable, args: list, arch: str) -> tuple[str, bytes, str]:
    """(ptx, cubin, entry name) of the one kernel behind a jit launcher."""
    import cutlass.cute as cute

    # the host stub of a cross compile resolves its symbols in this process
    for lib in cute.runtime.find_runtime_libraries(enable_tvm_ffi=False):
        if os.path.exists(lib):
            ctypes.CDLL(lib, mode=ctypes.RTLD_GLOBAL)
    with tempfile.TemporaryDirectory() as d:
        options = f"--gpu-arch {arch} --keep-ptx --keep-cubin --dump-dir {d}"
        fn = cute.compile(launcher, *args, options=options)
        ptx, cubin = fn.__ptx__, fn.__cubin__
    if not isinstance(cubin, bytes):  # the DSL hands out a path when it could not read the file
        raise RuntimeError(f"the compiler left no cubin for {arch}: {cubin!r}")
    return ptx, cubin, next(iter(fn.kernel_info))


def _tool(name: str) -> str:
    found = shutil.which(name)
    if found:
        return found
    import nvidia

    for root in nvidia.__path__:
        for p in pathlib.Path(root).glob(f"cu1*/bin/{name}"):
            return str(p)
    raise RuntimeError(f"{name} not found; install nvidia-cuda-{name}")


def _run_tool(name: str, option: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        done = subprocess.run([_tool(name), option, f.name], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} {option} failed: {done.stderr.strip()}")
    return done.stdout


def sass(cubin: bytes) -> str:
    return _run_tool("nvdisasm", "-c", cubin)


def resources(cubin: bytes) -> dict[str, int]:
    """Registers, stack and local bytes of the kernel, as ptxas allotted them."""
    line = next(s for s in _run_tool("cuobjdump", "-res-usage", cubin).splitlines() if "REG:" in s)
    return {k.lower(): int(v) for k, v in re.findall(r"(\w+):(\d+)", line)}


def _read(at: pathlib.Path) -> Artefact | None:
    """The artefact whose files are `at`.cubin and `at`.json; None if they are not whole."""
    try:
        manifest = json.loads(at.with_suffix(".json").read_text())
        cubin = at.with_suffix(".cubin").read_bytes()
        if hashlib.sha256(cubin).hexdigest() == manifest["sha256"]:
            return Artefact(cubin, manifest)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def find(what: str, arch: str, folders: Sequence[pathlib.Path]) -> Artefact | None:
    """What some machine has built from these sources, if a folder holds it; the DSL is not needed.
    Where there is one, its version must be the same."""
    sources, dsl = source_hash(), dsl_version()
    for folder in folders:
        for path in sorted((folder / arch).glob("*.json")):
            found = _read(path)
            if found is None or found.manifest.get("what") != what:
                continue
            m = found.manifest
            if m.get("sources") == sources and (dsl is None or m.get("dsl") == dsl):
                return found
    return None


def build(what: str, make: Callable[[], tuple], arch: str, cache: pathlib.Path) -> Artefact:
    """The artefact of make() -> (launcher, args, geometry), from the cache if it is there."""
    key = content_key(what, arch)
    at = cache / arch / key
    found = _read(at)
    if found is not None:
        return found
    launcher, args, geometry = make()
    ptx, cubin, entry = compile_kernel(launcher, args, arch)
    manifest = dict(
        geometry, what=what, arch=arch, entry=entry, key=key, sources=source_hash(),
        dsl=dsl_version(), **resources(cubin), sha256=hashlib.sha256(cubin).hexdigest(),
    )  # fmt: skip
    at.parent.mkdir(parents=True, exist_ok=True)
    for suffix, data in ((".cubin", cubin), (".json", json.dumps(manifest, indent=1).encode())):
        with tempfile.NamedTemporaryFile(dir=at.parent, delete=False) as f:
            f.write(data)
        os.replace(f.name, at.with_suffix(suffix))
    return Artefact(cubin, manifest, ptx)


def kernel_name(config, service: str) -> str:
    """What identifies the persistent kernel of a config.Config, beside sources and target."""
    return f"kernel {service} {sorted(dataclasses.asdict(config).items())}"


def build_kernel(config, service: str, cache: pathlib.Path) -> Artefact:
    """The persistent kernel of a config.Config; service: see kernel.make_kernel."""
    from cute_kernels.gpu.kernel import make_kernel

    return build(
        kernel_name(config, service), lambda: make_kernel(config, service), config.arch, cache
    )


def build_phase(config, blocks_per_sm: int, cache: pathlib.Path) -> Artefact:
    """One matrix phase of the step (config.phase) as a kernel of its own."""
    from cute_kernels.gpu.phase import make_phase

    what = f"phase {blocks_per_sm} {sorted(dataclasses.asdict(config).items())}"
    return build(what, lambda: make_phase(config, blocks_per_sm), config.arch, cache)
