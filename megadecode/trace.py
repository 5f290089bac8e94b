"""Where a step's time goes: per phase, against the bytes and operations its declaration names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cute_kernels.plan import PHASES, Shape, Work

KINDS = ("decode", "prefill")
"""Steps of decode rows only, and steps with a chunk of prefill beside them."""


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """One phase over all steps of one kind.

    `us` is the mean time of one run, from the end of the phase before it to the last worker's
    arrival; `share` its part of the steps' time; `read_bytes` the weights, keys and values that one
    run must read at least once; `gb_s` and `gflop_s` what its time makes of them and of its
    operations.
    """

    kind: str
    phase: str
    runs: int
    us: float
    share: float
    gb_s: float
    gflop_s: float
    read_bytes: float = 0.0


def phase_figures(
    trace: np.ndarray, shape: Shape, weight_bytes: int, drafter: Shape | None = None
) -> list[PhaseFigures]:
    """From the loop's counters, `[2, phases, columns]` (see `loop.make_trace`).

    `shape` is the target's, `drafter` the drafter's, whose phases are measured against its own
    sizes. `weight_bytes` is the size of one weight; keys and values are fp32.
    """
    figures = []
    for kind, table in zip(KINDS, trace):
        total_ns = int(table[:, 1].sum())
        for phase, (runs, ns, rows, head_rows, keys, reads) in zip(PHASES, table.tolist()):
            if not runs:
                continue
            whose = drafter if drafter and phase.segment == "draft" else shape
            cost = phase.cost(whose, Work(rows, head_rows, keys, reads))
            read = cost.weights * runs * weight_bytes + cost.kv * 4
            figures.append(
                PhaseFigures(
                    kind, phase.name, runs, ns / runs / 1e3, ns / total_ns, read / ns,
                    cost.flops / ns, read / runs,
                )
            )  # fmt: skip
    return figures


STAGES = ("draft", "tree", "verify", "decide", "compact")
"""The parts of a step that a user knows."""


def stage_of(phase: str) -> str:
    """The stage that a phase belongs to."""
    if phase in ("tree", "rows"):
        return "tree"
    if phase in STAGES:
        return phase
    return "draft" if phase.startswith("draft_") else "verify"


def decode_steps_of(figures: Sequence[PhaseFigures]) -> int:
    """Steps that decided something, among figures of one kind of step."""
    return sum(f.runs for f in figures if f.phase == "decide")


def stage_us(figures: Sequence[PhaseFigures]) -> dict[str, float]:
    """Microseconds a step by stage, from figures of one kind of step; empty without a step."""
    steps = decode_steps_of(figures)
    if not steps:
        return {}
    spent = dict.fromkeys(STAGES, 0.0)
    for f in figures:
        spent[stage_of(f.phase)] += f.runs * f.us / steps
    return spent


def bytes_per_step(figures: Sequence[PhaseFigures]) -> float:
    """Weights, keys and values that a step must read at least once; 0 without a step."""
    steps = decode_steps_of(figures)
    return sum(f.runs * f.read_bytes for f in figures) / steps if steps else 0.0


def table(figures: Sequence[PhaseFigures]) -> str:
    """The figures as aligned text, one line a phase."""
    lines = [
        f"{'step':8s} {'phase':9s} {'runs':>8s} {'us/run':>9s} {'share':>6s} "
        f"{'GB/s':>7s} {'GFLOP/s':>8s}"
    ]
    lines += [
        f"{f.kind:8s} {f.phase:9s} {f.runs:8d} {f.us:9.1f} {f.share:6.1%} "
        f"{f.gb_s:7.1f} {f.gflop_s:8.1f}"
        for f in figures
    ]
    return "\n".join(lines)
