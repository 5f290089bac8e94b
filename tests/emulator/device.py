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


UNITS = 4  # C files that a translation is cut into


def compile_c(
    ptx: str, folder: pathlib.Path, optimise: int = 0, clock: str = "CLOCK_MONOTONIC"
) -> ctypes.CDLL:
    """The translation as a library, in `folder` under a name that says what it was made from.
    clock: what the device's reads; by default the host's, with which the wire compares it."""
    header, functions, to_all = Translator(ptx).translate()
    runtime = (HERE / "warp.c").read_text()
    whole = "".join((header, *functions, runtime, str(optimise), clock))
    at = folder / hashlib.sha256(whole.encode()).hexdigest()[:16]
    library = at / "kernel.so"
    if not library.exists():
        at.mkdir(parents=True, exist_ok=True)
        (at / "kernel.h").write_text(header)
        (at / "warp.c").write_text(runtime)
        n, names = len(functions), []
        for unit in range(UNITS):
            part = functions[unit * n // UNITS : (unit + 1) * n // UNITS]
            names.append(f"unit{unit}")
            (at / f"unit{unit}.c").write_text("\n".join(('#include "warp.c"', *part)))
        declared = "".join(f"Block block{i};\n" for i in range(n))
        table = ", ".join(f"block{i}" for i in range(n))
        flags = ", ".join(str(int(some)) for some in to_all)
        (at / "grid.c").write_text(
            f'#define GRID\n#include "warp.c"\n{declared}Block *const blocks[] = {{{table}}};\n'
            f"const u8 speaks_to_all[] = {{{flags}}};\n"
        )
        assert COMPILER is not None
        # a product and a sum are rounded one after the other, as on the device
        flags_of_c = [f"-O{optimise}", "-ffp-contract=off", "-fPIC", "-w", f"-DCLOCK={clock}"]
        for name in (*names, "grid"):
            command = [COMPILER, *flags_of_c, "-c", "-o", f"{name}.o", f"{name}.c"]
            subprocess.run(command, cwd=at, check=True)
        objects = [f"{name}.o" for name in (*names, "grid")]
        command = [COMPILER, "-shared", "-o", "kernel.new", *objects, "-lm"]
        subprocess.run(command, cwd=at, check=True)
        (at / "kernel.new").rename(library)
    found = ctypes.CDLL(str(library))
    numbers = [ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint64]
    found.run_grid.argtypes = [*numbers, ctypes.c_void_p, ctypes.c_uint32]
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
        return EmulatedDevice(self.library, args, 64, **how)

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
    """All warps of all CTAs, in a thread of the host. See host.cuda.CudaDevice."""

    name = "emulated"
    worker_name = "CTA"

    def __init__(
        self, library: ctypes.CDLL, args: int, threads: int, *, workers: int,
        control: np.ndarray, operations: Sequence[str], **_: Any,
    ) -> None:  # fmt: skip
        self.workers, self.operations = workers, tuple(operations)
        self.crash: BaseException | None = None
        self._library, self._args, self._threads, self._control = library, args, threads, control
        self._stop, self._status, self._launches = ctypes.c_int(0), 0, 0
        self._thread: threading.Thread | None = None

    def launch(self) -> None:
        if self._thread:
            self._thread.join()
        self._launches += 1
        seed, stop = self._launches, ctypes.byref(self._stop)

        def run() -> None:
            self._status = self._library.run_grid(
                self.workers, self._threads, self._args, stop, seed
            )

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
