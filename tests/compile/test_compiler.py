"""What the compiler does to `sync`, and the faults of this DSL version that `sync` is shaped by.

The tests of faults fail when a DSL upgrade removes one: then read sync.py and decide anew.
"""

import re

import cutlass.cute as cute
import pytest
from cutlass import Int64

from cute_kernels.gpu import build, probes
from tests.compile import probes_dsl as dsl

TARGETS = ("sm_90a", "sm_120a")


def ptx_of(launcher, n_args, arch="sm_90a"):
    return build.compile_kernel(launcher, [Int64(0)] * n_args, arch)[0]


def loads_and_stores_kept(op, arch):
    published = ptx_of(dsl.between(op, consume=False), 3, arch)
    consumed = ptx_of(dsl.between(op, consume=True), 3, arch)
    return (
        "111" in published and "222" in published,
        len(re.findall(r"\bld\.global\.b32", consumed)) >= 2,
    )


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("name", dsl.OURS)
def test_plain_accesses_stay_on_their_side(name, arch):
    assert loads_and_stores_kept(dsl.OURS[name], arch) == (True, True)


@pytest.mark.parametrize("name", dsl.DSLS)
def test_dsl_wrappers_still_do_not_order(name):
    """Why sync.py does not use them."""
    assert loads_and_stores_kept(dsl.DSLS[name], "sm_90a") != (True, True)


def field_written(ptx):
    """Right code of `s.stage += 3` until a bound computes with the constant 3."""
    lines = (s.strip() for s in ptx[ptx.index("{") :].splitlines())
    ops = ("add", "mad", "mul", "div", "shr", "sub")
    return any(s.startswith(ops) and (", 3;" in s or "0f" in s) for s in lines)


def test_default_front_end_writes_fields_in_loops():
    assert field_written(ptx_of(dsl.struct_in_while, 1))


def test_next_front_end_still_loses_them(tmp_path):
    """Why nothing here uses FrontendNext."""
    from cutlass.base_dsl.compiler import DumpDir

    options = (
        cute.GPUArch("sm_90a"), cute.KeepPTX(True), cute.KeepCUBIN(True), DumpDir(str(tmp_path)),
        cute.FrontendNext,
    )  # fmt: skip
    assert not field_written(cute.compile[options](dsl.struct_in_while, Int64(0)).__ptx__)


@pytest.mark.parametrize("literal", [False, True])
def test_largest_word_is_unsigned(literal):
    """EMPTY is the largest word; as a signed number it is -1."""
    ptx = ptx_of(dsl.largest_of(literal), 2)
    assert "max.u32" in ptx and "max.s32" not in ptx


def test_dsl_maximum_with_a_literal_is_still_signed():
    assert "max.s32" in ptx_of(dsl.dsl_maximum, 2)


def test_turnstile_orders_payload_between_acquire_and_release():
    launcher, args, _ = probes.make_turnstile(32)
    ptx = build.compile_kernel(launcher, args, "sm_90a")[0]
    places = [
        ptx.index(s)
        for s in ("ld.acquire.gpu", "bar.sync", "ld.global.b32", "st.global.b32", "st.release.gpu")
    ]
    assert places == sorted(places)
    assert ptx.count("bar.sync") == 2


def arrive_depends_on_loads(cubin):
    """In SASS: does the address of the consumers' arrive come, through LOP3, from shared loads?

    Walks back from the SYNCS.ARRIVE that follows LDS.128s, over the registers it is made of."""
    lines = re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);", build.sass(cubin))
    last = max(i for i, s in enumerate(lines) if "LDS.128" in s)
    at = next(i for i, s in enumerate(lines) if i > last and "SYNCS.ARRIVE" in s)
    wanted = set(re.findall(r"\bR\d+\b", lines[at]))
    for s in reversed(lines[:at]):
        m = re.match(r"(?:@!?U?P\d+ )?(\S+) (R\d+)(.*)", s)
        if not m or m.group(2) not in wanted:
            continue
        if m.group(1).startswith("LDS"):
            return True
        wanted |= set(re.findall(r"\bR\d+\b", m.group(3)))
    return False


@pytest.mark.parametrize("dependent", [True, False])
def test_ring_release_depends_on_its_loads(dependent):
    """ptxas itself puts no wait there: the `dependent=False` build shows it."""
    launcher, args, _ = probes.make_ring_race(132, dependent)
    cubin = build.compile_kernel(launcher, args, "sm_90a")[1]
    assert arrive_depends_on_loads(cubin) == dependent
