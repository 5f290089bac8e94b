"""One phase of the step as a kernel of its own: the same device code, for CUDA graphs.

Launched with programmatic dependent launch, a kernel starts while the one in front of it still
runs: it sets up its barriers and streams weights into its ring, and only its consumers wait for
the data. Nothing is polled; the residual lives in device memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from cute_kernels.gpu import gemm, sync
from cute_kernels.gpu.config import KINDS, Config
from cute_kernels.gpu.gemm import Core, plan_entry, run_phase
from cute_kernels.gpu.ring import produce
from cute_kernels.gpu.step import (
    carve,
    init_barriers,
    load_residual,
    places,
    store_residual,
)


@cute.jit
def produce_phase(k: cutlass.Constexpr, stream: Int64, offsets: Int64, at: Int32, phase: Int32):
    first = gemm.ptx_read("ld.global.nc.b64 {$w0}, [{$r0}];", [Int64], offsets + Int64(at) * 8)
    _, _, copies, n_bytes = plan_entry(k, phase)
    zero = Int32(0)
    produce(
        k.ring, k.c, stream + first, copies, n_bytes, zero, zero, zero, zero, zero, zero,
        Boolean(False),
    )  # fmt: skip


@cute.jit
def consume_phase(k: cutlass.Constexpr, src: Int64, dst: Int64, residual: Int64, phase: Int32):
    c = k.c
    keeps = c.phase in ("o", "down")
    sync.wait_for_prerequisites()
    if cutlass.const_expr(keeps):
        load_residual(k, residual, Int32(1))
        sync.consumer_sync(c.warps * 32)
    zero = Int32(0)
    kind = Int32(KINDS.index(c.phase))
    run_phase(k, c.families[0], kind, phase, src, dst, Int64(0), zero, zero, zero, zero, zero, zero)
    if cutlass.const_expr(keeps):
        sync.consumer_sync(c.warps * 32)
        store_residual(k, residual, Int32(1))


def make_phase(c: Config, blocks_per_sm: int = 1):
    """Returns (jit launcher, example arguments, launch geometry); c.phase names the phase.

    Arguments: stream, offsets, plan as for the step; src, dst (one copy of the activations, or the
    logits), residual (fp32 [hidden / 8, tile_rows, 8]), phase (index in the plan), phases.
    blocks_per_sm: 2 lets the next kernel's CTAs become resident before this one's have left.
    """

    @cute.kernel
    def kernel(
        stream: Int64, offsets: Int64, plan: Int64, src: Int64, dst: Int64, residual: Int64,
        phase: Int32, phases: Int32,
    ):  # fmt: skip
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        smem, k = cutlass.memory.SmemAllocator(), Core()
        block = smem.allocate_tensor(
            cutlass.Uint8, cute.make_layout(c.smem_bytes), byte_alignment=1024
        )
        carve(c, block.iterator.toint(), k)
        places(c, k, tid, bid)
        k.zero = Uint32(phases >> 30)
        k.plan = plan + Int64(bid * phases) * 16
        sync.let_dependents_start()
        init_barriers(k)
        if k.wid >= c.warps:
            if cutlass.const_expr(c.setmaxnreg):
                cute.arch.setmaxregister_decrease(40)
            if k.wid == c.warps:
                produce_phase(k, stream, offsets, bid * phases + phase, phase)
        else:
            if cutlass.const_expr(c.setmaxnreg):
                cute.arch.setmaxregister_increase(232)
            consume_phase(k, src, dst, residual, phase)
        if cutlass.const_expr(c.cluster > 1):
            sync.cluster_sync()

    name = f"md_phase_{c.phase}"
    kernel.set_name_prefix(name, keep_mangled_name=False, remove_cutlass_symbol=True)
    geometry = dict(grid=c.ctas, block=c.block, cluster=c.cluster, smem=c.smem_bytes)

    @cute.jit
    def launch(
        stream: Int64, offsets: Int64, plan: Int64, src: Int64, dst: Int64, residual: Int64,
        phase: Int32, phases: Int32,
    ):  # fmt: skip
        kernel(stream, offsets, plan, src, dst, residual, phase, phases).launch(
            grid=(c.ctas, 1, 1), block=(c.block, 1, 1), cluster=(c.cluster, 1, 1),
            min_blocks_per_mp=blocks_per_sm, preferred_smem_carveout=100,
            smem=c.smem_bytes,
        )  # fmt: skip

    return launch, [Int64(0)] * 6 + [Int32(0)] * 2, geometry
