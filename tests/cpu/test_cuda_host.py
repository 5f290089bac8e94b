"""The CUDA device object against a driver that only pretends: nothing waits, nothing is freed."""

import gc
import time
from types import SimpleNamespace

import numpy as np
import pytest

from host import cuda
from host.watch import describe_fault
from host.wire import State, Word, make_wire


class Status(int):
    name = "CUDA_ERROR_LAUNCH_FAILED"


class FakeDriver:
    """Just enough of the driver API; `query` is what a stream's kernel is said to do."""

    CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_DEVICEMAP = 1, 2
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUresult = SimpleNamespace(CUDA_SUCCESS=Status(0), CUDA_ERROR_NOT_READY=Status(600))

    def __init__(self):
        self.calls, self.memory, self.query = [], {}, Status(0)

    def cuMemHostAlloc(self, size, flags):
        block = np.full(size + 64, 7, np.uint8)
        address = block.ctypes.data + -block.ctypes.data % 64
        self.memory[address] = block
        self.calls.append("alloc")
        return Status(0), address

    def cuMemHostGetDevicePointer(self, address, flags):
        return Status(0), address + 2**40

    def cuStreamQuery(self, stream):
        self.calls.append("query")
        return (self.query,)

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            return Status(0), 1

        return call


@pytest.fixture
def cu(monkeypatch):
    fake = FakeDriver()
    monkeypatch.setattr(cuda, "driver", lambda: fake)
    monkeypatch.setattr(cuda.PinnedMemory, "_unused", {})
    return fake


def make_device(cu, launch=lambda *arguments: None, **options):
    control = np.zeros(Word.PHASE + 8 * 4, np.int64)
    kernel = SimpleNamespace(launch=launch)
    return cuda.CudaDevice(
        kernel, 1, empty=[(2, 3)], workers=4, control=control, operations=["head"], **options
    )


def test_pinned_memory_is_zeroed_aligned_and_used_again(cu):
    pinned = cuda.PinnedMemory(cu)
    wire = make_wire(
        slots=1, workers=4, ctx=64, max_inflight=4, completion_entries=16, allocate=pinned
    )
    assert wire.control.ctypes.data % 64 == wire.pool.ctypes.data % 64 == 0
    assert not wire.pool.any() and not wire.abort.any()
    for part in (wire.control, wire.request_words, wire.completion_words, wire.abort, wire.pool):
        assert pinned.device_address(part) == part.ctypes.data + 2**40
    allocations = cu.calls.count("alloc")
    del wire, part
    gc.collect()
    make_wire(slots=1, workers=4, ctx=64, max_inflight=4, completion_entries=16, allocate=pinned)
    assert cu.calls.count("alloc") == allocations, "not used again"
    assert "cuMemFreeHost" not in cu.calls


def test_memory_that_a_lost_kernel_may_write_to_is_not_used_again(cu):
    pinned = cuda.PinnedMemory(cu)
    kept = pinned(100)
    pinned.keep[0] = True
    del kept
    gc.collect()
    cuda.PinnedMemory(cu)(100)
    assert cu.calls.count("alloc") == 2


def test_a_launch_empties_what_it_must_and_a_failed_one_is_a_fault(cu):
    launched = []
    device = make_device(cu, lambda *arguments: launched.append(arguments))
    cu.calls.clear()
    device.launch()
    assert launched == [([1], "q", 1)]
    assert cu.calls == ["cuCtxSetCurrent", "cuMemsetD8Async"]

    def fail(*arguments):
        raise RuntimeError("too many resources requested")

    device = make_device(cu, fail)
    device.launch()
    assert device._control[Word.STATE] == State.FAULT
    assert "too many resources" in str(device.crash)


@pytest.mark.parametrize(("status", "says"), [(0, ""), (600, ""), (719, "LAUNCH_FAILED")])
def test_what_the_driver_says_of_a_silent_kernel(cu, status, says):
    device = make_device(cu)
    cu.query = Status(status)
    assert says in device.failure() and bool(device.failure()) == bool(says)


def test_closing_behind_a_kernel_that_does_not_leave_takes_its_time_and_no_more(cu):
    keep, owned = [False], object()
    device = make_device(cu, keep=keep, owned=owned)
    cu.query = Status(600)
    start = time.monotonic()
    assert device.close(0.2) is False
    assert 0.2 <= time.monotonic() - start < 1
    assert keep == [True]
    assert any(owned in entry for entry in cuda._never_freed)
    blocking = {"cuStreamSynchronize", "cuCtxSynchronize", "cuCtxDestroy", "cuMemFree"}
    assert not blocking & set(cu.calls)


def test_closing_behind_one_that_has_left_lets_go(cu):
    keep = [False]
    device = make_device(cu, keep=keep, owned=object())
    assert device.close(5) is True
    assert keep == [False] and device._owned is None


def test_a_hang_is_told_with_more_ctas_than_a_word_has_bits():
    control = np.zeros(Word.PHASE + 8 * 200, np.int64)
    device = SimpleNamespace(
        crash=None, workers=200, worker_name="CTA", operations=("qkv[0]", "head")
    )
    control[Word.FAULT_OPERATION] = 1
    for cta in (0, 63, 64, 199):
        word = Word.FAULT_WORKERS + cta // 64
        control[word : word + 1].view(np.uint64)[:] |= np.uint64(1 << cta % 64)
    said = str(describe_fault(control, device))
    assert said.startswith(
        "the device hung in phase head: CTA 0, 63, 64, 199 of 200 did not arrive"
    )
    control[Word.FAULT_OPERATION] = -1
    assert "hung before the first phase of a step: CTA 0," in str(describe_fault(control, device))
