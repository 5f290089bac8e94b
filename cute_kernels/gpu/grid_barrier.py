"""The barrier of all consumer warps of the grid, for phases that hand on whole buffers.

A turn adds 2^31 to one counter: 1 for every CTA, and the rest by CTA 0; bit 31, the *side*, flips
when all have arrived. So the counter needs neither a reset nor a memory of how many turns there
were. Whoever waits must have read the side before its own CTA arrived: it cannot change until then.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.board import WORD, Board


def barrier_at(k):
    return k.board + int(Board.BARRIER) * WORD


@cute.jit
def barrier_side(k: cutlass.Constexpr):
    """1 where bit 31 of the counter is set."""
    return Int32(sync.ld_acquire(barrier_at(k)) < 0)


@cute.jit
def arrive_grid(k: cutlass.Constexpr):
    """All consumer warps: what they wrote is there for whoever sees the side flip."""
    sync.consumer_sync(k.c.warps * 32)
    if k.tid == 0:
        step = sync.select(k.bid == 0, Uint32(2**31 - (k.c.ctas - 1)), Uint32(1))
        sync.red_release(barrier_at(k), step)


@cute.jit
def wait_grid(k: cutlass.Constexpr, side: Int32):
    """Until the side is no longer `side`. Threads of one warp, or one."""
    tries, since = Int32(0), Int64(0)
    seen = barrier_side(k)
    while seen == side:
        seen = barrier_side(k)
        tries, since = sync.overdue(tries, since)


@cute.jit
def grid_barrier(k: cutlass.Constexpr, side: Int32):
    """All consumer warps of all CTAs. Returns the new side."""
    arrive_grid(k)
    if k.tid == 0:
        wait_grid(k, side)
    sync.consumer_sync(k.c.warps * 32)
    return 1 - side
