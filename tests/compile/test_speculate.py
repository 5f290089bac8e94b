"""Ranks, tree and compaction build on a machine without a GPU, without spills."""

import re

import pytest

from cute_kernels.gpu import build, rank_plan
from cute_kernels.gpu.config import SHAPES, product

ALL = [("smollm2-135m", "sm_90a"), ("llama-3.1-8b", "sm_90a"), ("smollm2-135m", "sm_120a")]


@pytest.mark.parametrize("part", ["compact", "rank", "tree"])
@pytest.mark.parametrize(("model", "arch"), ALL)
def test_builds_without_spills(model, arch, part):
    from cute_kernels.gpu.speculate_kernel import make_speculate

    launcher, args, _ = make_speculate(product(model, arch), part)
    ptx, cubin, _ = build.compile_kernel(launcher, args, arch)
    used = build.resources(cubin)
    assert used["local"] == 0 and used["stack"] == 0, "registers spill"
    # what other SMs write is never read through the first-level cache
    for load in re.findall(r"ld\.[a-z0-9_.:]*global[^;]*;", ptx):
        assert re.match(r"ld\.(relaxed|acquire|global\.nc)", load), load
    if part == "compact":  # the step's rows move by generic stores, then the proxy fence
        last = max(m.start() for m in re.finditer(r"st\.global\.v4\.b32", ptx))
        assert last < ptx.index("fence.proxy.async.global")
    else:
        releases = re.findall(r"st\.release\.gpu", ptx)
        assert len(releases) == 1


@pytest.mark.parametrize(
    ("model", "arch"), [*((model, "sm_90a") for model in SHAPES), ("smollm2-135m", "sm_120a")]
)
def test_shared_memory_suffices(model, arch):
    c = product(model, arch)
    assert c.smem_plan()["attention"] >= rank_plan.SMEM_BYTES
    assert c.smem_plan()["partial sums"] >= rank_plan.hit_bytes(c.warps)
