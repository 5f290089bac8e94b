"""Decisions build on a machine without a GPU, without spills."""

import re

import pytest

from cute_kernels.gpu import build
from cute_kernels.gpu.config import SHAPES, product

ALL = [
    ("smollm2-135m", "sm_90a"),
    ("smollm2-135m", "sm_120a"),
    pytest.param("qwen3-8b", "sm_90a", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "arch"), ALL)
def test_builds_without_spills(model, arch):
    from cute_kernels.gpu.speculate_kernel import make_speculate

    launcher, args, _ = make_speculate(product(model, arch), "decide")
    ptx, cubin, _ = build.compile_kernel(launcher, args, arch)
    used = build.resources(cubin)
    assert used["local"] == 0 and used["stack"] == 0, "registers spill"
    # what other SMs write is never read through the first-level cache
    for load in re.findall(r"ld\.[a-z0-9_.:]*global[^;]*;", ptx):
        assert re.match(r"ld\.(relaxed|global\.nc)", load), load
    # what must be the CPU's to the bit is never fused: one exp per use, two logarithms a score
    assert len(re.findall(r"div\.rn\.f64", ptx)) == 3 + 1
    assert "fma.rn.f64" not in ptx and "mad.rn.f64" not in ptx


@pytest.mark.parametrize("model", SHAPES)
def test_shared_memory_suffices(model):
    pytest.importorskip("cutlass")
    from cute_kernels.gpu.prefix import check

    check(product(model))
