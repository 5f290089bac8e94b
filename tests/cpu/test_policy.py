"""The automatic budget against the best fixed one, on a simulated machine with a simulated drafter.

Trees, promises and walks are the engine's; only time is made up. The drafter's probabilities are
true unless a test says otherwise, so that what a tree promises is what it brings on average.
"""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.cpu.policy import (
    LADDER,
    cut_budget,
    make_policy,
    note_acceptance,
    note_step,
    open_slot,
    suggested,
)
from cute_kernels.cpu.slots import SLOT
from cute_kernels.cpu.tree import build_tree, make_frontier, make_tree

DRAFTED, MOST, VOCAB = 7, 63, 24
STEPS = 1500


def small_machine(rows):
    """ms of a step on two cores: up to 8 rows wait for the weights, then arithmetic counts."""
    return np.interp(rows, [1, 2, 4, 8, 12, 16, 32, 64, 256], [11.4, 13.6, 14.5, 15.3, 21, 27, 52,
                     89, 344])  # fmt: skip


def big_machine(rows):
    """One on which even 64 rows cost hardly more than one."""
    return 2.0 + 0.004 * rows


class Drafter:
    """Made-up steps: trees of 63 nodes with their promises, and how many nodes each budget gets
    accepted. `skill` is the mean sharpness, `trust` scales what it says beyond what it knows."""

    def __init__(self, skill, trust=1.0, seed=0):
        rng = np.random.default_rng(seed)
        tree, frontier = make_tree(MOST), make_frontier(MOST)
        ids = np.tile(np.arange(VOCAB, dtype=np.int32), (DRAFTED, 1))
        widths = np.full(DRAFTED, VOCAB, np.int32)
        self.promised = np.zeros((STEPS, MOST + 1))
        self.reached = np.zeros((STEPS, MOST + 1), int)
        for step in range(STEPS):
            sharp = skill * rng.gamma(2.0, 0.5) * 0.85 ** np.arange(DRAFTED)
            logits = -np.sort(-rng.standard_normal((DRAFTED, VOCAB)) * sharp[:, None], axis=1)
            true = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
            said = np.exp(trust * logits)
            logprobs = np.log(said / said.sum(1, keepdims=True)).astype(np.float32)
            logprobs = -np.sort(-logprobs, axis=1)
            build_tree(0, ids, logprobs, widths, DRAFTED, MOST, False, tree, frontier)
            truth = [rng.choice(VOCAB, p=p) for p in -np.sort(-true, axis=1)]
            self.promised[step] = tree.expected
            row, depth = 0, 0
            for token in truth:
                children = np.flatnonzero((tree.parent == row) & (tree.token == token))
                children = children[children > 0]
                if not len(children):
                    break
                row, depth = int(children[0]), depth + 1
                self.reached[step, row:] = depth

    def fixed(self, machine, draft_ms, budget):
        """Tokens per ms of a fixed budget."""
        tokens = (1 + self.reached[:, budget]).sum()
        return tokens / STEPS / (machine(1 + budget) + (draft_ms if budget else 0))


def play(drafter, machine, draft_ms, noise=0.05, seed=1, slow_from=STEPS, slots=1, length=STEPS):
    """Tokens per ms of the automatic budget over the later two thirds, its share of steps with
    nodes, and its budgets. Requests take `length` steps each; from step `slow_from` on the machine
    takes twice the time. All slots see the same drafts."""
    rng = np.random.default_rng(seed)
    policy, all_slots = make_policy(), np.zeros(slots, SLOT)
    tokens = ms = 0.0
    budgets = []
    for step in range(STEPS):
        if step % length == 0:
            for slot in all_slots:
                open_slot(slot)
        drafting = [s for s in all_slots if suggested(s) > 0]
        nodes = [
            cut_budget(policy, s, drafter.promised[step], MOST, slots, len(drafting))
            for s in drafting
        ]
        rows = slots + sum(nodes)
        came = slots
        for slot, n in zip(drafting, nodes):
            came += drafter.reached[step, n]
            if n:
                note_acceptance(slot, drafter.reached[step, n], drafter.promised[step, n])
        factor = np.exp(noise * rng.standard_normal()) * (1 + (step >= slow_from))
        if rng.random() < 0.01:
            factor *= 5  # something else had the cores
        target, draft = machine(rows) * factor, (draft_ms * factor if drafting else 0.0)
        note_step(policy, rows, came, int(target * 1e6), int(draft * 1e6), len(drafting) > 0)
        budgets.append(sum(nodes) / slots)
        if step >= STEPS // 3:
            tokens, ms = tokens + came, ms + (target + draft) / factor * (1 + (step >= slow_from))
    return tokens / ms, np.mean(np.array(budgets) > 0), budgets


@pytest.mark.parametrize("machine", [small_machine, big_machine])
@pytest.mark.parametrize(("skill", "trust"), [(4.0, 1.0), (2.5, 1.0), (4.0, 1.6), (4.0, 0.6)])
def test_auto_is_as_good_as_the_best_fixed_budget(machine, skill, trust):
    drafter = Drafter(skill, trust)
    draft_ms = 0.4 * machine(1)
    best = max(drafter.fixed(machine, draft_ms, b) for b in (0, *LADDER))
    rate, share, _ = play(drafter, machine, draft_ms, length=60)
    assert rate > 0.95 * best, (rate, best)
    if best > 1.2 / machine(1):
        assert share > 0.9


@pytest.mark.parametrize("machine", [small_machine, big_machine])
def test_a_bad_drafter_costs_little(machine):
    """One that is nearly always wrong, whether or not it says so."""
    for skill, trust, length in ((0.3, 1.0, 60), (0.3, 12.0, 60), (0.3, 40.0, STEPS)):
        drafter = Drafter(skill, trust)
        rate, share, _ = play(drafter, machine, 0.4 * machine(1), length=length)
        assert rate > 0.93 / machine(1), (skill, trust, rate * machine(1), share)


def test_a_slower_machine_does_not_unsettle_it():
    drafter = Drafter(4.0)
    rate, share, budgets = play(drafter, small_machine, 4.5)
    slow, slow_share, slowed = play(drafter, small_machine, 4.5, slow_from=STEPS // 2)
    assert share > 0.95 and slow_share > 0.95
    assert abs(np.median(budgets) - np.median(slowed)) <= 4
    assert slow > 0.97 * rate * (1 / (1 / 4 + 2 * 3 / 4))


def test_many_slots_share_the_machine():
    """Eight slots fill the row tiles by themselves: each gets fewer nodes than one alone."""
    drafter = Drafter(4.0)
    _, _, alone = play(drafter, small_machine, 4.5)
    rate, _, crowd = play(drafter, small_machine, 9.0, slots=8)
    assert np.mean(crowd) < np.mean(alone)
    plain = 8 / small_machine(8)
    assert rate > 0.95 * plain


def test_a_first_step_is_no_adventure():
    """Before anything was measured, the guess keeps a first tree at what two cores can carry."""
    drafter, policy, slot = Drafter(4.0), make_policy(), np.zeros(1, SLOT)[0]
    open_slot(slot)
    assert suggested(slot) > 0
    assert cut_budget(policy, slot, drafter.promised[0], MOST, 1, 1) <= 15
