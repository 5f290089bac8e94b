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
from cute_kernels.gpu.core import arg, init_barriers, memory
from cute_kernels.gpu.decide import decide_rows
from cute_kernels.gpu.entry import enter, launcher, register_split
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
        k = enter(c)
        memory(c, k, args)
        if k.tid < DESC_WORDS:
            sync.sts_int(k.desc + k.tid * 4, Int32(sync.ld_word(k.board + Int64(k.tid) * 4)))
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

    return launcher(c, kernel, f"md_{part}")
