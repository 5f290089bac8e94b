"""The prompt segment: every part against fp32, bits that must not depend on chunking, poison."""

import pytest

from cute_kernels.gpu.config import SHAPES

ROWS = (1, 17, 33, 64, 200, 256)


@pytest.fixture(params=SHAPES)
def check(request, load):
    """check(name of a check, arguments): on each preset."""
    load(f"prompt-{request.param}-all")
    from tests.gpu import check_prompt

    return lambda what, **kw: getattr(check_prompt, what)(load, request.param, **kw)


@pytest.mark.parametrize("rows", ROWS)
def test_parts_match_torch(check, rows):
    check("parts", rows=rows)


@pytest.mark.parametrize("rows", ROWS)
def test_keys_and_attention_match_torch(check, rows):
    check("keys_and_attention", rows=rows)


@pytest.mark.parametrize("length", [1, 63, 256, 300, 701])
def test_segment_matches_torch(check, length):
    check("segment", length=length)


def test_chunking_never_shows(check):
    check("chunking")


def test_rows_do_not_meet(check):
    check("rows_do_not_meet")


def test_bits_are_those_of_the_decode_form(check):
    check("same_as_decode")


def test_long_context(check):
    check("long_context")
