"""The PROMPT segment, or one part of it, as a kernel of its own: for tests and graph baselines.

The same device code as in the persistent kernel, without a board to wait for: the chunk and the
phases to run are launch arguments. Launch cooperatively: CTAs meet at grid barriers.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.config import Config
from cute_kernels.gpu.core import Core, arg
from cute_kernels.gpu.prompt import chunk, produce_layers, run_layers
from cute_kernels.gpu.ring import Ring, init_ring
from cute_kernels.gpu.sync import ptx_read


def smem_bytes(c: Config) -> int:
    return c.stages * c.stage_bytes + -(-16 * c.stages // 128) * 128


def places(c, k, base, args):
    """What the prompt's code asks of the Core."""
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    k.c, k.args, k.tid, k.bid, k.lane = c, args, tid, bid, tid & 31
    k.wid = cute.arch.make_warp_uniform(tid >> 5)
    k.rank = bid % c.team
    k.ring = Ring(base, base + c.stages * c.stage_bytes, c)
    k.layers = Int32(arg(k, Arg.LAYERS))
    phases = k.layers * 4 + 1
    k.plan = arg(k, Arg.PLAN) + Int64(bid * phases) * 16
    k.offsets = arg(k, Arg.OFFSETS) + Int64(bid * phases) * 8
    k.board, k.kv_pool, k.pages = (arg(k, x) for x in (Arg.BOARD, Arg.KV_POOL, Arg.PAGE_TABLE))


@cute.jit
def produce_all(k: cutlass.Constexpr, p: cutlass.Constexpr, first: Int32, last: Int32,
                only: cutlass.Constexpr):  # fmt: skip
    offset = ptx_read("ld.global.nc.b64 {$w0}, [{$r0}];", [Int64], k.offsets + Int64(first) * 8)
    zero = Int32(0)
    produce_layers(
        k, p, first, last, arg(k, Arg.STREAM) + offset, zero, zero, zero, zero, zero, zero, only
    )


def make_prompt(c: Config, only: str = ""):
    """Returns (jit launcher, example arguments, launch geometry).

    only: one of prompt.PARTS, or "" for the whole segment. Arguments: address of the table
    arguments.Arg; rows, position of the chunk; first and last + 1 phase (of a part: its own).
    """

    @cute.kernel
    def kernel(args: Int64, rows: Int32, position: Int32, first: Int32, last: Int32):
        smem, k = cutlass.memory.SmemAllocator(), Core()
        block = smem.allocate_tensor(
            cutlass.Uint8, cute.make_layout(smem_bytes(c)), byte_alignment=1024
        )
        places(c, k, block.iterator.toint(), args)
        k.zero = Uint32(rows >> 30)
        if k.tid == 0:
            init_ring(k.ring, c.warps)
            sync.fence_barrier_init()
        cute.arch.sync_threads()
        if k.wid >= c.warps:
            if cutlass.const_expr(c.setmaxnreg):
                cute.arch.setmaxregister_decrease(40)
            if k.wid == c.warps:
                produce_all(k, chunk(k, rows, position), first, last, only)
        else:
            if cutlass.const_expr(c.setmaxnreg):
                cute.arch.setmaxregister_increase(232)
            run_layers(k, chunk(k, rows, position), first, last, Int32(0), Int32(0), only)

    name = f"md_prompt_{only or 'all'}"
    kernel.set_name_prefix(name, keep_mangled_name=False, remove_cutlass_symbol=True)
    geometry = dict(grid=c.ctas, block=c.block, cluster=1, smem=smem_bytes(c))

    @cute.jit
    def launch(args: Int64, rows: Int32, position: Int32, first: Int32, last: Int32):
        kernel(args, rows, position, first, last).launch(
            grid=(c.ctas, 1, 1), block=(c.block, 1, 1), cooperative=True, min_blocks_per_mp=1,
            smem=smem_bytes(c),
        )  # fmt: skip

    return launch, [Int64(0)] + [Int32(0)] * 4, geometry
