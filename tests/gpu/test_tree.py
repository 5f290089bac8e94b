"""Ranks, trees and compaction against the CPU device, exactly. Kernels:

python -m tests.gpu.speculate_kernels DIR
"""

import functools

import numpy as np
import pytest

from cute_kernels.gpu.config import product
from cute_kernels.gpu.rank_plan import pack_script
from tests.gpu.speculate_kernels import MODELS, PARTS

FAST = ("smollm2-135m", "odd-960", "llama-3.1-8b")  # 6, 10 and 8 consumer warps


@pytest.fixture(scope="session")
def rig_of(load):
    """rig_of(model) -> Rig."""
    pytest.importorskip("numba")

    @functools.cache
    def of(model):
        from tests.gpu.speculate_rig import Rig

        return Rig({part: load(f"{part}-{model}") for part in PARTS}, product(model))

    return of


@pytest.mark.parametrize("model", MODELS)
def test_trees_of_given_ranks(rig_of, model):
    from tests.gpu.speculate_case import ranked_steps

    for step in ranked_steps(500 if model == FAST[0] else 60, seed=1):
        rig_of(model).run("tree", step)
        step.check_tree()


@pytest.mark.parametrize("model", MODELS)
def test_ranks_and_trees_of_logits(rig_of, model):
    """Ids and their order exactly, log-probabilities but for logsumexp's rounding; and the tree is
    the CPU's of the ranks that the device wrote."""
    from tests.gpu.speculate_case import drafts

    rig = rig_of(model)
    widest = min(rig.c.shape.vocab, 20000)
    for step in drafts(500 if model == FAST[0] else 60, widest, seed=2):
        rig.run("both", step)
        step.check_ranks()
        step.check_tree()


@pytest.mark.parametrize("model", FAST)
def test_whole_rows(rig_of, model):
    """As many columns as the head has, of every kind, most candidates."""
    from tests.gpu.speculate_case import SPECIAL, Step, draft_row

    rng, rig = np.random.default_rng(3), rig_of(model)
    rows = [draft_row(rng, rig.c.shape.vocab, kind) for kind in ("plain", *SPECIAL)]
    for budget in (1, 16, 64, 127):
        step = Step(np.stack(rows), budget=budget, first_drafted=0)
        rig.run("both", step)
        step.check_ranks()
        step.check_tree()


def test_repeats_are_bit_equal(rig_of):
    from tests.gpu.speculate_case import drafts

    rig = rig_of(FAST[0])
    for step in drafts(10, 49152, seed=4):
        rig.run("both", step)
        first = {n: step.arrays[n].copy() for n in ("RANKED", "ROW_TABLE")}
        for _ in range(5):
            rig.run("both", step)
            assert all(np.array_equal(step.arrays[n], first[n]) for n in first)


def test_script_takes_the_place_of_logits(rig_of):
    """By absolute position; positions that the script does not have are without candidates."""
    from tests.gpu.speculate_case import Step

    rng, rig = np.random.default_rng(5), rig_of(FAST[0])
    ids = rng.integers(0, 40000, (40, 20)).astype(np.int32)
    logprobs = -np.sort(rng.exponential(2, (40, 20)).astype(np.float32), axis=1)
    widths = rng.integers(0, 21, 40)
    for position in (0, 3, 20, 30, 36, 39, 40, 1000):
        for budget in (1, 7, 64):
            step = Step(
                np.zeros((9, 100), np.float32), budget=budget, position=position,
                script=pack_script(ids, logprobs, widths),
            )  # fmt: skip
            rig.run("both", step)
            step.check_tree()
            for place in range(8):
                at = position + 1 + place
                n = min(widths[at], budget) if at < 40 else 0
                words = step.arrays["RANKED"][place].view(np.int32)
                assert words[0] == n
                assert np.array_equal(words[4 : 4 + n], ids[at, :n] if n else [])


@pytest.mark.parametrize("model", FAST)
@pytest.mark.parametrize("base", [0, 1, 50, 62, 63, 64, 100])
def test_compaction_equals_a_gather(rig_of, model, base):
    """Bit by bit, wherever the page ends lie; rows that are not moved to keep their bits, and so do
    layers that do not run. Short paths all, long ones at random."""
    import torch

    from tests.gpu.speculate_rig import Pool, random_paths, short_paths

    rig = rig_of(model)
    layers = min(rig.c.shape.layers, 3)
    pool = Pool(rig.c, base + 140, seed=base, layers=layers)
    every = 1 if (model, base) == (FAST[0], 50) else 29
    paths = short_paths(16, 4)[::every] + random_paths(300 // every + 1, 128, seed=base)
    want = pool.rows()
    for path in paths:
        pool.move(rig, base + len(path), path)
        to, source = torch.arange(len(path)) + base, torch.tensor(path) + base
        want[:layers, :, :, to] = want[:layers, :, :, source].clone()
        assert torch.equal(pool.rows(), want), path


def test_a_chain_moves_nothing(rig_of):
    import torch

    from tests.gpu.speculate_rig import Pool

    rig = rig_of(FAST[0])
    pool = Pool(rig.c, 200, seed=1, layers=2)
    before = pool.bits.clone()
    for n in range(17):
        pool.move(rig, 90 + n, range(n))
    assert torch.equal(pool.bits, before)
