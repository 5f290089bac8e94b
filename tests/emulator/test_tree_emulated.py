"""Ranks and trees: as tests/gpu/test_tree.py, on the emulated kernels."""

import dataclasses
import functools

import numpy as np
import pytest

from tests.emulator.kernel import TINY, EmulatedKernel, pretend
from tests.gpu.speculate_case import SPECIAL, Step, draft_row, drafts, ranked_steps

pytestmark = pytest.mark.slow
VOCAB = 9001


@pytest.fixture
def rig_of(folder, monkeypatch):
    """rig_of(form) -> Rig, of models with more columns than threads."""
    pretend(monkeypatch)

    @functools.cache
    def of(form):
        from tests.gpu.speculate_rig import Rig

        small = TINY[form]
        shape = dataclasses.replace(small.shape, name=f"ranks-{form}", vocab=VOCAB)
        c = dataclasses.replace(small, shape=shape)
        return Rig({p: EmulatedKernel(c, folder, p) for p in ("tree", "both")}, c)

    return of


@pytest.mark.parametrize("form", TINY)
def test_trees_of_given_ranks(rig_of, form):
    for step in ranked_steps(120, seed=1):
        rig_of(form).run("tree", step)
        step.check_tree()


@pytest.mark.parametrize("form", TINY)
def test_ranks_and_trees_of_logits(rig_of, form):
    for step in drafts(60, VOCAB, seed=2):
        rig_of(form).run("both", step)
        step.check_ranks()
        step.check_tree()


@pytest.mark.parametrize("form", TINY)
def test_rows_of_every_kind(rig_of, form):
    rng = np.random.default_rng(3)
    rows = [draft_row(rng, VOCAB, kind) for kind in ("plain", *SPECIAL)]
    for budget in (1, 16, 64, 127):
        step = Step(np.stack(rows), budget=budget, first_drafted=0)
        rig_of(form).run("both", step)
        step.check_ranks()
        step.check_tree()
