"""Lockstep writing is plain decoding, whatever the neighbours and the prompts' lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_drafter import TARGET, target

from megadecode.reference import Reference
from megadecode.training.lockstep import STRETCH, Lockstep, gumbel_choose
from megadecode.training.target import TorchTarget

STOP = 7


def test_greedy_rows_are_the_oracles_greedy() -> None:
    oracle = Reference(TARGET, target().tensors())
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, TARGET.vocab, size).tolist() for size in (3, 9, STRETCH - 4, 1)]
    lockstep = Lockstep(TorchTarget(target()), 5, STRETCH + 40, STOP)
    written = lockstep.write(prompts, 24, [0.0] * 4)
    for prompt, tokens in zip(prompts, written, strict=True):
        assert tokens == oracle.greedy(prompt, 24, (STOP,))[0]
    again = lockstep.write(prompts[:2], 24, [0.0, 1.0])  # over what the last batch left
    assert again[0] == written[0]


def test_samples_follow_the_models_distribution_without_its_tail() -> None:
    torch.manual_seed(1)
    logits = torch.tensor([[2.0, 1.0, 0.0, -9.0]]).expand(40_000, 4)
    temperature = torch.full((40_000, 1), 2.0)
    temperature[::2] = 0
    chosen = gumbel_choose(logits, temperature, torch.tensor([3]))
    assert (chosen[::2] == 0).all()
    counts = torch.bincount(chosen[1::2], minlength=4) / 20_000
    want = torch.tensor([1.0, 0.5, 0.0]).exp()
    torch.testing.assert_close(counts[:3], want / want.sum(), atol=0.015, rtol=0)
    assert counts[3] == 0


def test_what_does_not_fit_is_refused() -> None:
    lockstep = Lockstep(TorchTarget(target()), 2, STRETCH, STOP)
    for prompts, new in (([[1]] * 3, 4), ([[1] * 100], 29), ([[]], 4)):
        with pytest.raises(ValueError, match=r"do not fit 2 rows of 128"):
            lockstep.write(prompts, new, [0.0] * len(prompts))
