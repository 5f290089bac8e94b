"""The CUDA device object: a persistent kernel that is launched, leaves at a park, and may be lost.

Between a launch and the park nothing here is called: the host's end of the wire talks to the kernel
through mapped memory alone. Nothing here waits without limit for a kernel either: one that does not
leave is left behind, and the process can end all the same.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from host.errors import DeviceError
from host.ring import write_word
from host.wire import State, Word

_LINE = 64


def driver() -> Any:
    """The driver API, initialised. DeviceError says what is missing."""
    try:
        import cuda.bindings.driver as cu
    except ImportError as error:
        raise DeviceError(
            f"cuda-bindings is not installed ({error}); pip install 'megadecode[gpu]'"
        ) from None
    try:
        (status,) = cu.cuInit(0)
    except Exception as error:  # the bindings raise their own when libcuda is not there
        raise DeviceError(f"there is no CUDA driver ({error})") from None
    check((status,), "cuInit")
    return cu


def check(result: tuple[Any, ...], what: str) -> Any:
    """The values of a driver call; DeviceError with the call's name when it failed."""
    status, *values = result
    if int(status) != 0:
        raise DeviceError(f"{what} failed: {status.name}")
    return values[0] if len(values) == 1 else values


def use_primary_context(cu: Any, ordinal: int) -> Any:
    """Make the device's primary context (torch's too) current on this thread."""
    device = check(cu.cuDeviceGet(ordinal), "cuDeviceGet")
    context = check(cu.cuDevicePrimaryCtxRetain(device), "cuDevicePrimaryCtxRetain")
    check(cu.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    return context


class PinnedMemory:
    """Page-locked host memory that the device can read and write, in 64-byte lines.

    A context must be current. To free such memory waits for every kernel on the device, also one
    that another engine keeps resident; so it is never freed: when the last view of an array has
    gone, its memory is there for the next of that size. Once `keep` is set it is not used again: a
    kernel that was left behind may still write to it.
    """

    _unused: ClassVar[dict[int, list[int]]] = {}  # bytes -> addresses

    def __init__(self, cu: Any) -> None:
        self._cu = cu
        self._device_address: dict[int, int] = {}
        self.keep = [False]

    def __call__(self, words: int) -> np.ndarray:
        """Zeroed int64 words."""
        cu, size = self._cu, max(8 * words, _LINE)
        unused = self._unused.setdefault(size, [])
        if unused:
            address = unused.pop()
        else:
            flags = cu.CU_MEMHOSTALLOC_PORTABLE | cu.CU_MEMHOSTALLOC_DEVICEMAP
            address = int(check(cu.cuMemHostAlloc(size, flags), "cuMemHostAlloc"))
        device = check(cu.cuMemHostGetDevicePointer(address, 0), "cuMemHostGetDevicePointer")
        self._device_address[address] = int(device)
        memory = np.ctypeslib.as_array((ctypes.c_int64 * words).from_address(address))
        memory[:] = 0
        weakref.finalize(memory, _give_back, unused, address, self.keep).atexit = False
        return memory

    def device_address(self, array: np.ndarray) -> int:
        """Where the device finds the first element of an array made here, or of a view of it."""
        return self._device_address[array.ctypes.data]


def _give_back(unused: list[int], address: int, keep: list[bool]) -> None:
    if not keep[0]:
        unused.append(address)


class CudaDevice:
    """Launches `kernel` on a stream of its own each time the loop is started.

    kernel: a `cute_kernels.gpu.load.Kernel`. args: device address of its table of arguments.
    empty: (address, bytes) of device memory to be filled with 0xFF before each launch. workers: its
    CTAs. operations: the phases' names, for hang reports. keep: set when the kernel may be stuck
    (`PinnedMemory.keep`). owned: whatever must live as long as the kernel may run.
    """

    name = "cuda"
    worker_name = "CTA"

    def __init__(
        self,
        kernel: Any,
        args: int,
        *,
        empty: Sequence[tuple[int, int]],
        workers: int,
        control: np.ndarray,
        operations: Sequence[str],
        ordinal: int = 0,
        keep: list[bool] | None = None,
        owned: object = None,
    ) -> None:
        self.workers = workers
        self.operations = tuple(operations)
        self.crash: BaseException | None = None
        self._kernel, self._args, self._empty = kernel, args, tuple(empty)
        self._control, self._owned = control, owned
        self._keep = [False] if keep is None else keep
        self._cu = driver()
        self._context = use_primary_context(self._cu, ordinal)
        non_blocking = self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._stream = check(self._cu.cuStreamCreate(non_blocking), "cuStreamCreate")

    def launch(self) -> None:
        """Start the loop. The caller has set the state to RUNNING and launches once per park."""
        cu = self._cu
        try:
            check(cu.cuCtxSetCurrent(self._context), "cuCtxSetCurrent")
            for address, size in self._empty:
                check(cu.cuMemsetD8Async(address, 0xFF, size, self._stream), "cuMemsetD8Async")
            self._kernel.launch([self._args], "q", int(self._stream))
        except Exception as error:
            self.crash = error
            write_word(self._control, Word.STATE, State.FAULT)

    def failure(self) -> str:
        """What the driver says about a kernel that shows no sign of life; empty: it still runs, or
        has left in good order. The one driver call that is made behind a launch, when all is lost.
        """
        cu = self._cu
        cu.cuCtxSetCurrent(self._context)
        (status,) = cu.cuStreamQuery(self._stream)
        fine = (cu.CUresult.CUDA_SUCCESS, cu.CUresult.CUDA_ERROR_NOT_READY)
        return "" if status in fine else str(status.name)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Whether the kernel has left, waiting for it a while. What it may still write to is kept
        for ever when it has not, or when it has failed."""
        cu, end = self._cu, time.monotonic() + timeout_s
        cu.cuCtxSetCurrent(self._context)
        while True:
            (status,) = cu.cuStreamQuery(self._stream)
            if status != cu.CUresult.CUDA_ERROR_NOT_READY or time.monotonic() > end:
                break
            time.sleep(0.001)
        left = status == cu.CUresult.CUDA_SUCCESS
        if left:
            self._owned = None
        else:
            self._keep[0] = True
            _never_freed.append((self._owned, self._kernel))
        return bool(left)


_never_freed: list[object] = []
