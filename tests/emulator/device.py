"""The echo kernel without a GPU: translated to C, run by a thread in the place of a CUDA device."""

from __future__ import annotations

import ctypes
import hashlib
import pathlib
import shutil
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from host.wire import State, Word, zeroed_lines
from tests.emulator.translate import Translator

HERE = pathlib.Path(__file__).parent
COMPILER = shutil.which("cc") or shutil.which("gcc")


def compile_c(ptx: str, folder: pathlib.Path) -> ctypes.CDLL:
    """The translation as a library, in `folder` under a name that says what it was made from."""
    code = Translator(ptx).code()
    runtime = (HERE / "warp.c").read_text()
    at = folder / hashlib.sha256((code + runtime).encode()).hexdigest()[:16]
    library = at / "kernel.so"
    if not library.exists():
        at.mkdir(parents=True, exist_ok=True)
        (at / "kernel.h").write_text(code)
        (at / "warp.c").write_text(runtime)
        assert COMPILER is not None
        command = [COMPILER, "-O0", "-shared", "-fPIC", "-w", "-o", "kernel.new", "warp.c", "-lm"]
        subprocess.run(command, cwd=at, check=True)
        (at / "kernel.new").rename(library)
    found = ctypes.CDLL(str(library))
    found.start.argtypes = [ctypes.c_void_p, *[ctypes.c_uint32] * 3, ctypes.c_uint64]
    found.run_all.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32]
    return found


class Emulated:
    """The echo kernel of `ctas` CTAs for a rig: see tests.gpu.echo_rig.OnGpu."""

    place = "cpu"

    def __init__(self, ctas: int, folder: pathlib.Path) -> None:
        from cute_kernels.gpu import build
        from cute_kernels.gpu.echo import make_echo

        self.ctas = ctas
        at = folder / f"echo-{ctas}-{build.source_hash()}.ptx"
        if not at.exists():
            folder.mkdir(parents=True, exist_ok=True)
            launch, args, _ = make_echo(ctas)
            at.write_text(build.compile_kernel(launch, args, "sm_90a")[0])
        self.library = compile_c(at.read_text(), folder)

    def memory(self) -> Memory:
        return Memory()

    def device(self, args: int, **how: Any) -> EmulatedDevice:
        return EmulatedDevice(self.library, args, **how)

    def wait(self) -> None:
        """All memory is the host's."""


class Memory:
    """Ordinary memory in the place of pinned."""

    def __init__(self) -> None:
        self.keep = [False]

    def __call__(self, words: int) -> np.ndarray:
        return zeroed_lines(words)

    def device_address(self, array: np.ndarray) -> int:
        return int(array.ctypes.data)


class EmulatedDevice:
    """Of `ctas` CTAs a thread each, and the service warp of the first. See host.cuda.CudaDevice."""

    name = "emulated"
    worker_name = "CTA"

    def __init__(
        self, library: ctypes.CDLL, args: int, *, workers: int, control: np.ndarray,
        operations: Sequence[str], **_: Any,
    ) -> None:  # fmt: skip
        self.workers, self.operations = workers, tuple(operations)
        self.crash: BaseException | None = None
        self._library, self._args, self._control = library, args, control
        self._stop, self._status, self._launches = ctypes.c_int(0), 0, 0
        self._thread: threading.Thread | None = None

    def launch(self) -> None:
        if self._thread:
            self._thread.join()
        library, n = self._library, self.workers + 1
        size = library.warp_bytes() // 8 + 1
        memory = np.zeros((n, size), np.int64)
        warps = (ctypes.c_void_p * n)(*(row.ctypes.data for row in memory))
        for cta in range(self.workers):
            library.start(warps[cta], 1, 0, cta, self._args)
        library.start(warps[self.workers], 32, 32, 0, self._args)
        self._launches += 1
        seed = self._launches

        def run() -> None:
            held = memory, warps
            self._status = library.run_all(held[1], n, ctypes.byref(self._stop), seed)

        self._thread = threading.Thread(target=run, daemon=True, name="emulated-device")
        self._thread.start()

    def failure(self) -> str:
        return f"status {self._status}" if self._status else ""

    def close(self, timeout_s: float = 5.0) -> bool:
        if self._thread:
            self._thread.join(timeout_s)
            self._stop.value = 1
            self._thread.join()
        return self._control[Word.STATE] != State.RUNNING
