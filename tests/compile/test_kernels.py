"""Kernels build on a machine without a GPU, within their registers; what cannot be is refused."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest

from cute_kernels.gpu import build, probes, sync
from cute_kernels.gpu.board import Desc, Segment
from cute_kernels.gpu.config import SHAPES, product
from cute_kernels.gpu.script import decode_step

# every preset, and the default one for both targets
BUILT = [
    ("smollm2-135m", "sm_90a", "wire"),
    ("smollm2-135m", "sm_120a", "wire"),
    ("llama-3.2-1b", "sm_90a", "script"),
    ("llama-3.1-8b", "sm_90a", "wire"),
    ("qwen3-8b", "sm_90a", "wire"),
    ("odd-960", "sm_90a", "script"),
    ("odd-768", "sm_90a", "script"),
]
# Bytes of stack: what is carried from phase to phase may lie there. More is seen where an array of
# registers is made in a loop and filled under a condition only: it then lives through the whole
# kernel (give it values where it is made).
MOST_STACK = 256


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cubins")


@pytest.mark.parametrize(("name", "arch", "service"), BUILT)
def test_kernel_builds(name, arch, service, cache):
    c = product(name, arch)
    a = build.build_kernel(c, service, cache)
    assert a.manifest["local"] == 0
    assert a.manifest["stack"] <= MOST_STACK, "registers spill"
    assert a.manifest["smem"] == c.smem_bytes
    lines = a.ptx.splitlines()
    copies = [i for i, line in enumerate(lines) if "cp.async.bulk.shared" in line]
    assert len(copies) >= 3  # the first phase's, before the gate; the others'; KV blocks
    # by one elected lane, since 32 of them would over-complete the barrier; of pieces, as many
    # lanes as the elected one has announced
    for at in copies:
        before = lines[at - 40 : at]
        elected = [i for i, line in enumerate(before) if "elect.sync" in line]
        assert elected
        assert any("bra" in line for line in before[elected[-1] :])
    assert "atom.global" not in a.ptx  # results do not depend on the order of arrival
    # every wait of a step has a deadline: as many traps as loops that poll
    assert a.ptx.count("trap;") >= 10


def test_without_a_drafter_its_code_is_left_out(cache):
    drafting = f"bar.arrive {int(sync.Barrier.DRAFTING)}, 64"
    small = dataclasses.replace(SHAPES["odd-768"], layers=2)
    whole, alone = (
        build.build_kernel(product(small, draft=draft), "script", cache) for draft in (True, False)
    )
    assert drafting in whole.ptx and drafting not in alone.ptx
    assert len(alone.ptx) < 0.8 * len(whole.ptx)


@pytest.mark.parametrize("phase", ["qkv", "down", "lm"])
def test_phase_kernel(phase, cache):
    c = product("smollm2-135m", phase=phase, attention=False, prompt=False, stages=8)
    a = build.build_phase(c, 2, cache)
    assert a.manifest["stack"] == 0
    wait, ready = a.ptx.index("griddepcontrol.wait"), a.ptx.index("griddepcontrol.launch_dep")
    assert ready < wait
    # what a kernel reads before the wait must not come from the kernel before: no activations
    assert "ld.relaxed" not in a.ptx[:wait]


def test_decode_alone_keeps_its_registers(cache):
    """Without the prompt's code beside it nothing of a phase's loops spills."""
    c = product("llama-3.2-1b", attention=False, prompt=False)
    a = build.build_kernel(c, "script", cache)
    assert a.manifest["stack"] == 0


def test_cache_hits_and_heals(cache):
    def turnstile():
        return build.build("turnstile", lambda: probes.make_turnstile(2), "sm_90a", cache)

    first = turnstile()
    assert first.ptx and not turnstile().ptx
    at = cache / "sm_90a" / f"{first.manifest['key']}.cubin"
    at.write_bytes(b"torn")
    again = turnstile()
    assert again.ptx and again.cubin == first.cubin
    at.with_suffix(".json").write_text("{")
    assert turnstile().ptx
    assert json.loads(at.with_suffix(".json").read_text())["sha256"] == first.manifest["sha256"]


def test_key_covers_sources_and_choices(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    keys = {build.content_key(w, t, tmp_path) for w in ("a", "b") for t in ("sm_90a", "sm_120a")}
    (tmp_path / "a.py").write_text("x = 2\n")
    keys.add(build.content_key("a", "sm_90a", tmp_path))
    assert len(keys) == 5


@pytest.mark.parametrize(
    ("model", "changes", "says"),
    [
        ("llama-3.2-1b", {"stages": 14}, "over the 232448 B of sm_90a"),
        ("llama-3.2-1b", {"warps": 6, "setmaxnreg": False}, "divides K = 2048"),
        ("llama-3.2-1b", {"warps": 6}, "a multiple of 4"),
        ("llama-3.2-1b", {"ctas": 130}, "a multiple of 4"),
        ("llama-3.2-1b", {"arch": "sm_120a", "stages": 12}, "over the 101376 B of sm_120a"),
        ("smollm2-135m", {"ctas": 400}, "at most the 384 tiles of gate/up and head"),
        ("llama-9.9-1t", {}, "unknown model 'llama-9.9-1t'; known: smollm2-135m"),
    ],
)
def test_what_does_not_fit_is_refused(model, changes, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        product(model, **changes)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
@pytest.mark.parametrize("name", SHAPES)
def test_presets_and_targets(name, arch):
    """Fewer layers and another vocabulary change no choice: one description serves both."""
    if arch == "sm_120a" and SHAPES[name].head_dim == 128:
        with pytest.raises(ValueError, match="attention needs at least 5"):
            product(name, arch)
        return
    c = product(name, arch)
    small = product(dataclasses.replace(SHAPES[name], layers=2, vocab=5003), arch)
    assert dataclasses.replace(small, shape=c.shape) == c


def test_script_is_the_board_s_descriptor():
    d = decode_step([5, 6, 7], 100, 16, parents=[-1, 0, 0])
    assert (d[Desc.KIND], d[Desc.ROWS], d[Desc.LAST_PHASE]) == (Segment.DECODE, 3, 65)
    assert d[Desc.TOKEN : Desc.TOKEN + 3].tolist() == [5, 6, 7]
    assert d[Desc.ROW_POSITION : Desc.ROW_POSITION + 3].tolist() == [100, 101, 101]
    assert d[Desc.PATH : Desc.PATH + 6 : 2].tolist() == [0, 1 << 4, 2 << 4]


def test_package_imports_without_cutlass():
    code = (
        "import sys, cute_kernels, cute_kernels.gpu, cute_kernels.gpu.config,"
        " cute_kernels.gpu.pack, cute_kernels.gpu.load, cute_kernels.gpu.build,"
        " cute_kernels.gpu.board, cute_kernels.gpu.arguments, cute_kernels.gpu.script;"
        "assert not any(m.split('.')[0] in ('cutlass', 'torch') for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
