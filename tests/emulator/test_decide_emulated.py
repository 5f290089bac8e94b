"""Decisions: as tests/gpu/test_decide.py, on the emulated kernels."""

import dataclasses
import functools

import numpy as np
import pytest

from tests.emulator.kernel import TINY, EmulatedKernel, pretend
from tests.gpu.test_decide import (
    FILTERS,
    WIDE,
    bias_of,
    compare,
    misleading_rows,
    record,
    rows_of,
)

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
    """Some of the combinations of filters over ten kinds of rows, biases in turn."""
    rig, rng = rig_of(form), np.random.default_rng(int(temperature * 1000))
    for case in range(0, len(FILTERS), 7):
        top_k, top_p, min_p = FILTERS[case]
        rows = rows_of(VOCABULARIES[form], rng)
        bias = bias_of(rows[case % 10], case % 4, rng)
        params = record(
            int(rng.integers(-(2**63), 2**63 - 1)), bias, temperature=temperature, top_k=top_k,
            top_p=top_p, min_p=min_p, logprobs=(0, 1, 5, 20)[case // 4 % 4],
        )  # fmt: skip
        compare(rig, rows, params, rng.integers(1, 2**17, 10))


@pytest.mark.parametrize("case", range(len(WIDE)))
@pytest.mark.parametrize("form", TINY)
def test_wide_prefixes(rig_of, form, case):
    """Of rows of all kinds: ends that a sample finds, and ends that it cannot know of."""
    rng = np.random.default_rng(case)
    for make in (rows_of, misleading_rows):
        for temperature in (0.7, 3):
            rows = make(VOCABULARIES[form], rng)
            values = dict(temperature=temperature) | WIDE[case]
            params = record(case, {}, logprobs=5, **values)
            compare(rig_of(form), rows, params, rng.integers(1, 2**17, 10))
