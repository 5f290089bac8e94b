"""Attention, or the drafter's, as a kernel of its own, for tests, figures and profiles: the same
device code.

Registers and shared memory are those of the whole kernel. One launch runs `layers` layers of one
step: layer i reads the raw columns of qkv from copy i of tiles.Buffers and leaves its output there.
As in the whole kernel a layer waits for the words of the one before, each warp for its share of the
columns, as the matrix behind attention would.
"""

import importlib

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.attention import stamp, take_rows
from cute_kernels.gpu.board import Desc
from cute_kernels.gpu.config import CHUNK, CHUNK_BYTES, ROWS, Config
from cute_kernels.gpu.context import draft_begins, tell_keys
from cute_kernels.gpu.core import arg, call, desc_word, init_barriers
from cute_kernels.gpu.entry import enter, geometry, register_split, resident
from cute_kernels.gpu.grid_barrier import arrive_grid, barrier_side
from cute_kernels.gpu.tiles import Buffers

DESC_WORDS = int(Desc.PATH) + 2 * ROWS
AT_ONCE = 8  # chunks of the output that a warp waits for together


@cute.jit
def take_output(k: cutlass.Constexpr, rows: Int32, out: Int64):
    """This warp's share of a layer's output columns, as a matrix with these rows would take it."""
    chunks, row = k.c.shape.attended // CHUNK // k.c.warps, k.lane >> 2
    at = out + Int64(k.wid * (chunks * CHUNK_BYTES) + k.lane * 16)
    for first in cutlass.range_constexpr(0, chunks, AT_ONCE):
        n = min(AT_ONCE, chunks - first)
        words = cute.make_rmem_tensor(cute.make_layout(n * 8), Uint32)
        places = [(b, (first + i) * CHUNK_BYTES) for b in range(2) for i in range(n)]
        addresses = [at + (off + b * 512) for b, off in places]
        take_rows(k, words, addresses, [8 * b + row < rows for b, _ in places], rows)


@cute.jit
def run_consumers(k: cutlass.Constexpr, form: cutlass.Constexpr, act: Int64, rows: Int32,
                  layers: Int32):  # fmt: skip
    b = Buffers.of(k.c)
    form.begin_step(k, rows)
    if cutlass.const_expr(k.drafting):  # the keys are there; the producer waits for all CTAs' word
        side = barrier_side(k)
        arrive_grid(k)
        tell_keys(k, side)
    sync.consumer_sync(k.c.warps * 32)
    stage, parity, cur = Int32(0), Int32(0), act
    for layer in cutlass.range(layers, unroll=1):
        stage, parity = call(form, "run_attention", k, rows, layer, cur, stage, parity)
        take_output(k, rows, cur + b.a)
        stamp(k, 8)
        sync.consumer_sync(k.c.warps * 32)
        cur = cur + b.bytes


@cute.jit
def run_producer(k: cutlass.Constexpr, form: cutlass.Constexpr, layers: Int32):
    step = form.begin_produce(k)
    if cutlass.const_expr(k.drafting):
        draft_begins(k)
    stage, parity, issued = Int32(0), Int32(0), Int32(0)
    landed, landed_parity = Int32(0), Int32(0)
    for layer in cutlass.range(layers, unroll=1):
        stage, parity, issued, landed, landed_parity = call(
            form, "produce_kv", k, step, layer, stage, parity, issued, landed, landed_parity
        )


def make_attention(c: Config, form: str = "attention"):
    """Returns (jit launcher, example arguments, launch geometry).

    form: attention.py, or draft_attention.py with the drafter's entries of the table.
    Arguments: the table of arguments.Arg (ACT, BOARD with a descriptor, KV_POOL, PAGE_TABLE, ROPE,
    QK_NORM, with timing TIMES), layers: copies of Buffers in ACT, whose part and a must be EMPTY.
    """

    few, many = register_split(c)
    module = importlib.import_module(f"cute_kernels.gpu.{form}")

    @cute.kernel
    def kernel(args: Int64, layers: Int32):
        k = enter(c)
        k.args, k.zero = args, Uint32(layers >> 30)
        k.stamps = arg(k, Arg.TIMES)
        k.kv_pool, k.pages = arg(k, Arg.KV_POOL), arg(k, Arg.PAGE_TABLE)
        k.draft_layers, k.drafting = Int32(c.shape.layers), form == "draft_attention"
        k.board = arg(k, Arg.BOARD)
        if k.tid < DESC_WORDS:
            word = sync.ld_word(k.board + Int64(k.tid) * 4)
            sync.sts_int(k.desc + k.tid * 4, word)
        init_barriers(k)
        if k.wid >= c.warps:
            if cutlass.const_expr(c.setmaxnreg):
                cute.arch.setmaxregister_decrease(few)
            if k.wid == c.warps:
                run_producer(k, module, layers)
        else:
            if cutlass.const_expr(c.setmaxnreg):
                cute.arch.setmaxregister_increase(many)
            run_consumers(k, module, arg(k, Arg.ACT), desc_word(k, Desc.ROWS), layers)

    kernel.set_name_prefix(f"md_{form}", keep_mangled_name=False, remove_cutlass_symbol=True)

    @cute.jit
    def launch(args: Int64, layers: Int32):
        kernel(args, layers).launch(**resident(c))

    return launch, [Int64(0), Int32(0)], geometry(c)
