"""How much to speculate when the budget is `auto`: measured step times against promised tokens.

Committed tokens per second is what counts. A node that is accepted with probability q is worth q
tokens, and costs what its row adds to the step. With `rate` tokens per nanosecond coming out at
present, a budget of B nodes is worth

    gain * (sum of the B best q) - rate * (t(rows with B nodes) - t(rows without))

and the best B of a ladder is taken; the tree's nodes come best first, so a smaller budget is the
tree's beginning. `gain` corrects the drafter's probabilities by what was accepted lately. When even
the best B does not pay for the draft itself, the slot decodes plainly for a while, twice as long
each time in a row. Nothing of this shows in the output: a row's numbers do not depend on the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from host.jit import jit

LADDER = np.array([1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63], np.int64)
"""Budgets to choose from."""

LARGEST = 63
_ROWS = np.array([1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256], np.float64)
_LONGEST_REST = 64
_KEEP = 0.9


class Policy(NamedTuple):
    """Running measurements of the loop, float64."""

    step_ns: np.ndarray  # [rows of the ladder] a step without draft and prefill; 0: not measured
    draft_ns: np.ndarray  # [1] the draft part of a step
    rate: np.ndarray  # [1] committed tokens per ns


def make_policy() -> Policy:
    """Nothing measured yet."""
    return Policy(np.zeros(len(_ROWS)), np.zeros(1), np.zeros(1))


@jit
def _bucket(rows):
    i = 0
    while i + 1 < _ROWS.shape[0] and _ROWS[i + 1] <= rows:
        i += 1
    return i


@jit
def step_time(policy, rows):
    """ns of a step of `rows` decode rows: what was measured nearest below, and interpolated up to
    the next measured point. Not measured at all: as long as what is known, so that it is tried."""
    below, above = -1, -1
    for i in range(_ROWS.shape[0]):
        if policy.step_ns[i] > 0:
            if _ROWS[i] <= rows:
                below = i
            elif above < 0:
                above = i
    if below < 0:
        return policy.step_ns[above] if above >= 0 else 0.0
    if above < 0:
        return policy.step_ns[below]
    part = (rows - _ROWS[below]) / (_ROWS[above] - _ROWS[below])
    return policy.step_ns[below] + part * (policy.step_ns[above] - policy.step_ns[below])


@jit
def _smooth(array, i, value):
    array[i] = value if array[i] == 0 else _KEEP * array[i] + (1 - _KEEP) * value


@jit
def note_step(policy, rows, tokens, target_ns, draft_ns, drafted):
    """After a step without prefill: its decode rows, committed tokens and times."""
    _smooth(policy.step_ns, _bucket(rows), target_ns)
    if drafted:
        _smooth(policy.draft_ns, 0, draft_ns)
    _smooth(policy.rate, 0, tokens / (target_ns + draft_ns))


@jit
def suggested(slot):
    """Nodes to draft for a slot at the start of a step; 0 while it rests."""
    if slot.rest > 0:
        slot.rest -= 1
        return 0
    return LARGEST


@jit
def cut_budget(policy, slot, expected, nodes, rows):
    """How many of a tree's `nodes` nodes to verify in a step of `rows` rows without them.

    `expected[B]` is the sum of the probabilities of its first B nodes. Remembers whether drafting
    paid.
    """
    base = step_time(policy, rows)
    best, best_value = 0, 0.0
    for i in range(LADDER.shape[0]):
        budget = min(LADDER[i], nodes)
        cost = policy.rate[0] * (step_time(policy, rows + budget) - base)
        value = slot.gain * expected[budget] - cost
        if value > best_value:
            best, best_value = budget, value
        if budget == nodes:
            break
    if best_value > policy.rate[0] * policy.draft_ns[0]:
        slot.idle_rounds = 0
    else:
        slot.rest = min(1 << slot.idle_rounds, _LONGEST_REST)
        slot.idle_rounds += 1 if slot.rest < _LONGEST_REST else 0
    return best


@jit
def note_acceptance(slot, accepted, promised):
    """After a walk: nodes accepted against the sum of their probabilities."""
    if promised > 0.05:
        ratio = min(accepted / promised, 4.0)
        slot.gain = np.float32(_KEEP * slot.gain + (1 - _KEEP) * ratio)
        slot.gain = max(slot.gain, np.float32(0.05))
