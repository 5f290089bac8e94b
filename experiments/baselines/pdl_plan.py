"""The forms of the phases that stand as kernels of their own in a graph. Free of cutlass."""

from __future__ import annotations

import dataclasses

from cute_kernels.gpu.config import SHAPES, Config, product

MODELS = ("smollm2-135m", "llama-3.2-1b")
# Stages of the ring and CTAs that fit an SM: with half the ring and two CTAs the next kernel is
# resident before this one has left, which pays for the small model (measured: handoffs/README.md).
MATRICES: dict[str, tuple[dict, int]] = {
    "smollm2-135m": (dict(stage_bytes=9216, stages=8), 2),
    "llama-3.2-1b": (dict(stages=11), 1),
}
ATTENTION: dict[str, tuple[dict, int]] = {
    "smollm2-135m": (dict(stages=4), 2),
    "llama-3.2-1b": (dict(stages=6), 1),
}


def phase_config(model: str, phase: str = "qkv") -> Config:
    """Of a matrix as a kernel of its own."""
    return product(
        model, phase=phase, attention=False, prompt=False, setmaxnreg=False, **MATRICES[model][0]
    )


def draft_config(model: str, layers: int, columns: int) -> Config:
    """How a drafter's matrices are packed and laid out for the kernels of `phase_config`: layers of
    the target's own sizes, and a head of `columns` tokens."""
    shape = dataclasses.replace(SHAPES[model], layers=layers, vocab=columns, tied=False)
    return product(
        shape, phase="qkv", attention=False, prompt=False, setmaxnreg=False, **MATRICES[model][0]
    )


def attention_config(model: str) -> Config:
    """Of attention; tiles, columns and parts lie as in the matrices' kernels."""
    return product(model, prompt=False, setmaxnreg=False, **ATTENTION[model][0])
