"""Every phase of a layer and the head by itself, from random states: tests/gpu/diff.py."""

import pytest

from tests.gpu.kernels import scripted

NAMES = ("decode-smollm2-135m", "decode-qwen3-8b", "decode-odd-960")
RANGES = (
    ("qkv.0", "qkv.0"), ("o.0", "o.0"), ("gu.1", "gu.1"), ("down.1", "down.1"),
    ("qkv.1", "down.1"), ("head", "head"), ("gu.0", "head"),
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("first", "last"), RANGES)
def test_phases_alone(load, name, first, last):
    kernel, c = load(name), scripted()[name]
    from tests.gpu.diff import BOUND, compare, phase_of

    layers = c.shape.layers
    errors, equal = compare(kernel, c, 9, phase_of(first, layers), phase_of(last, layers), 2)
    assert equal
    assert max(errors.values()) < BOUND, errors
