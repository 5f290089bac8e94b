"""How much to speculate when the budget is `auto`: measured step times against promised tokens.

Committed tokens per second is what counts. With `rate` tokens per nanosecond coming out at present,
a tree of B nodes in a step of R other rows is worth

    gain * (sum of the B best q) - rate * (t(R + B) - t(R))

tokens, where q is the drafter's probability that a node is accepted; the best B of a ladder is
taken. The tree's nodes come best first, so a smaller budget is the tree's beginning. (This is
Dinkelbach's way to maximise a ratio of sums: its fixed point is the best rate.) `gain` corrects the
drafter's probabilities by what was accepted lately. Where what was accepted has not been worth the
draft and the rows, averaged over the slot's last steps, the slot decodes plainly for a while; that
is judged by what came and not by what was promised, so a drafter cannot talk its way in.

Step times are known as a level, which follows the machine from step to step, times a shape over the
number of rows, which starts from a guess and is measured. Neighbours of the chosen budget that have
not been measured lately are tried, a few steps each. Nothing of this shows in the output: a row's
numbers do not depend on the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from host.jit import jit

LADDER = np.array([1, 3, 7, 11, 15, 23, 31, 47, 63], np.int64)
"""Budgets to choose from: with the root, they fill whole numbers of the kernels' row tiles."""

LARGEST = 63
_ROWS = np.array([1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256], np.float64)
_LONGEST_REST, _REMEMBERED_ROUNDS = 64, 3
_PRIOR_TOKENS = 2.0  # as many accepted tokens as promised, before a slot has accepted anything
_MEMORY = 0.93  # of promises and acceptances: some fourteen steps
_PROFIT_MEMORY = 0.95
_RATE_MEMORY = 0.95
_LEVEL_STEP, _SHAPE_STEP, _DRAFT_STEP = 0.2, 0.1, 0.1
_SETTLED = 3  # measurements that a point of the shape needs
_STALE = 512  # steps after which a point is measured again


class Policy(NamedTuple):
    """Running measurements of the loop. Written by the leader between steps, read in them."""

    shape: np.ndarray  # [rows of the ladder] float64: time of a step over the level; see `_guess`
    seen: np.ndarray  # [rows of the ladder] int64: measurements; all but the first few weigh alike
    last: np.ndarray  # [rows of the ladder] int64: the step of the last measurement
    times: np.ndarray  # [3] float64: level in ns; draft in ns; both 0 until measured
    flow: np.ndarray  # [2] float64: tokens and ns of the last steps, decaying
    steps: np.ndarray  # [1] int64: steps measured
    given: np.ndarray  # [most rows + 1] int64: ns of a step by its rows, [0] of a draft, to take in
    # the place of what was measured, so that what `auto` does can be repeated; 0: measured


def make_policy() -> Policy:
    """Nothing measured yet."""
    n = len(_ROWS)
    # Before anything is measured: up to 8 rows wait for the weights, more wait for arithmetic.
    guess = np.where(_ROWS <= 1, 1.0, np.maximum(1.2, 0.95 + _ROWS / 11))
    return Policy(
        guess, np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(2), np.zeros(2),
        np.zeros(1, np.int64), np.zeros(int(_ROWS[-1]) + 1, np.int64),
    )  # fmt: skip


@jit
def _bucket(rows):
    i = 0
    while i + 1 < _ROWS.shape[0] and _ROWS[i + 1] <= rows:
        i += 1
    return i


@jit
def _relative_time(policy, rows):
    """Time of a step of `rows` rows over the level."""
    i = _bucket(rows)
    if i + 1 == _ROWS.shape[0]:
        return policy.shape[i] * rows / _ROWS[i]
    part = (rows - _ROWS[i]) / (_ROWS[i + 1] - _ROWS[i])
    return policy.shape[i] + part * (policy.shape[i + 1] - policy.shape[i])


@jit
def step_time(policy, rows):
    """ns of a step of `rows` decode rows without draft and prefill; before any was measured, in
    units of a step of one row."""
    return max(policy.times[0], 1.0) * _relative_time(policy, rows)


@jit
def _rate(policy, rows):
    """Tokens per ns of late; before any step, what plain decoding is guessed to give."""
    if policy.flow[1] > 0:
        return policy.flow[0] / policy.flow[1]
    return rows / step_time(policy, rows)


@jit
def _toward(old, new, step):
    """`old` moved towards `new`, at most a factor of two at a time; faster down than up, for what
    disturbs a measurement makes it longer, and a cold start is the longest of all."""
    if new < old:
        return old + 0.5 * (max(new, old / 2) - old)
    return old + step * (min(new, 2 * old) - old)


