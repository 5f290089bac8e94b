"""Ranks, the tree, compaction and decisions as kernels of their own, for tests and figures: the
same device code on the whole kernel's registers and shared memory, without a board to wait for.

One launch is one step: the descriptor is read from the board as it is. Each CTA leaves in Arg.TIMES
(int64 [ctas, 2], ns) when it began and when its consumer warps were done.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.gpu import sync
from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.compact import compact
from cute_kernels.gpu.config import Config
from cute_kernels.gpu.core import Core, arg, carve, init_barriers, memory, places
from cute_kernels.gpu.decide import decide_rows
from cute_kernels.gpu.kernel import register_split
from cute_kernels.gpu.rank import rank_rows
from cute_kernels.gpu.tree import grow_tree

PARTS = {  # what a kernel runs, in order
    "compact": (compact,),
    "rank": (rank_rows,),
    "tree": (grow_tree,),
    "both": (rank_rows, grow_tree),
    "decide": (decide_rows,),
}
DESC_WORDS = 96


@cute.jit
def note(k: cutlass.Constexpr, which: cutlass.Constexpr):
    sync.consumer_sync(k.c.warps * 32)
    if k.tid == 0:
        at = arg(k, Arg.TIMES) + Int64((2 * k.bid + which) * 8)
        sync.ptx_do("st.global.b64 [{$r0}], {$r1};", at, Int64(cute.arch.globaltimer()))


def make_speculate(c: Config, part: str):
    """Returns (jit launcher, example arguments, launch geometry); part: of PARTS.

    Argument: the table arguments.Arg (LAYERS, BOARD, TIMES; of "compact" KV_POOL and PAGE_TABLE; of
    "decide" LOGITS, SAMPLING, ALTERNATIVES and ROW_TABLE; of the others RANKED, ROW_TABLE,
    DRAFT_LOGITS, DRAFT_COLUMNS, DRAFT_TOKENS, DRAFT_SCRIPT).
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
            sync.sts_int(k.desc + tid * 4, Int32(sync.ld_word(k.board + Int64(tid) * 4)))
        init_barriers(k)
        if k.wid >= c.warps:
            if cutlass.const_expr(c.setmaxnreg):
                cute.arch.setmaxregister_decrease(few)
        else:
            if cutlass.const_expr(c.setmaxnreg):
                cute.arch.setmaxregister_increase(many)
            note(k, 0)
            for run in PARTS[part]:
                run(k)
            note(k, 1)

    name = f"md_{part}"
    kernel.set_name_prefix(name, keep_mangled_name=False, remove_cutlass_symbol=True)
    geometry = dict(grid=c.ctas, block=c.block, cluster=1, smem=c.smem_bytes)

    @cute.jit
    def launch(args: Int64):
        kernel(args).launch(
            grid=(c.ctas, 1, 1), block=(c.block, 1, 1), cooperative=True, min_blocks_per_mp=1,
            smem=c.smem_bytes,
        )  # fmt: skip

    return launch, [Int64(0)], geometry
