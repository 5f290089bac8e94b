"""Every kernel of the study builds on a machine without a GPU, within its registers."""

import dataclasses
import json
import re

import pytest

from cute_kernels.gpu import build
from cute_kernels.gpu.config import LLAMA_1B, SMOLLM2, Config
from experiments.handoffs.variants import ATTENTION, GRAPHS, LLAMA, SMOL, VARIANTS

# the forms the page recommends, and one of every kind of hand-off
BEST = ("llama", "llama-rows8", "llama-c4", "smol-132", "llama-1k", "rows32-whole")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cubins")


@pytest.mark.parametrize("name", BEST)
def test_step_kernel(name, cache):
    c = VARIANTS[name]
    a = build.build_step(c, cache)
    assert a.manifest["local"] == 0
    assert a.manifest["stack"] == 0, "registers spill"
    assert a.manifest["smem"] == c.smem_bytes
    copies = [i for i, line in enumerate(a.ptx.splitlines()) if "cp.async.bulk.shared" in line]
    assert len(copies) == (2 if c.attention else 1)
    for at in copies:  # by one elected lane: 32 of them would over-complete the barrier
        before = a.ptx.splitlines()[at - 20 : at]
        elected = [i for i, line in enumerate(before) if "elect.sync" in line]
        assert elected
        assert any("bra" in line for line in before[elected[-1] :])
    assert "atom.global" not in a.ptx  # results do not depend on the order of arrival
    # every wait has a deadline: as many traps as loops that poll
    assert a.ptx.count("trap;") >= 6


@pytest.mark.parametrize("phase", ["qkv", "o", "gu", "down", "lm"])
def test_phase_kernel(phase, cache):
    config, blocks = GRAPHS["graph-smol-2"]
    a = build.build_phase(dataclasses.replace(config, phase=phase), blocks[phase], cache)
    assert a.manifest["stack"] == 0
    wait, ready = a.ptx.index("griddepcontrol.wait"), a.ptx.index("griddepcontrol.launch_dep")
    assert ready < wait
    # what a kernel reads before the wait must not come from the kernel before: only the plan
    assert "ld.relaxed" not in a.ptx[:wait]


def test_second_target(cache):
    c = dataclasses.replace(SMOL, ctas=64, stages=8, arch="sm_120a")
    assert build.build_step(c, cache).manifest["arch"] == "sm_120a"


def test_cache_hits_and_heals(cache):
    c = dataclasses.replace(SMOL, stages=4)
    first = build.build_step(c, cache)
    assert first.ptx and not build.build_step(c, cache).ptx
    at = cache / "sm_90a" / f"{first.manifest['key']}.cubin"
    at.write_bytes(b"torn")
    again = build.build_step(c, cache)
    assert again.ptx and again.cubin == first.cubin
    at.with_suffix(".json").write_text("{")
    assert build.build_step(c, cache).ptx
    assert json.loads(at.with_suffix(".json").read_text())["entry"] == "md_step_0"


def test_key_covers_sources_and_choices(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    keys = {build.content_key(w, t, tmp_path) for w in ("a", "b") for t in ("sm_90a", "sm_120a")}
    (tmp_path / "a.py").write_text("x = 2\n")
    keys.add(build.content_key("a", "sm_90a", tmp_path))
    assert len(keys) == 5


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stages": 14}, "over the 232448 B of sm_90a"),
        ({"rows": 12}, "8 or a multiple of 16"),
        ({"warps": 6}, "divides K = 2048"),
        ({"ctas": 130}, "a multiple of 4"),
        ({"split": 4}, "1 with a global exchange"),
        ({"arch": "sm_120a"}, "over the 101376 B of sm_120a"),
    ],
)
def test_what_does_not_fit_is_refused(changes, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        dataclasses.replace(LLAMA, **changes)


def test_attention_refuses_other_rows():
    with pytest.raises(ValueError, match="16 with attention"):
        dataclasses.replace(ATTENTION, rows=8)
    shape = dataclasses.replace(SMOLLM2, head_dim=128)
    with pytest.raises(ValueError, match="head_dim is 128"):
        Config(shape, ctas=128, warps=6, down_split=1, stage_bytes=16384, stages=4, attention=True)


def test_package_imports_without_cutlass():
    import subprocess
    import sys

    code = (
        "import sys, cute_kernels, cute_kernels.gpu, cute_kernels.gpu.config,"
        " cute_kernels.gpu.pack, cute_kernels.gpu.load, cute_kernels.gpu.build;"
        "assert not any(m.split('.')[0] in ('cutlass', 'torch') for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_shapes_are_what_the_models_are():
    assert (LLAMA_1B.qkv, SMOLLM2.qkv) == (3072, 960)
