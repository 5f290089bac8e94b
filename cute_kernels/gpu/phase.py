"""One matrix phase of the step as a kernel of its own: the same device code, for CUDA graphs.

Launched with programmatic dependent launch, a kernel starts while the one in front of it still
runs: it sets up its barriers and streams weights into its ring, and only its consumers wait for
the data. Nothing is polled but the sums of a team that shares K; the residual lives in device
memory. (Attention alone: attention_kernel.py.)
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels.gpu import head, sync
from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.config import ROWS, TILE, Config
from cute_kernels.gpu.core import arg, init_barriers, memory
from cute_kernels.gpu.entry import enter, geometry
from cute_kernels.gpu.gemm import plan_entry, run_phase
from cute_kernels.gpu.ring import produce
from cute_kernels.gpu.sync import ptx_read
from cute_kernels.gpu.tiles import Buffers, tile_stride


def residual_at(k, residual, tile):
    """Of this thread's pair: fp32 [hidden / 8, 16 rows, 8]."""
    return residual + Int64(((tile * ROWS + k.row) * TILE + 2 * k.t) * 4)


@cute.jit
def move_residual(k: cutlass.Constexpr, residual: Int64, tile0: Int32, n: Int32,
                  store: cutlass.Constexpr):  # fmt: skip
    """This CTA's own columns between device memory and its shared memory. tile0, n: of `o`."""
    own, stride = k.j, tile_stride(k.c, "o")
    while own < n:
        at, here = residual_at(k, residual, tile0 + own * stride), k.residual + own * 512 + k.pair
        if cutlass.const_expr(store):
            v0, v1 = sync.lds_pair(here)
            sync.ptx_do("st.global.v2.f32 [{$r0}], {{$r1},{$r2}};", at, v0, v1)
        else:
            v0, v1 = ptx_read("ld.global.v2.f32 {{$w0},{$w1}}, [{$r0}];", [Float32] * 2, at)
            sync.sts_pair(here, v0, v1)
        own = own + k.c.group


@cute.jit
def produce_phase(k: cutlass.Constexpr, stream: Int64, phase: Int32):
    offset = ptx_read("ld.global.nc.b64 {$w0}, [{$r0}];", [Int64], k.offsets + Int64(phase) * 8)
    _, _, copies, n_bytes = plan_entry(k, phase)
    zero = Int32(0)
    produce(k.ring, stream + offset, copies, n_bytes, zero, zero, zero, zero, zero)


@cute.jit
def consume_phase(k: cutlass.Constexpr, src: Int64, dst: Int64, residual: Int64, phase: Int32,
                  rows: Int32):  # fmt: skip
    c, zero = k.c, Int32(0)
    keeps = c.phase in ("o", "down")
    sync.wait_for_prerequisites()
    tile0, n, _, _ = plan_entry(k, (phase & ~3) + 1)
    if cutlass.const_expr(keeps):
        move_residual(k, residual, tile0, n, False)
        sync.consumer_sync(c.warps * 32)
    stats = head.new_stats()
    parts = arg(k, Arg.FINAL_NORM)
    if cutlass.const_expr(c.phase == "down"):
        b = Buffers.of(c)
        parts = dst + (b.parts - b.x)
    run_phase(k, c.gemm(c.phase), rows, phase, src, dst, parts, stats, zero, zero, zero, zero, zero)
    if cutlass.const_expr(keeps):
        sync.consumer_sync(c.warps * 32)
        move_residual(k, residual, tile0, n, True)


def make_phase(c: Config, blocks_per_sm: int = 1):
    """Returns (jit launcher, example arguments, launch geometry); c.phase names the phase.

    Arguments: the table arguments.Arg (LAYERS, STREAM, OFFSETS, PLAN, of `lm` FINAL_NORM), src, dst
    (one copy of the activations, or the logits), residual (fp32 [hidden / 8, 16, 8]), phase (index
    in the plan), rows. Where a team shares K of `down`, dst lies in a copy of tiles.Buffers whose
    `parts` are EMPTY. blocks_per_sm: 2 lets the next kernel's CTAs become resident before this
    one's have left.
    """

    @cute.kernel
    def kernel(args: Int64, src: Int64, dst: Int64, residual: Int64, phase: Int32, rows: Int32):
        k = enter(c)
        memory(c, k, args)
        sync.let_dependents_start()
        init_barriers(k)
        if k.wid == c.warps:
            produce_phase(k, arg(k, Arg.STREAM), phase)
        if k.wid < c.warps:
            consume_phase(k, src, dst, residual, phase, rows)

    name = f"md_phase_{c.phase}"
    kernel.set_name_prefix(name, keep_mangled_name=False, remove_cutlass_symbol=True)

    @cute.jit
    def launch(args: Int64, src: Int64, dst: Int64, residual: Int64, phase: Int32, rows: Int32):
        kernel(args, src, dst, residual, phase, rows).launch(
            grid=(c.ctas, 1, 1), block=(c.block, 1, 1), min_blocks_per_mp=blocks_per_sm,
            preferred_smem_carveout=100, smem=c.smem_bytes,
        )  # fmt: skip

    return launch, [Int64(0)] * 4 + [Int32(0)] * 2, geometry(c)
