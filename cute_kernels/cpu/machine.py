"""What this machine can do: read bandwidth and fused multiply-adds, on the loop's own threads.

Every figure of a kernel is held against these. On a shared machine they move, so they are measured
beside what they are compared with.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cute_kernels.cpu.pack import allocate
from cute_kernels.cpu.simd import I64, VEC, fma, load_vector, loop, pointer
from host.jit import jit

_CHAINS = 24
_READ_ROUNDS = 3


@intrinsic
def _fma_chains(typingctx, ptr, count):
    """`count` rounds of fused multiply-adds on independent registers; the sum of all."""

    def codegen(context, builder, signature, args):
        a, b = load_vector(builder, args[0]), load_vector(builder, args[0])
        chains = [ir.Constant(VEC, [float(i)] * 16) for i in range(_CHAINS)]

        def body(builder, k, carried):
            return [fma(builder, a, b, value) for value in carried]

        chains = loop(builder, ir.Constant(I64, 0), args[1], 1, chains, body)
        total = chains[0]
        for value in chains[1:]:
            total = builder.fadd(total, value)
        return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))

    return types.float32(ptr, types.int64), codegen


@intrinsic
def _read(typingctx, ptr, vectors):
    """Read `vectors` vectors (a multiple of 16); a value that depends on all of them."""

    def codegen(context, builder, signature, args):
        start = [ir.Constant(VEC, [0.0] * 16)] * 4

        def body(builder, k, carried):
            sums = list(carried)
            for i in range(16):
                at = builder.mul(builder.add(k, ir.Constant(I64, i)), ir.Constant(I64, 16))
                value = load_vector(builder, builder.gep(args[0], [at]))
                sums[i % 4] = builder.fadd(sums[i % 4], value)
            return sums

        sums = loop(builder, ir.Constant(I64, 0), args[1], 16, start, body)
        total = builder.fadd(builder.fadd(sums[0], sums[1]), builder.fadd(sums[2], sums[3]))
        return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))

    return types.float32(ptr, types.int64), codegen


@jit
def _spin_fma(values, rounds):
    return _fma_chains(pointer(values, 0), rounds)


@jit
def _read_slice(values, first, vectors):
    return _read(pointer(values, first), vectors)


def on_threads(workers: int, work: Callable[[int], Any]) -> float:
    """Run `work(worker)` on that many threads; seconds from a common start to the last end."""
    gate = threading.Barrier(workers)
    ends, starts = [0.0] * workers, [0.0] * workers

    def body(worker: int) -> None:
        gate.wait()
        starts[worker] = time.perf_counter()
        work(worker)
        ends[worker] = time.perf_counter()

    team = [threading.Thread(target=body, args=(i,)) for i in range(workers)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    return max(ends) - min(starts)


class Machine:
    """Measures with `workers` threads, reading an array of `megabytes`: far more than caches hold.
    The best figures seen so far are kept in `gb_per_s` and `gflop_per_s`."""

    def __init__(self, workers: int, megabytes: int = 512) -> None:
        self.workers = workers
        self.values = allocate(megabytes << 20).view(np.float32)
        self.values[:] = 1e-3
        self.gb_per_s = self.gflop_per_s = 0.0
        _spin_fma(self.values, 1)
        _read_slice(self.values, 0, 16)

    def measure_read(self) -> float:
        """GB/s read now: the best of three passes over the array."""
        share = self.values.size // self.workers // 256 * 256
        seconds = min(
            on_threads(self.workers, lambda w: _read_slice(self.values, w * share, share // 16))
            for _ in range(_READ_ROUNDS)
        )
        read = self.workers * share * 4 / seconds / 1e9
        self.gb_per_s = max(self.gb_per_s, read)
        return read

    def measure_fma(self) -> float:
        """GFLOP/s now."""
        rounds = 1_000_000
        seconds = on_threads(self.workers, lambda w: _spin_fma(self.values, rounds))
        flops = self.workers * rounds * _CHAINS * 32 / seconds / 1e9
        self.gflop_per_s = max(self.gflop_per_s, flops)
        return flops
