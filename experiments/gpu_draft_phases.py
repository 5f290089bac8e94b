"""Where a DRAFT step's time goes on the GPU, phase by phase, random target:

    python -m tests.gpu.kernels DIR draft-smollm2-135m-phases draft-llama-3.2-1b-phases
    python -m experiments.gpu_draft_phases DIR [positions]      # needs a GPU and torch; no DSL

Steps alternate, DECODE and DRAFT, as in tests/gpu/check_draft.py. A line is a phase of the last
DRAFT step: when it began and ended on CTA 0, from the first phase's begin; and over the CTAs with
tiles, the mean and the longest wait for activations, product with its own tiles, and end. Attention
stands before `o`.
"""

import argparse
import pathlib

import torch

from cute_kernels.gpu.config import LAYER_KINDS
from cute_kernels.gpu.load import Kernel
from experiments.common import need_gpu
from tests.gpu.check_draft import ACCEPTED, drafters
from tests.gpu.draft_case import DraftCase
from tests.gpu.kernels import drafting_timed
from tests.gpu.model import Model

ROUNDS, CHAIN = 6, 8


def names(case: DraftCase) -> list[str]:
    fc = [f"fc {i}" for i in range(case.shape.taps)]
    layers = [f"{kind} {i}" for i in range(case.shape.layers) for kind in LAYER_KINDS]
    return [*fc, "ckv", *layers, "head"]


def show(title: str, case: DraftCase, block_rows: int) -> None:
    ids = list(range(7, 7 + CHAIN))
    block = [ids[ACCEPTED[-1]], *[case.config.mask_token_id] * (block_rows - 1)]
    case.rig.run(case.steps(ids, ACCEPTED, block) * ROUNDS)
    t = case.times.double().cpu() / 1e3
    first = 4 * case.c.shape.layers + 1
    print(f"{title}: {block_rows} rows, {case.n} positions; parts {case.stamps()}")
    zero = t[0, first, 0]
    for i, name in enumerate(names(case)):
        v = t[:, first + i]
        busy = v[v[:, 3] > v[:, 0] + 0.5]
        d = (busy[:, 1:] - busy[:, :3]) if len(busy) else torch.zeros(1, 3)
        parts = [f"{float(x.mean()):5.2f} {float(x.max()):5.2f}" for x in d.T]
        begin, end = float(v[0, 0] - zero), float(v[0, 3] - zero)
        print(f"  {name:8s} {begin:7.2f} .. {end:7.2f}   {len(busy):3d} CTAs: {'  '.join(parts)}")


def main(folder: pathlib.Path, positions: int) -> None:
    for name, c in drafting_timed().items():
        if not (folder / f"{name}.json").exists():
            continue
        kernel, model = Kernel.read(folder / name), Model(c.shape, seed=11)
        for title, drafter in drafters(name.removesuffix("-phases"), c).items():
            case = DraftCase(kernel, c, model, drafter, positions, seed=1)
            for rows in (8, 16):
                show(title, case, rows)


if __name__ == "__main__":
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("folder", type=pathlib.Path, help="kernels, built beforehand")
    made.add_argument("positions", type=int, nargs="?", default=1000)
    asked = made.parse_args()
    need_gpu("gpu_draft_phases")
    torch.zeros(1, device="cuda")  # makes the context that kernels are loaded into
    main(asked.folder, asked.positions)
