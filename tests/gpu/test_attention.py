"""Tree attention in the step kernel: against torch, over page edges, and bit-equal where canonical
order says so. Pages hold NaN wherever nobody may read."""

import pytest

from tests.gpu.kernels import ATTENTION

EDGES = [0, 1, 60, 61, 62, 63, 64, 65, 1008, 1024, 1039]


def setup(load, name, committed, parents, seed=3):
    kernel = load(name)
    from experiments.handoffs.context import Context
    from experiments.handoffs.skeleton import Skeleton, Weights

    c = ATTENTION[name]
    weights = Weights(c.shape, seed=seed)
    context = Context.random(c.shape, committed, parents, seed=seed + 1)
    return Skeleton(kernel, c, weights, context), context


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("committed", EDGES)
def test_matches_torch(load, name, committed):
    load(name)
    from experiments.handoffs.context import random_tree
    from experiments.handoffs.skeleton import reference

    sk, context = setup(load, name, committed, random_tree(16, seed=committed))
    x = sk.weights.x[:16]
    sk.launch(x, 1, 1)
    got, want = sk.outputs()["qkv"], reference(sk.weights, 1, 16, context)["qkv"]
    error = float((got - want).norm() / want.norm())
    # probabilities of whole blocks are rounded to bf16 before they meet V: 2^-9 each
    assert error < 3e-3, error


@pytest.mark.parametrize("name", ATTENTION)
def test_rows_do_not_meet(load, name):
    load(name)
    from experiments.handoffs.context import random_tree

    sk, _ = setup(load, name, 1000, random_tree(16, seed=1))
    report = sk.check()
    assert report["repeat equal"] and report["permuted rows equal"]
    assert report["row 0 alone equal"]


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("committed", [0, 40, 60, 63, 64, 1000, 1020])
@pytest.mark.parametrize("kept", [1, 5, 15])
def test_speculated_equals_decoded(load, name, committed, kept):
    """A chain of 16 rows, then its first `kept` rows committed and the rest run again: position by
    position the same bits, whichever side of the committed length a key stood on."""
    load(name)
    import torch

    from cute_kernels.gpu import pack
    from experiments.handoffs.context import Context
    from experiments.handoffs.skeleton import Skeleton

    chain = list(range(-1, 15))
    sk, context = setup(load, name, committed, chain)
    c, s, x = sk.c, sk.c.shape, sk.weights.x[:16]
    sk.launch(x, 1, 1)
    first = sk.outputs()
    at = sk.buffers.kv // 2 + sk.last * (sk.buffers.bytes // 2)
    new = sk.act[at : at + s.kv_heads * 2 * 16 * 64].reshape(s.kv_heads, 2, 16, 64)
    new = pack.swizzle_rows(new)
    keys = torch.empty_like(new[:, 0])
    keys[..., torch.from_numpy(pack.key_order()).cuda()] = new[:, 0]
    more = [
        torch.cat([old, fresh[None, :, :kept]], 2)
        for old, fresh in ((context.keys, keys), (context.values, new[:, 1]))
    ]
    later = Skeleton(sk.kernel, c, sk.weights, Context(s, chain, *more, seed=9))
    later.packs = sk.packs
    later.launch(torch.cat([x[kept:], torch.zeros_like(x[:kept])]), 1, 1)
    again = later.outputs()
    for phase in ("qkv", "o", "lm"):
        assert torch.equal(first[phase][kept:], again[phase][: 16 - kept]), phase
