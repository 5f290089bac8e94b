"""From the drafter's logits to trees: rank each drafted position, grow and cut each tree."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cute_kernels.cpu.policy import cut_budget
from cute_kernels.cpu.slots import AUTO
from cute_kernels.cpu.state import MAX_DEPTH
from cute_kernels.cpu.topk import logsumexp, top_k_sorted
from cute_kernels.cpu.tree import build_tree, frontier_of, tree_of
from host.atomics import fetch_add
from host.jit import jit

_AUTO = int(AUTO)


class Ranked(NamedTuple):
    """The drafter's candidates of the current step, sorted by (logit descending, id ascending)."""

    ids: np.ndarray  # [S, MAX_DEPTH, K] int32
    logprobs: np.ndarray  # [S, MAX_DEPTH, K] float32: logit - logsumexp over the vocabulary
    widths: np.ndarray  # [S, MAX_DEPTH] int32; 0 where the logits held NaN


class Script(NamedTuple):
    """Candidates by absolute position that take the drafter's place, for measuring and for tests.

    What comes of them says nothing about a drafter; figures made with a script say so.
    """

    ids: np.ndarray  # [positions, K] int32
    logprobs: np.ndarray  # [positions, K] float32, descending
    widths: np.ndarray  # [positions] int32; of length 0: no script


def make_script(ids: np.ndarray, logprobs: np.ndarray, widths: np.ndarray) -> Script:
    """A script from `[positions, K]` candidates and `[positions]` widths."""
    return Script(
        np.ascontiguousarray(ids, np.int32),
        np.ascontiguousarray(logprobs, np.float32),
        np.ascontiguousarray(widths, np.int32),
    )


NO_SCRIPT = make_script(np.zeros((0, 1)), np.zeros((0, 1)), np.zeros(0))


@jit
def _follow_script(script, ranked, s, at, position, k):
    width = script.widths[position] if position < script.widths.shape[0] else 0
    width = min(np.int64(width), k)
    for i in range(width):
        ranked.ids[s, at, i] = script.ids[position, i]
        ranked.logprobs[s, at, i] = script.logprobs[position, i]
    ranked.widths[s, at] = width


def make_ranked(slots: int, candidates: int) -> Ranked:
    """Room for `candidates` per position."""
    shape = (slots, MAX_DEPTH, max(candidates, 1))
    return Ranked(
        np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.zeros(shape[:2], np.int32)
    )


@jit
def draft_rank(
    dims, sched, draft, acts, tokens, ranked, script, first_drafted, space, worker, workers,
    counters, op,
):  # fmt: skip
    """One item per drafted position: its likeliest tokens. Row `first_drafted` of a block predicts
    the token behind the anchor (1: rows predict their own position; 0: the one behind it).
    `tokens`: see `Draft`."""
    item = worker
    while item < draft.count[1]:
        row = draft.head_row[item]
        s = draft.slot[row]
        at = draft.position[row] - sched.slot[s].kv_tokens - first_drafted
        logits = acts.logits[item]
        k = min(np.int64(sched.slot[s].budget), ranked.ids.shape[2])
        if script.widths.shape[0] > 0:
            _follow_script(script, ranked, s, at, sched.slot[s].kv_tokens + 1 + at, k)
            item = workers + fetch_add(counters, op * 8, 1)
            continue
        width = top_k_sorted(
            logits, dims.vocab, k, ranked.ids[s, at], ranked.logprobs[s, at], space, worker
        )
        ranked.widths[s, at] = width
        if width > 0:
            total = np.float32(logsumexp(logits, dims.vocab))
            for i in range(width):
                ranked.logprobs[s, at, i] -= total
                if tokens.size > 0:
                    ranked.ids[s, at, i] = tokens[ranked.ids[s, at, i]]
        item = workers + fetch_add(counters, op * 8, 1)


@jit
def grow_trees(sched, trees, frontiers, ranked, limits, policy, worker, workers, counters, op):
    """One item per slot: its tree, and with an automatic budget how much of it pays."""
    rows, drafting = 0, 0
    for s in range(sched.slot.shape[0]):
        rows += sched.slot[s].first_row >= 0
        drafting += sched.slot[s].drafts
    s = worker
    while s < sched.slot.shape[0]:
        slot = sched.slot[s]
        if slot.drafts:
            tree = tree_of(trees, s)
            nodes, _ = build_tree(
                sched.tokens[s, slot.kv_tokens], ranked.ids[s], ranked.logprobs[s],
                ranked.widths[s], slot.depth, slot.budget, limits.chain == 1, tree,
                frontier_of(frontiers, worker),
            )  # fmt: skip
            if limits.budget == _AUTO:
                nodes = cut_budget(policy, slot, tree.expected, nodes, rows, drafting)
                tree.rows[0] = nodes + 1
            slot.nodes = nodes
        s = workers + fetch_add(counters, op * 8, 1)
