"""Attention builds on a machine without a GPU, within the registers of the whole kernel."""

import re

import pytest

from cute_kernels.gpu import build
from tests.gpu.attention_kernels import ATTENTION

# a head of 64 and a head of 128 with norms; the others only differ in numbers
FAST = ("attention-smollm2-135m", "attention-qwen3-8b")
SLOW = [pytest.param(n, marks=pytest.mark.slow) for n in ATTENTION if n not in FAST]


@pytest.mark.parametrize("name", [*FAST, *SLOW])
def test_attention_kernel(name):
    from cute_kernels.gpu.attention_kernel import make_attention

    c = ATTENTION[name]
    launcher, args, geometry = make_attention(c)
    ptx, cubin, _ = build.compile_kernel(launcher, args, c.arch)
    used = build.resources(cubin)
    assert used["local"] == used["stack"] == 0, "registers spill"
    assert geometry["smem"] == c.smem_bytes
    assert "atom.global" not in ptx and "red.global" not in ptx  # arrival orders nothing
    # the step's K and V: generic stores, then the writer's half of the proxy fence
    stores = [m.start() for m in re.finditer(r"st\.global\.v4\.b32", ptx)]
    fences = [m.start() for m in re.finditer(r"fence\.proxy\.async\.global", ptx)]
    assert len(stores) == len(fences) == 1 and stores[0] < fences[0]
    # one elected lane issues each kind of copy
    for m in re.finditer(r"cp\.async\.bulk\.shared", ptx):
        assert "elect.sync" in ptx[max(0, m.start() - 1500) : m.start()]
    # words are the only thing polled, and no load of them may come from the first-level cache
    assert not re.search(r"ld\.(volatile|acquire)", ptx)


@pytest.mark.parametrize("name", ["attention-smollm2-135m", *SLOW])
def test_drafters_attention_kernel(name):
    from cute_kernels.gpu.attention_kernel import make_attention

    c = ATTENTION[name]
    launcher, args, _ = make_attention(c, "draft_attention")
    ptx, cubin, _ = build.compile_kernel(launcher, args, c.arch)
    used = build.resources(cubin)
    assert used["local"] == used["stack"] == 0, "registers spill"
    assert not re.search(r"st\.global\.v4\.b32", ptx)  # a block's K and V go to no page
