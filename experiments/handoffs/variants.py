"""The variants of the study by name. Every one is a Config; figures are reported under its name."""

import dataclasses

from cute_kernels.gpu.config import LLAMA_1B, SMOLLM2, Config

LLAMA = Config(LLAMA_1B)
SMOL = Config(
    SMOLLM2, ctas=72, warps=6, down_split=1, stage_bytes=9216, stages=20, red_buffers=2
)


def llama(**changes) -> Config:
    return dataclasses.replace(LLAMA, **changes)


def smol(**changes) -> Config:
    return dataclasses.replace(SMOL, **changes)


VARIANTS: dict[str, Config] = {
    "llama": LLAMA,
    "llama-t": llama(timing=True),
    "llama-inflight3": llama(inflight=3),
    "llama-hungry5": llama(hungry=5),
    "llama-noprobe": llama(probe=False),
    "llama-rows8": llama(rows=8),
    "smol": SMOL,
    "smol-t": smol(timing=True),
    "smol-noprobe": smol(probe=False),
    "smol-48": smol(ctas=48),
    "smol-96": smol(ctas=96),
    "smol-128": smol(ctas=128),
    "smol-132": smol(ctas=132),
    "smol-128-c2": smol(ctas=128, down_split=2, stage_bytes=12288, stages=15),
    "smol-128-c4": smol(ctas=128, down_split=4),
    "smol-64-c2": smol(ctas=64, down_split=2, stage_bytes=12288, stages=15),
}
