"""The PROMPT segment, or one part of it, as a kernel of its own: for tests and graph baselines.

The same device code as in the persistent kernel, without a board to wait for: the chunk and the
phases to run are launch arguments. Launch cooperatively: CTAs meet at grid barriers.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.gpu.config import Config
from cute_kernels.gpu.core import init_barriers, memory
from cute_kernels.gpu.entry import enter, geometry, register_split, resident
from cute_kernels.gpu.prompt import chunk, produce_layers, run_layers


@cute.jit
def produce_all(k: cutlass.Constexpr, p: cutlass.Constexpr, first: Int32, last: Int32,
                only: cutlass.Constexpr):  # fmt: skip
    zero = Int32(0)
    produce_layers(k, p, first, last, zero, zero, zero, zero, zero, only)


def make_prompt(c: Config, only: str = ""):
    """Returns (jit launcher, example arguments, launch geometry).

    only: one of prompt_plan.PARTS, or "" for the whole segment. Arguments: address of the table
    arguments.Arg; rows, position of the chunk; first and last + 1 phase (of a part: its own).
    """

    few, many = register_split(c)

    @cute.kernel
    def kernel(args: Int64, rows: Int32, position: Int32, first: Int32, last: Int32):
        k = enter(c)
        memory(c, k, args)
        init_barriers(k)
        if k.wid >= c.warps:
            if cutlass.const_expr(c.setmaxnreg):
                cute.arch.setmaxregister_decrease(few)
            if k.wid == c.warps:
                produce_all(k, chunk(k, rows, position), first, last, only)
        else:
            if cutlass.const_expr(c.setmaxnreg):
                cute.arch.setmaxregister_increase(many)
            run_layers(k, chunk(k, rows, position), first, last, Int32(0), Int32(0), only)

    name = f"md_prompt_{only or 'all'}"
    kernel.set_name_prefix(name, keep_mangled_name=False, remove_cutlass_symbol=True)

    @cute.jit
    def launch(args: Int64, rows: Int32, position: Int32, first: Int32, last: Int32):
        kernel(args, rows, position, first, last).launch(**resident(c))

    return launch, [Int64(0)] + [Int32(0)] * 4, geometry(c)
