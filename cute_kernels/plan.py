"""The step as data: every phase declared once.

A *phase* is one dependent stage of a step. From this table come the order in which a device runs
its work (`program`), the names in traces and hang reports, the waits between phases (`handoff`),
and the bytes and flops every report compares with the machine's roofline (`Phase.cost`).

This module knows shapes only: no numba, no torch, no CuTe. The CPU device and the GPU kernel are
both built from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
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
    taps: int = 0  # a drafter's: layers of the target whose features it reads


ONCE, LAYER, TAP = "once", "layer", "tap"
"""How often a phase runs in a step: once, in every layer of its model, or behind tapped layers."""


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

    `reads` and `writes` name activation buffers, weights (`w.`) or the KV cache (`kv`), with `d.`
    in front for the drafter's. The next phase waits until all workers have finished this one.
    `cost(shape, work)` is for one layer, with the shape of the model whose phase it is.
    """

    name: str
    segment: str
    repeat: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
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


_TARGET_LAYER = (
    ("qkv", ("x", "w.attn_norm", "w.qkv"), ("q", "kv"), _qkv,
     "RMSNorm, query/key/value projections, RoPE; keys and values go to the rows' pages"),
    ("attend", ("q", "kv"), ("parts",), _attention,
     "keys below c(p) in 64-blocks, split over workers: canonical order, part one"),
    ("merge", ("q", "kv", "parts"), ("attn",), _nothing,
     "keys c(p)..p along the row's path one by one, then the parts in ascending order"),
    ("out_proj", ("attn", "w.out", "x"), ("x",),
     lambda s, w: _gemm(w.rows, s.heads * s.head_dim, s.hidden),
     "output projection, added to the residual stream"),
    ("gate_up", ("x", "w.ffn_norm", "w.gate_up"), ("h",),
     lambda s, w: _gemm(w.rows, s.hidden, 2 * s.ffn),
     "RMSNorm, gate and up projections, silu(gate) * up"),
    ("down", ("h", "w.down", "x"), ("x",),
     lambda s, w: _gemm(w.rows, s.ffn, s.hidden),
     "down projection, added to the residual stream"),
)  # fmt: skip


def _draft_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """The drafter's own buffers and weights behind the same names."""
    return tuple(f"d.{name}" for name in names)


_DRAFT: tuple[Phase, ...] = (
    Phase("draft_fuse", "draft", ONCE, ("features", "d.w.fc"), ("d.context",),
          lambda s, w: _gemm(w.rows, s.taps * s.hidden, s.hidden),
          "features of the rows committed last step, projected to the drafter's width"),
    Phase("draft_context", "draft", ONCE, ("d.context", "d.w.qkv"), ("d.kv",),
          lambda s, w: _gemm(w.rows, s.hidden, 2 * s.layers * s.kv_heads * s.head_dim),
          "the drafter's keys and values of those rows in all its layers, appended to its pages"),
    Phase("draft_embed", "draft", ONCE, ("w.head",), ("d.x",),
          lambda s, w: Cost(0, 0, 2 * w.rows * s.hidden, 0),
          "each slot's block: the anchor, then MASK"),
    Phase("draft_qkv", "draft", LAYER, ("d.x", "d.w.attn_norm", "d.w.qkv"), ("d.q", "d.kv"), _qkv,
          "the block's queries, keys and values"),
    Phase("draft_attend", "draft", LAYER, ("d.q", "d.kv"), ("d.attn",), _attention,
          "the block's rows over the drafter's context and over each other"),
    *(Phase(f"draft_{name}", "draft", LAYER, _draft_names(reads), _draft_names(writes), cost, does)
      for name, reads, writes, cost, does in _TARGET_LAYER[3:]),
    Phase("draft_head", "draft", ONCE, ("d.x", "d.w.final_norm", "w.head"), ("d.logits",),
          lambda s, w: _gemm(w.head_rows, s.hidden, s.vocab),
          "logits of the drafted positions"),
    Phase("draft_rank", "draft", ONCE, ("d.logits",), ("ranked",),
          lambda s, w: Cost(0, 0, 2 * w.head_rows * s.vocab, 4 * w.head_rows * s.vocab),
          "per drafted position the likeliest tokens and their log-probabilities"),
    Phase("tree", "draft", ONCE, ("ranked",), ("tree",), _nothing,
          "best-first trees, one per drafting slot, and how much of each to verify"),
    Phase("rows", "rows", ONCE, ("tree",), ("rows",), _nothing,
          "the target's row table and attention work, by the leader"),
)  # fmt: skip

PHASES: tuple[Phase, ...] = (
    *_DRAFT,
    Phase("embed", "target", ONCE, ("rows", "w.head"), ("x",),
          lambda s, w: Cost(0, 0, 2 * w.rows * s.hidden, 0),
          "gather the rows' token embeddings into the residual stream"),
    *(Phase(name, "target", LAYER, reads, writes, cost, does)
      for name, reads, writes, cost, does in _TARGET_LAYER),
    Phase("tap", "target", TAP, ("x",), ("features",),
          lambda s, w: Cost(0, 0, 2 * w.rows * s.hidden, 0),
          "copy the residual stream after a layer that the drafter listens to"),
    Phase("head", "head", ONCE, ("x", "w.final_norm", "w.head"), ("logits",),
          lambda s, w: _gemm(w.head_rows, s.hidden, s.vocab),
          "final RMSNorm and logits of the rows that need them"),
    Phase("decide", "head", ONCE, ("logits", "tree"), ("decision",),
          lambda s, w: Cost(0, 0, 2 * w.head_rows * s.vocab, 4 * w.head_rows * s.vocab),
          "each slot's walk: the target's token at a node, greedy or sampled, then its child"),
    Phase("compact", "head", ONCE, ("decision", "kv"), ("kv",), _nothing,
          "keys and values of the accepted path to their final places"),
)  # fmt: skip


def phase_number(name: str) -> int:
    """Place of a phase in `PHASES`; KeyError when there is none of that name."""
    return {phase.name: number for number, phase in enumerate(PHASES)}[name]


def program(layers: int, draft_layers: int = 0, taps: Sequence[int] = ()) -> np.ndarray:
    """The phases of one step in order, `[operations, 2]` int32: phase number, layer.

    Neighbouring phases of one segment that repeat `LAYER` form the body of that segment's layers.
    A `TAP` phase belongs to the body but runs only behind the layers in `taps`; its number is the
    tap's index. Without a drafter its segment and the taps are left out.
    """
    chosen = [
        (number, phase)
        for number, phase in enumerate(PHASES)
        if draft_layers or (phase.segment != "draft" and phase.repeat != TAP)
    ]
    operations: list[tuple[int, int]] = []
    for (segment, is_once), run in groupby(
        chosen, key=lambda pair: (pair[1].segment, pair[1].repeat == ONCE)
    ):
        body = list(run)
        if is_once:
            operations += [(number, 0) for number, _ in body]
            continue
        for layer in range(draft_layers if segment == "draft" else layers):
            for number, phase in body:
                if phase.repeat == LAYER:
                    operations.append((number, layer))
                else:
                    operations += [(number, t) for t, tap in enumerate(taps) if tap == layer]
    return np.array(operations, np.int32)
