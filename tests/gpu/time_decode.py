"""Microseconds of a decode step, free running, by the service warp's own clock:

    python -m tests.gpu.time_decode DIR [name ...]       (tests.gpu.kernels builds DIR)

The median distance between two steps' results, over STEPS steps that begin at POSITION.
"""

import pathlib
import sys

import numpy as np
import torch

from cute_kernels.gpu.load import Kernel
from cute_kernels.gpu.script import decode_step
from cute_kernels.gpu.tiles import step_bytes
from tests.gpu.kernels import timed
from tests.gpu.model import Context, Model
from tests.gpu.rig import Rig

ROWS, STEPS, POSITION = (1, 4, 8, 16), 60, 1024


def step_us(rig: Rig, rows: int, rounds: int = 3) -> float:
    layers = rig.c.shape.layers
    steps = [
        decode_step([7] * rows, POSITION + i * (rig.ctx is not None), layers, free=i > 0)
        for i in range(STEPS)
    ]
    times = [np.diff(rig.run(steps)[:, 0]["ns"])[5:] for _ in range(rounds)]
    return float(np.median(np.concatenate(times))) / 1e3


def main(folder: pathlib.Path, names: list[str]) -> None:
    for name, c in timed().items():
        if (names and name not in names) or not (folder / f"{name}.json").exists():
            continue
        model = Model(c.shape, seed=3)
        ctx = Context(c.shape, POSITION, 128, 4) if c.attention else None
        rig = Rig(Kernel.read(folder / name), c, model, ctx)
        us = {rows: step_us(rig, rows) for rows in ROWS}
        rate = step_bytes(c) / us[1] / 1e6
        print(f"{name:32s}", {n: round(v, 1) for n, v in us.items()}, f"us; {rate:.2f} TB/s at 1")
        if c.timing:
            print(phases(rig), flush=True)
        del rig, model, ctx
        torch.cuda.empty_cache()


def phases(rig: Rig) -> str:
    """Where the last step's time went: mean us by phase until a CTA has its activations, is done
    with its work, is done; and the step's span."""
    t = rig.times.double().cpu() / 1e3
    start = t[:, 0, 0].min()
    out = [f"  span {float(t[..., 3].max() - start):.1f} us"]
    n = t.shape[1] - 1
    for i, kind in enumerate(("qkv", "o", "gu", "down", "lm")):
        v = t[:, i:n:4] if kind != "lm" else t[:, n:]
        d = (v - v[..., :1]).clamp(min=0)
        took = [f"{float(d[..., j].mean()):.2f}" for j in (1, 2, 3)]
        out.append(f"  {kind} {' '.join(took)}")
    return "\n".join(out)


if __name__ == "__main__":
    torch.zeros(1, device="cuda")  # makes the context that kernels are loaded into
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
