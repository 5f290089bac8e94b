"""Our side of the comparison with the public low-latency megakernel for Llama-3.2-1B, one row.

    python -m experiments.public_megakernel [--cubins DIR] [--theirs-us 750]

Theirs is HazyResearch/Megakernels, `demos/low-latency-llama`, as of commit 7309cec (June 2025); its
later revisions have left Hopper and that demo behind. On the same machine, once its requirements
are installed as its README says:

    git clone https://github.com/HazyResearch/Megakernels && cd Megakernels
    git checkout 7309cec && git submodule update --init --recursive && pip install -e .
    export MEGAKERNELS_ROOT=$PWD THUNDERKITTENS_ROOT=$PWD/ThunderKittens PYTHON_VERSION=3.12
    GPU=H100 make -C demos/low-latency-llama        # H100 stands for Hopper, an H200 included
    python megakernels/scripts/generate.py mode=mk ntok=100

It loads meta-llama/Llama-3.2-1B-Instruct, for which one has to ask there. `Fwd per second` is of
steps back to back, by CUDA events, the reset of its barriers included (a step needs it), from the
prompt's dozen of positions on: give 1,000,000 over it as --theirs-us. It is compared with ours at
the first of CONTEXTS. Weights of both are bf16 of the same shapes, 2.471 GB a step, so that ours,
which are random, serve for times. Theirs does not verify several rows, draft, or take a prompt
inside the kernel: one row is all there is to compare.

Ours: the service warp's own clock, steps that take their token from the step before.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch

from cute_kernels.gpu.config import product
from cute_kernels.gpu.load import Kernel
from cute_kernels.gpu.tiles import step_bytes
from experiments.common import figure, need_gpu, parser, save
from experiments.cubins import TIMED, find

MODEL, CONTEXTS = "llama-3.2-1b", (64, 1024)


def main() -> None:
    """Command line."""
    made = parser(__doc__, "public_megakernel")
    made.add_argument("--cubins", type=Path, help="kernels of experiments.cubins, built beforehand")
    made.add_argument("--theirs-us", type=float, help="what a step of theirs took on this machine")
    args = made.parse_args()
    need_gpu("public_megakernel")
    folder = find(args.cubins, TIMED[1])
    if folder is None:
        raise SystemExit("public_megakernel needs its kernel: python -m experiments.cubins")
    from experiments.gpu_steps import STEPS, step_us
    from tests.gpu.model import Context, Model
    from tests.gpu.rig import Rig

    torch.zeros(1, device="cuda")
    c = product(MODEL)
    kernel, packed = Kernel.read(folder / f"timed-{MODEL}"), Model(c.shape, seed=3).packed(c)
    cases: list[dict[str, Any]] = []
    for context in CONTEXTS:
        rig = Rig(kernel, c, packed, Context(c.shape, context, STEPS + 16, 4))
        us = [step_us(rig, context, 1)["us"] for _ in range(3 if args.quick else 9)]
        row = {"context": context, "us": statistics.median(us), "rounds": us}
        row["tb_s"] = step_bytes(c) / row["us"] / 1e6
        cases.append(row)
        print(f"ours at {context}: {row['us']:.1f} us, {row['tb_s']:.2f} TB/s of weights")
    if args.theirs_us:
        ratio = args.theirs_us / cases[0]["us"]
        print(f"theirs: {args.theirs_us:.1f} us, {ratio:.2f}x ours at {CONTEXTS[0]}")
    fields = {
        "model": MODEL, "cases": cases, "theirs_us": args.theirs_us,
        "figures": {f"ours at {row['context']}, us": figure(row["rounds"]) for row in cases},
    }  # fmt: skip
    save("public_megakernel", args.json, "cuda", fields, args.quick)


if __name__ == "__main__":
    main()
