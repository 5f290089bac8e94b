"""Step kernels against torch: every phase, bit-equal on repetition and under row permutation."""

import pytest

from tests.gpu.kernels import STEPS


@pytest.mark.parametrize("name", STEPS)
def test_step_matches_torch(load, name):
    kernel = load(name)
    from experiments.handoffs.skeleton import Skeleton, Weights

    c = STEPS[name]
    report = Skeleton(kernel, c, Weights(c.shape, seed=11)).check()
    errors = report[f"relative L2, {1} layers"]
    # one layer: fp32 sums of bf16 products, bf16 stores; a wrong word would be orders larger
    assert max(errors.values()) < 2e-3, errors
    assert max(report[f"relative L2, {c.shape.layers} layers"].values()) < 2e-2
    assert report["repeat equal"]
    assert report["permuted rows equal"]
    assert report["row 0 alone equal"]
