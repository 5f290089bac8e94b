"""Decisions: as tests/gpu/test_decide.py, on the emulated kernels."""

import dataclasses
import functools

import pytest

from tests.emulator.kernel import TINY, EmulatedKernel, pretend
from tests.gpu.test_decide import WIDE, check_filters, check_wide_prefixes

pytestmark = pytest.mark.slow
VOCABULARIES = {"narrow": 5003, "wide": 20012}


@pytest.fixture
def rig_of(folder, monkeypatch):
    """rig_of(form) -> Rig."""
    pretend(monkeypatch)

    @functools.cache
    def of(form):
        from tests.gpu.decide_rig import Rig

        small = TINY[form]
        shape = dataclasses.replace(small.shape, name=f"decide-{form}", vocab=VOCABULARIES[form])
        c = dataclasses.replace(small, shape=shape, ctas=32)  # as many maxima as alternatives
        return Rig(EmulatedKernel(c, folder, "decide"), c)

    return of


@pytest.mark.parametrize("temperature", [0, 0.3, 1, 2, 100])
@pytest.mark.parametrize("form", TINY)
def test_tokens_are_the_cpu_devices(rig_of, form, temperature):
    check_filters(rig_of(form), VOCABULARIES[form], temperature, every=7)


@pytest.mark.parametrize("case", range(len(WIDE)))
@pytest.mark.parametrize("form", TINY)
def test_wide_prefixes(rig_of, form, case):
    check_wide_prefixes(rig_of(form), VOCABULARIES[form], case)
