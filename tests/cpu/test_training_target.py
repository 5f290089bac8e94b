"""The batched target computes what the oracle computes, cached or not, tapped where it says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_drafter import TARGET

from megadecode.models.random_model import random_model
from megadecode.reference import Reference
from megadecode.rope import Yarn
from megadecode.training.target import TorchTarget

TAPS = (0, 2, 3)


SHAPES = {
    "plain": TARGET,
    "biases, norms and scaling": replace(
        TARGET, qkv_bias=True, qk_norm=True, rope_scaling=Yarn(4.0, 8)
    ),
}


@pytest.fixture(scope="module", params=SHAPES)
def both(request) -> tuple[TorchTarget, Reference]:
    model = random_model(SHAPES[request.param], seed=5)
    return TorchTarget(model), Reference(model.config, model.tensors())


def tokens(sequences: int, rows: int) -> torch.Tensor:
    rng = np.random.default_rng(3)
    return torch.from_numpy(rng.integers(0, TARGET.vocab, (sequences, rows)))


def test_features_and_logits_are_the_oracles(both) -> None:
    """A tap one layer off, or a mask one key off, is far outside these tolerances."""
    ours, oracle = both
    batch = tokens(3, 21)
    hidden, features = ours.forward(batch, TAPS)
    for row, hidden_row, features_row in zip(batch, hidden, features):
        want, want_features = oracle.forward(row, taps=TAPS)
        torch.testing.assert_close(ours.logits(hidden_row), want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(features_row, want_features, rtol=1e-4, atol=1e-4)


def test_a_cache_filled_in_pieces_changes_nothing(both) -> None:
    ours, _ = both
    batch = tokens(2, 20)
    want, want_features = ours.forward(batch, TAPS)
    cache = ours.cache(2, 24)
    parts = [ours.forward(batch[:, a:b], TAPS, cache=cache) for a, b in ((0, 9), (9, 10), (10, 20))]
    torch.testing.assert_close(torch.cat([hidden for hidden, _ in parts], 1), want)
    torch.testing.assert_close(torch.cat([found for _, found in parts], 1), want_features)
    cache.rows = 9  # what stands behind is forgotten
    again, _ = ours.forward(batch[:, 9:12], cache=cache)
    torch.testing.assert_close(again, want[:, 9:12])
    with pytest.raises(ValueError, match="13 rows behind 12 do not fit a cache of 24 positions"):
        ours.forward(tokens(2, 13), cache=cache)


def test_siblings_share_a_position_and_do_not_see_each_other(both) -> None:
    """Rows behind a cache with positions and a mask: two alternatives for one place."""
    ours, _ = both
    batch = tokens(2, 12)
    cache = ours.cache(2, 16)
    ours.forward(batch[:, :10], cache=cache)
    mask = torch.ones(1, 2, 12, dtype=torch.bool)
    mask[0, 0, 11] = mask[0, 1, 10] = False
    hidden, _ = ours.forward(
        batch[:, 10:], cache=cache, positions=torch.tensor([10, 10]), mask=mask
    )
    for sibling in range(2):
        alone = torch.cat([batch[:, :10], batch[:, 10 + sibling, None]], 1)
        torch.testing.assert_close(hidden[:, sibling], ours.forward(alone)[0][:, -1])
