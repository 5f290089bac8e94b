"""The pure stream: the ring's bulk copies and nothing else, as fast as this kernel can read.

    python -m experiments.baselines.stream_kernel DIR         builds it anywhere

What a trace's DRAM share is measured against. One warp a CTA copies its part of a buffer, piece by
piece, into as many stages as fit shared memory; a stage is copied into again once it has landed.
"""

import json
import pathlib
import sys
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.gpu import build, sync
from cute_kernels.gpu.ring import Ring, advance, fetch

CTAS, STAGES, STAGE_BYTES = 132, 12, 16384
NAME = "pure-stream"


def make_stream() -> tuple:
    """Returns (jit launcher, example arguments, launch geometry). Arguments: the buffer's address,
    copies of STAGE_BYTES a CTA; CTA i begins behind the i CTAs before it."""
    smem_bytes = STAGES * STAGE_BYTES + 1024

    @cute.kernel
    def kernel(source: Int64, copies: Int32):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        block = smem.allocate_tensor(
            cutlass.Uint8, cute.make_layout(smem_bytes), byte_alignment=1024
        )
        base = Int32(block.iterator.toint())
        ring = Ring(base, base + STAGES * STAGE_BYTES, STAGES, STAGE_BYTES)
        if tid == 0:
            for i in range(STAGES):
                sync.init_barrier(ring.full + 8 * i, 1)
            sync.fence_barrier_init()
        cute.arch.sync_threads()
        at = source + Int64(bid) * Int64(copies) * STAGE_BYTES
        stage, parity = Int32(0), Int32(0)
        for i in cutlass.range(copies, unroll=1):
            if i >= STAGES:
                sync.wait_parity(ring.full + stage * 8, parity ^ 1)
            fetch(ring, at, Int32(STAGE_BYTES), stage)
            at = at + Int64(STAGE_BYTES)
            stage, parity = advance(ring, stage, parity)
        for _ in cutlass.range(STAGES, unroll=1):  # nothing may land in a CTA that has gone
            sync.wait_parity(ring.full + stage * 8, parity ^ 1)
            stage, parity = advance(ring, stage, parity)

    kernel.set_name_prefix("md_pure_stream", keep_mangled_name=False, remove_cutlass_symbol=True)

    @cute.jit
    def launch(source: Int64, copies: Int32):
        kernel(source, copies).launch(
            grid=(CTAS, 1, 1), block=(32, 1, 1), preferred_smem_carveout=100, smem=smem_bytes
        )

    return launch, [Int64(0), Int32(0)], dict(grid=CTAS, block=32, cluster=1, smem=smem_bytes)


def main(folder: pathlib.Path, names: list[str]) -> None:
    """Build into `folder`; names: NAME or nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    what = f"pure stream {pathlib.Path(__file__).read_text()}"
    made = build.build(what, partial(make_stream), "sm_90a", folder.parent / "cache")
    (folder / f"{NAME}.cubin").write_bytes(made.cubin)
    (folder / f"{NAME}.json").write_text(json.dumps(made.manifest))
    m = made.manifest
    print(f"{NAME}: {m['reg']} registers, {m['stack']} B stack, {m['smem']} B shared")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
