"""The drafter's attention against torch: windows, masks, page edges, and what it leaves alone.
Kernels: python -m tests.gpu.attention_kernels DIR."""

import functools

import pytest

from tests.gpu.attention_kernels import DRAFT
from tests.gpu.test_attention import check_output

MASKS = [(window, causal) for window in (0, 5, 64, 1024) for causal in (0, 1)]


@pytest.fixture(scope="session")
def make(load):
    """make(name, n, rows, seed) -> DraftCase whose layers have all the masks."""
    read = functools.cache(load)

    def of(name, n, rows, seed=1, context=0):
        from tests.gpu.draft_attention_case import DraftCase

        return DraftCase(read(name), DRAFT[name], n, rows, MASKS, seed, context)

    return of


@pytest.mark.parametrize("name", DRAFT)
@pytest.mark.parametrize("n", [1, 4, 63, 64, 65, 127, 1000, 1024, 1025, 5000])
@pytest.mark.parametrize("rows", [1, 4, 8, 16])
def test_blocks_match_torch(make, name, n, rows):
    import torch

    case = make(name, n, rows, seed=n + rows, context=rows)
    pool = case.pool.clone()
    check_output(case, case.run())
    assert torch.equal(case.pool.view(torch.int16), pool.view(torch.int16)), "pages"


@pytest.mark.parametrize("name", DRAFT)
def test_long_context_matches_torch(make, name):
    for context in (0, 64000):
        case = make(name, 64900, 16, seed=3, context=context)
        check_output(case, case.run())


@pytest.mark.parametrize("name", DRAFT)
def test_repeats_are_bit_equal(make, name):
    import torch

    case = make(name, 2000, 11)
    first = case.run()[:, :11]
    for _ in range(20):
        assert torch.equal(case.run()[:, :11], first)
