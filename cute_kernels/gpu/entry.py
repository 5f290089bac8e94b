"""How the kernels that have the whole one's shared memory and warps begin, and how they start."""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from cute_kernels.gpu.config import Config
from cute_kernels.gpu.core import Core, carve, places


def enter(c: Config) -> Core:
    """In a kernel, first: this thread's places and the shared memory's."""
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    smem, k = cutlass.memory.SmemAllocator(), Core()
    layout = cute.make_layout(c.smem_bytes)
    block = smem.allocate_tensor(cutlass.Uint8, layout, byte_alignment=1024)
    places(c, k, tid, bid)
    carve(c, block.iterator.toint(), k)
    return k


def geometry(c: Config) -> dict[str, int]:
    """Of a launch, for the manifest."""
    return dict(grid=c.ctas, block=c.block, cluster=1, smem=c.smem_bytes)


def resident(c: Config) -> dict[str, Any]:
    """Of a launch with all CTAs on the device at once."""
    return dict(
        grid=(c.ctas, 1, 1), block=(c.block, 1, 1), smem=c.smem_bytes, cooperative=True,
        min_blocks_per_mp=1,
    )  # fmt: skip


def register_split(c: Config) -> tuple[int, int]:
    """(registers a thread of the others, of the consumers). They share what the block is launched
    with, no more: an increase beyond it would wait for ever."""
    at_launch, many = 65536 // c.block // 8 * 8, 224
    few = (at_launch * c.block - many * c.warps * 32) // (c.block - c.warps * 32) // 8 * 8
    return few, many


def launcher(c: Config, kernel: Any, name: str) -> tuple[Callable, list, dict[str, int]]:
    """(jit launcher, example arguments, launch geometry) of a kernel of one argument, the address
    of the table arguments.Arg."""
    kernel.set_name_prefix(name, keep_mangled_name=False, remove_cutlass_symbol=True)

    @cute.jit
    def launch(args: Int64):
        kernel(args).launch(**resident(c))

    return launch, [Int64(0)], geometry(c)
