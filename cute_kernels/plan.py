"""The step as data: every phase declared once.

A *phase* is one dependent stage of a step. From this table come the order in which a device runs
its work (`program`), the names in traces and hang reports, the waits between phases (`handoff`),
and the bytes and flops every report compares with the machine's roofline (`Phase.cost`).

This module knows shapes only: no numba, no torch, no CuTe. The CPU device and the GPU kernel are
both built from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Shape(NamedTuple):
    """Sizes of a target model, in elements; field names as in `megadecode.config.ModelConfig`."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int


class Work(NamedTuple):
    """How much one run of a phase had to do: rows of the step, rows with logits, keys attended.

    `keys` is summed over rows: a row at position p attends to p + 1 keys.
    `key_reads` is the number of KV positions that must be read at least once: a segment's rows
    share the keys of their slot.
    """

    rows: int
    head_rows: int
    keys: int
    key_reads: int


class Cost(NamedTuple):
    """Weight and KV elements read, activation elements moved, floating-point operations.

    Weights are read once however many rows there are; the rest grows in proportion to the work, so
    that the cost of many steps is the cost of their summed work, the weights counted once a run.
    """

    weights: int
    kv: int
    activations: int
    flops: int


@dataclass(frozen=True)
class Phase:
    """One dependent stage of a step.

    `reads` and `writes` name activation buffers, weights (`w.`) or the KV cache (`kv`). `handoff`
    is what the *next* phase waits for: `all` (every worker has finished this phase) or `none`
    (it may start at once). `cost(shape, work)` is for one layer.
    """

    name: str
    segment: str
    per_layer: bool
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    handoff: str
    cost: Callable[[Shape, Work], Cost]
    does: str


def _gemm(rows: int, k: int, n: int) -> Cost:
    return Cost(n * k, 0, rows * (k + n), 2 * rows * k * n)


def _qkv(s: Shape, w: Work) -> Cost:
    return _gemm(w.rows, s.hidden, (s.heads + 2 * s.kv_heads) * s.head_dim)


def _attention(s: Shape, w: Work) -> Cost:
    """Scores and weighted values of every key, split evenly enough between attend and merge."""
    kv = 2 * w.key_reads * s.kv_heads * s.head_dim
    return Cost(0, kv, 2 * w.rows * s.heads * s.head_dim, 4 * w.keys * s.heads * s.head_dim)


def _nothing(s: Shape, w: Work) -> Cost:
    return Cost(0, 0, 0, 0)


PHASES: tuple[Phase, ...] = (
    Phase(
        "embed", "target", False, ("w.head",), ("x",), "all",
        lambda s, w: Cost(0, 0, 2 * w.rows * s.hidden, 0),
        "gather the rows' token embeddings into the residual stream",
    ),
    Phase(
        "qkv", "target", True, ("x", "w.attn_norm", "w.qkv"), ("q", "kv"), "all", _qkv,
        "RMSNorm, query/key/value projections, RoPE; keys and values go to the rows' pages",
    ),
    Phase(
        "attend", "target", True, ("q", "kv"), ("parts",), "all", _attention,
        "keys below c(p) in 64-blocks, split over workers: canonical order, part one",
    ),
    Phase(
        "merge", "target", True, ("q", "kv", "parts"), ("attn",), "all", _nothing,
        "keys c(p)..p one by one, then the parts in ascending order (cost counted in attend)",
    ),
    Phase(
        "out_proj", "target", True, ("attn", "w.out", "x"), ("x",), "all",
        lambda s, w: _gemm(w.rows, s.heads * s.head_dim, s.hidden),
        "output projection, added to the residual stream",
    ),
    Phase(
        "gate_up", "target", True, ("x", "w.ffn_norm", "w.gate_up"), ("h",), "all",
        lambda s, w: _gemm(w.rows, s.hidden, 2 * s.ffn),
        "RMSNorm, gate and up projections, silu(gate) * up",
    ),
    Phase(
        "down", "target", True, ("h", "w.down", "x"), ("x",), "all",
        lambda s, w: _gemm(w.rows, s.ffn, s.hidden),
        "down projection, added to the residual stream",
    ),
    Phase(
        "head", "head", False, ("x", "w.final_norm", "w.head"), ("logits",), "all",
        lambda s, w: _gemm(w.head_rows, s.hidden, s.vocab),
        "final RMSNorm and logits of the rows that need them",
    ),
    Phase(
        "select", "head", False, ("logits",), ("token", "logprob"), "all",
        lambda s, w: Cost(0, 0, 2 * w.head_rows * s.vocab, 4 * w.head_rows * s.vocab),
        "every head row's token: highest logit, lowest id on ties; its log-probability",
    ),
)  # fmt: skip


def phase_number(name: str) -> int:
    """Place of a phase in `PHASES`; KeyError when there is none of that name."""
    return {phase.name: number for number, phase in enumerate(PHASES)}[name]


def program(layers: int) -> np.ndarray:
    """The phases of one step in order, `[operations, 2]` int32: phase number, layer.

    Neighbouring phases that are `per_layer` form the body that is repeated for every layer.
    """
    operations: list[tuple[int, int]] = []
    body: list[int] = []
    for number, phase in enumerate(PHASES):
        if phase.per_layer:
            body.append(number)
            continue
        operations += [(b, layer) for layer in range(layers) for b in body]
        body = []
        operations.append((number, 0))
    operations += [(b, layer) for layer in range(layers) for b in body]
    return np.array(operations, np.int32)
