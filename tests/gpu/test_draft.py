"""DRAFT steps against the drafter's torch module: features, context, block, guesses of what comes
next. Kernels: python -m tests.gpu.kernels DIR."""

import pytest

from tests.gpu.kernels import drafting


@pytest.fixture(scope="module", params=drafting())
def built(request, load):
    kernel, c = load(request.param), drafting()[request.param]
    from tests.gpu.check_draft import drafters
    from tests.gpu.model import Model

    return kernel, c, Model(c.shape, seed=11), drafters(request.param, c)


@pytest.mark.parametrize("n", [5, 64, 200, 1100])
def test_draft_step(built, n):
    from tests.gpu.check_draft import check, wrong

    kernel, c, model, drafters = built
    for name, drafter in drafters.items():
        r = check(kernel, c, model, drafter, n)
        assert not wrong(r), (name, wrong(r), r)
