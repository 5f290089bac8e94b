"""Our side of the comparison with the public low-latency megakernel for Llama-3.2-1B, one row.

    python -m tests.gpu.kernels DIR timed-llama-3.2-1b                      # anywhere
    python -m experiments.public_megakernel DIR [--theirs-us 750]           # needs a GPU; no DSL

Theirs is HazyResearch/Megakernels, `demos/low-latency-llama`: clone it on the same machine, build
it for the GPU at hand as its README says, and time 100 decode steps of its kernel back to back by
CUDA events, the reset of its barriers included (a step needs it), at a context of 1,024 positions;
give the mean as --theirs-us. Weights of both are bf16 of the same shapes, 2.471 GB a step, so that
random ones serve for times. Theirs does not verify several rows, draft, or take a prompt inside the
kernel, so one row is all there is to compare.

Ours: the service warp's own clock, steps that take their token from the step before.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import torch

from cute_kernels.gpu.config import product
from cute_kernels.gpu.load import Kernel
from cute_kernels.gpu.tiles import step_bytes
from experiments.common import need_gpu, parser, save

MODEL, CONTEXT = "llama-3.2-1b", 1024


def main() -> None:
    """Command line."""
    made = parser(__doc__, "public_megakernel")
    made.add_argument("folder", type=Path, help="kernels built beforehand")
    made.add_argument("--theirs-us", type=float, help="what their kernel took here")
    args = made.parse_args()
    need_gpu("public_megakernel", "kernels, see its docstring")
    from experiments.gpu_steps import STEPS, step_us
    from tests.gpu.model import Context, Model
    from tests.gpu.rig import Rig

    torch.zeros(1, device="cuda")
    c = product(MODEL)
    rig = Rig(
        Kernel.read(args.folder / f"timed-{MODEL}"), c, Model(c.shape, seed=3).packed(c),
        Context(c.shape, CONTEXT, STEPS + 16, 4),
    )  # fmt: skip
    us = [step_us(rig, CONTEXT, 1)["us"] for _ in range(3 if args.quick else 9)]
    ours = statistics.median(us)
    fields = {
        "model": MODEL, "context": CONTEXT, "ours_us": ours, "ours_us_range": [min(us), max(us)],
        "ours_tb_s": step_bytes(c) / ours / 1e6, "theirs_us": args.theirs_us,
    }  # fmt: skip
    print(
        f"ours {ours:.1f} us ({fields['ours_tb_s']:.2f} TB/s of weights)"
        + (
            f", theirs {args.theirs_us:.1f} us: {args.theirs_us / ours:.2f}x"
            if args.theirs_us
            else ""
        )
    )
    save("public_megakernel", args.json, "cuda", fields, args.quick)


if __name__ == "__main__":
    main()
