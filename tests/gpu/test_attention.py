"""Attention against torch: over page edges and shapes, what it writes and what it leaves alone, and
bit-equal where canonical order says so. Kernels: python -m tests.gpu.attention_kernels DIR."""

import functools

import pytest

from tests.gpu.attention_kernels import ATTENTION

EDGES = [0, 1, 60, 61, 62, 63, 64, 65, 1008, 1024, 1039, 4095, 4096, 4097]
ROWS = [1, 2, 5, 16]


@pytest.fixture(scope="session")
def make(load):
    """make(name, committed, parents, seed) -> Case."""
    read = functools.cache(load)

    def of(name, committed, parents, seed=1, **more):
        from tests.gpu.attention_case import Case

        return Case(read(name), ATTENTION[name], committed, parents, seed, **more)

    return of


def tree(rows, seed):
    from tests.gpu.attention_case import random_tree

    return random_tree(rows, seed)


def chain(rows):
    return list(range(-1, rows - 1))


def check_output(case, got):
    """Rows against torch, and nothing where there is no row."""
    import torch

    n = len(case.parents)
    for layer in range(case.layers):
        want, bf16 = case.reference(layer), case.reference(layer, torch.bfloat16)
        error = float((got[layer, :n].float() - want).norm() / want.norm())
        plain = float((bf16 - want).norm() / want.norm())
        # sums are rounded to bf16 once per split and once at the end, 2^-9 each at most
        assert error < min(2 * plain, 4e-3) + 1e-4, (layer, error, plain)
    empty = torch.full_like(got[:, n:].view(torch.int16), -1)
    assert torch.equal(got[:, n:].view(torch.int16), empty), "rows that the step does not have"
    assert bool((case.parts_of_absent_rows() == -1).all()), "parts of rows that are not there"


def check(case):
    """Output, pages and buffers of one launch."""
    import torch

    want_pool, n = case.pool_after(), len(case.parents)
    check_output(case, case.run())
    if case.shape.qk_norm:  # the device's reciprocal root is not torch's: a last bit may differ
        got_bits, want_bits = (x.view(torch.int16).int() for x in (case.pool, want_pool))
        differ = (got_bits - want_bits).abs()
        assert int(differ.max()) <= 1
        assert int(differ.sum()) <= 2e-3 * n * case.layers * case.shape.kv_heads * 256
    else:
        assert torch.equal(case.pool.view(torch.int16), want_pool.view(torch.int16)), "pages"


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("committed", EDGES)
def test_trees_match_torch(make, name, committed):
    for rows in ROWS:
        check(make(name, committed, tree(rows, seed=committed + rows), seed=committed))


@pytest.mark.parametrize("name", ATTENTION)
def test_long_context_matches_torch(make, name):
    for rows in (1, 16):
        check(make(name, 65000, chain(rows), seed=3))


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("rows", [1, 7, 16])
def test_repeats_are_bit_equal(make, name, rows):
    import torch

    case = make(name, 2000, tree(rows, seed=rows))
    first, pool = case.run(), case.pool.clone()
    for _ in range(20):
        assert torch.equal(case.run()[:, :rows], first[:, :rows])
    assert torch.equal(case.pool.view(torch.int16), pool.view(torch.int16))


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("committed", [0, 40, 60, 63, 64, 1000, 1020, 4090])
@pytest.mark.parametrize("kept", [1, 5, 15])
def test_speculated_equals_decoded(make, name, committed, kept):
    """A chain of 16 rows, then the rest of it over the pages that its first `kept` rows went to:
    position by position the same bits, whichever side of the committed length a key stood on."""
    import torch

    case = make(name, committed, chain(16))
    first = case.run()
    case.raw = case.raw[:, kept:]
    case.begin(committed + kept, chain(16 - kept))
    assert torch.equal(first[:, kept:], case.run()[:, : 16 - kept])


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("committed", [0, 50, 1010])
def test_a_node_equals_the_chain_of_its_path(make, name, committed):
    import torch

    parents = tree(16, seed=committed)
    case = make(name, committed, parents)
    whole, raw = case.run(), case.raw
    for row in range(16):
        path = [row]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        case.raw = raw[:, path]
        case.begin(committed, chain(len(path)))
        assert torch.equal(case.run()[:, len(path) - 1], whole[:, row]), (row, path)


@pytest.mark.parametrize("name", ATTENTION)
def test_order_of_rows_does_not_matter(make, name):
    """Siblings change places; a row's bits do not."""
    import torch

    case = make(name, 777, [-1, *[0] * 15])
    first, raw = case.run(), case.raw
    order = [0, *torch.randperm(15).add(1).tolist()]
    case.raw = raw[:, order]
    assert torch.equal(case.run(), first[:, order])
