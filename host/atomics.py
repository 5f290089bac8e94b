"""Atomic and operating-system primitives for numba code, as LLVM instructions and libc calls.

Every access that another thread may see concurrently goes through this module. Arrays are 1-D,
C-contiguous int64; `i` is not bounds-checked. Words that different threads write sit on different
64-byte lines (`LINE` int64 words apart) unless their writer is the same.

libc functions are called by symbol, not through ctypes: a ctypes pointer would put an address of
this process into the compiled code, and numba then refuses to cache it.
"""

from __future__ import annotations

import platform
import sys

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LINE = 8
"""int64 words in a 64-byte cache line."""

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_CLOCK_MONOTONIC = 6 if sys.platform == "darwin" else 1
_IS_ARM = platform.machine().lower() in ("aarch64", "arm64")


def _element(context, builder, signature, args):
    """Pointer to `arr[i]` of the first two arguments."""
    array_type = signature.args[0]
    array = context.make_array(array_type)(context, builder, args[0])
    index = context.cast(builder, args[1], signature.args[1], types.intp)
    return cgutils.get_item_pointer(context, builder, array_type, array, [index], wraparound=False)


def _extern(builder, name, result, *params):
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, params), name)


@intrinsic
def load_acquire(typingctx, arr, i):
    """`arr[i]`, ordered before every later access of this thread."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(_element(context, builder, signature, args), "acquire", 8)

    return types.int64(arr, i), codegen


@intrinsic
def store_release(typingctx, arr, i, value):
    """`arr[i] = value`, ordered after every earlier access of this thread."""

    def codegen(context, builder, signature, args):
        word = context.cast(builder, args[2], signature.args[2], types.int64)
        builder.store_atomic(word, _element(context, builder, signature, args), "release", 8)
        return context.get_dummy_value()

    return types.void(arr, i, value), codegen


@intrinsic
def fetch_add(typingctx, arr, i, value):
    """`arr[i] += value` as one acquire-release operation; the value before."""

    def codegen(context, builder, signature, args):
        word = context.cast(builder, args[2], signature.args[2], types.int64)
        pointer = _element(context, builder, signature, args)
        return builder.atomic_rmw("add", pointer, word, "acq_rel")

    return types.int64(arr, i, value), codegen


@intrinsic
def fence_full(typingctx):
    """Order every earlier access before every later one, stores before loads included."""

    def codegen(context, builder, signature, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def cpu_relax(typingctx):
    """Tell the core that this is a spin loop."""

    def codegen(context, builder, signature, args):
        if _IS_ARM:
            hint = _extern(builder, "llvm.aarch64.hint", ir.VoidType(), _I32)
            builder.call(hint, [ir.Constant(_I32, 1)])
        else:
            builder.call(_extern(builder, "llvm.x86.sse2.pause", ir.VoidType()), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def yield_core(typingctx):
    """Give the core to another runnable thread, if there is one."""

    def codegen(context, builder, signature, args):
        builder.call(_extern(builder, "sched_yield", _I32), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def sleep_us(typingctx, microseconds):
    """Sleep for about `microseconds` (below one million)."""

    def codegen(context, builder, signature, args):
        amount = context.cast(builder, args[0], signature.args[0], types.int32)
        builder.call(_extern(builder, "usleep", _I32, _I32), [amount])
        return context.get_dummy_value()

    return types.void(microseconds), codegen


@intrinsic
def now_ns(typingctx):
    """Nanoseconds of the monotonic clock: the clock of `time.monotonic_ns()`."""

    def codegen(context, builder, signature, args):
        pair = ir.ArrayType(_I64, 2)
        slot = cgutils.alloca_once(builder, pair)
        call = _extern(builder, "clock_gettime", _I32, _I32, pair.as_pointer())
        builder.call(call, [ir.Constant(_I32, _CLOCK_MONOTONIC), slot])
        stamp = builder.load(slot)
        seconds, rest = builder.extract_value(stamp, 0), builder.extract_value(stamp, 1)
        return builder.add(builder.mul(seconds, ir.Constant(_I64, 1_000_000_000)), rest)

    return types.int64(), codegen
