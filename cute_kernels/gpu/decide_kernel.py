"""Decisions as a kernel of its own, for tests and figures: the same device code.

Registers and shared memory are those of the whole kernel. One launch decides the rows of the
board's descriptor, whose results stand in the board.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from cute_kernels.gpu import sync
from cute_kernels.gpu.board import Desc
from cute_kernels.gpu.config import ROWS, Config
from cute_kernels.gpu.core import Core, carve, init_barriers, memory, places
from cute_kernels.gpu.decide import decide_rows
from cute_kernels.gpu.kernel import register_split

DESC_WORDS = int(Desc.ROW_POSITION) + ROWS


def make_decide(c: Config):
    """Returns (jit launcher, example arguments, launch geometry).

    Argument: the table arguments.Arg: LAYERS, BOARD (a descriptor, RESULT), LOGITS, SAMPLING,
    ALTERNATIVES, of a ROWS step ROW_TABLE.
    """
    few, many = register_split(c)

    @cute.kernel
    def kernel(args: Int64):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        smem, k = cutlass.memory.SmemAllocator(), Core()
        block = smem.allocate_tensor(
            cutlass.Uint8, cute.make_layout(c.smem_bytes), byte_alignment=1024
        )
        places(c, k, tid, bid)
        carve(c, block.iterator.toint(), k)
        memory(c, k, args)
        if tid < DESC_WORDS:
            sync.sts_int(k.desc + tid * 4, sync.ld_word(k.board + Int64(tid) * 4))
        init_barriers(k)
        if k.wid >= c.warps:
            if cutlass.const_expr(c.setmaxnreg):
                cute.arch.setmaxregister_decrease(few)
        else:
            if cutlass.const_expr(c.setmaxnreg):
                cute.arch.setmaxregister_increase(many)
            decide_rows(k)

    kernel.set_name_prefix("md_decide", keep_mangled_name=False, remove_cutlass_symbol=True)
    geometry = dict(grid=c.ctas, block=c.block, cluster=1, smem=c.smem_bytes)

    @cute.jit
    def launch(args: Int64):
        kernel(args).launch(
            grid=(c.ctas, 1, 1), block=(c.block, 1, 1), cooperative=True, min_blocks_per_mp=1,
            smem=c.smem_bytes,
        )  # fmt: skip

    return launch, [Int64(0)], geometry
