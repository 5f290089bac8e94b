"""Kernels for test_compiler.py. The DSL reads sources, so they live in a file of their own."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.gpu import sync

GMEM = cute.AddressSpace.gmem


def address(raw, dtype):
    return cute.make_ptr(dtype, raw, GMEM, assumed_align=dtype.width // 8)


@cute.native_struct
class Place:
    stage: Int32
    turn: Int32


@cute.kernel
def _struct_in_while(p: Int64):
    t = cute.make_tensor(address(p, Int32), cute.make_layout(64))
    s = Place(stage=Int32(0), turn=Int32(0))
    while s.stage < t[0]:
        s.stage = s.stage + 3
    t[9] = s.stage


@cute.jit
def struct_in_while(p: Int64):
    _struct_in_while(p).launch(grid=(1, 1, 1), block=(32, 1, 1))


# operations that stand between two plain accesses of one address
OURS = {
    "ld_acquire": lambda f: sync.ld_acquire(f),
    "ld_acquire sys": lambda f: sync.ld_acquire(f, "sys"),
    "st_release": lambda f: sync.st_release(f, Int32(7)),
    "st_release sys": lambda f: sync.st_release(f, Int32(7), "sys"),
    "red_release": lambda f: sync.red_release(f, Uint32(1)),
    "fence_gpu": lambda f: sync.fence_gpu(),
    "st_word": lambda f: sync.st_word(f, Uint32(7)),
    "ld_words": lambda f: sync.ld_words(f),
    "wait_for_prerequisites": lambda f: sync.wait_for_prerequisites(),
    "consumer_sync": lambda f: sync.consumer_sync(64),
}
DSLS = {
    "arch.store release": lambda f: cute.arch.store(
        address(f, Uint32), Uint32(7), sem="release", scope="gpu"
    ),
    "arch.load acquire": lambda f: cute.arch.load(
        address(f, Uint32), Uint32, sem="acquire", scope="gpu"
    ),
}


def between(op, consume):
    """Publish: A = 111; op; A = 222. Consume: x = A; op; y = A; out = x + 3 y."""

    @cute.kernel
    def kernel(a: Int64, flag: Int64, out: Int64):
        t = cute.make_tensor(address(a, Int32), cute.make_layout(4))
        if cutlass.const_expr(consume):
            x = t[0]
            op(flag)
            y = t[0]
            o = cute.make_tensor(address(out, Int32), cute.make_layout(4))
            o[0] = x + y * 3
        else:
            t[0] = 111
            op(flag)
            t[0] = 222

    @cute.jit
    def launch(a: Int64, flag: Int64, out: Int64):
        kernel(a, flag, out).launch(grid=(1, 1, 1), block=(64, 1, 1))

    return launch


def largest_of(literal):
    """out = the largest word, the first of them a literal 0."""

    @cute.kernel
    def kernel(a: Int64, out: Int64):
        w = sync.ld_words(a)
        first = [Uint32(0)] if literal else []
        sync.st_word(out, sync.largest(first + w))

    @cute.jit
    def launch(a: Int64, out: Int64):
        kernel(a, out).launch(grid=(1, 1, 1), block=(32, 1, 1))

    return launch


@cute.kernel
def _dsl_maximum(a: Int64, out: Int64):
    sync.st_word(out, cutlass.max(Uint32(0), sync.ld_word(a)))


@cute.jit
def dsl_maximum(a: Int64, out: Int64):
    _dsl_maximum(a, out).launch(grid=(1, 1, 1), block=(32, 1, 1))