@jit
def note_step(policy, rows, tokens, target_ns, draft_ns, drafted):
    """After a step without prefill: its decode rows, committed tokens and times."""
    policy.steps[0] += 1
    if policy.given[rows] > 0:
        target_ns, draft_ns = policy.given[rows], policy.given[0] * drafted
    level, i = policy.times[0], _bucket(rows)
    time = np.float64(max(target_ns, 1))
    if level == 0:
        policy.times[0] = time / _relative_time(policy, rows)
    elif _ROWS[i] == rows:
        step = max(_SHAPE_STEP, 1.0 / (1 + policy.seen[i]))
        if policy.seen[i] >= _SETTLED:
            policy.times[0] = _toward(level, time / policy.shape[i], _LEVEL_STEP)
        before = policy.shape[i]
        policy.shape[i] = _toward(before, time / level, step)
        for j in range(i + 1, _ROWS.shape[0]):  # what is still a guess keeps its distance
            if policy.seen[j] == 0:
                policy.shape[j] *= policy.shape[i] / before
        policy.seen[i] += 1
        policy.last[i] = policy.steps[0]
    else:
        policy.times[0] = _toward(level, time / _relative_time(policy, rows), _LEVEL_STEP)
    if drafted:
        draft = policy.times[1]
        known = _toward(draft, np.float64(draft_ns), _DRAFT_STEP) if draft else draft_ns
        policy.times[1] = known
    policy.flow[0] = _RATE_MEMORY * policy.flow[0] + tokens
    policy.flow[1] = _RATE_MEMORY * policy.flow[1] + target_ns + draft_ns


@jit
def open_slot(slot):
    """A new request: drafting is tried again. What the slot's last one has learned is kept: it had
    the same drafter."""
    slot.rest = 0
    slot.idle_rounds = min(slot.idle_rounds, _REMEMBERED_ROUNDS)
    slot.profit = max(slot.profit, np.float32(0.0))
    if slot.promised == 0:
        slot.promised = _PRIOR_TOKENS
        slot.accepted = _PRIOR_TOKENS


@jit
def suggested(slot):
    """Nodes to draft for a slot at the start of a step; 0 while it rests."""
    if slot.rest > 0:
        slot.rest -= 1
        return 0
    return LARGEST


@jit
def _is_unknown(policy, rows):
    """Whether a step of so many rows should be tried to learn its time."""
    i = _bucket(rows)
    if _ROWS[i] != rows:
        return False
    return policy.seen[i] < _SETTLED or policy.steps[0] - policy.last[i] > _STALE


@jit
def _to_try(policy, at, nodes, rows, slots):
    """A budget beside `LADDER[at]`, it itself, or none, whose time is not known; -1: all are."""
    for i in range(max(at - 1, 0), at + 2):
        if i < LADDER.shape[0] and LADDER[i] <= nodes:
            if _is_unknown(policy, rows + slots * LADDER[i]):
                return LADDER[i]
    return np.int64(0) if _is_unknown(policy, rows) else np.int64(-1)


@jit
def cut_budget(policy, slot, expected, nodes, rows, slots):
    """How many of a tree's `nodes` nodes to verify, where `slots` slots draft in a step of `rows`
    rows without nodes; the others are taken to choose alike.

    `expected[B]` is the sum of the probabilities of its first B nodes. Remembers what the choice
    costs, to be held against what comes of it.
    """
    base, rate = step_time(policy, rows), _rate(policy, rows)
    gain = slot.accepted / slot.promised
    best, best_value, at = 0, 0.0, -1
    for i in range(LADDER.shape[0]):
        budget = min(LADDER[i], nodes)
        cost = rate * (step_time(policy, rows + slots * budget) - base) / slots
        value = gain * expected[budget] - cost
        if value > best_value:
            best, best_value, at = budget, value, i
        if budget == nodes:
            break
    tried = _to_try(policy, at, nodes, rows, slots)
    budget = tried if tried >= 0 else best
    cost = step_time(policy, rows + slots * budget) - base + policy.times[1]
    slot.cost = np.float32(rate * cost / slots)
    if budget == 0:
        _note_profit(slot, 0)
    if tried >= 0:
        slot.rest = 0
    return budget


@jit
def _note_profit(slot, accepted):
    """After a step that drafted for the slot: what came of it, and whether it rests now."""
    worth = max(accepted - slot.cost, -1.0)
    slot.profit = np.float32(_PROFIT_MEMORY * slot.profit + (1 - _PROFIT_MEMORY) * worth)
    if slot.profit < 0 and worth > 0:  # looks better than it did: no rest now
        slot.idle_rounds = max(slot.idle_rounds - 1, 0)
    elif slot.profit < 0:
        slot.rest = min(1 << slot.idle_rounds, _LONGEST_REST)
        slot.idle_rounds += 1 if slot.rest < _LONGEST_REST else 0
    else:
        slot.idle_rounds = 0


@jit
def note_acceptance(slot, accepted, promised):
    """After a walk: nodes accepted against the sum of their probabilities."""
    _note_profit(slot, accepted)
    slot.promised = np.float32(_MEMORY * slot.promised + promised)
    slot.accepted = np.float32(_MEMORY * slot.accepted + accepted)
    slot.promised = max(slot.promised, np.float32(0.05))
    slot.accepted = max(slot.accepted, np.float32(0.05))
