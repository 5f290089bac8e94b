"""ROWS steps and the drafter's context behind a prompt: the bits of DECODE and DRAFT steps."""

import pytest

from cute_kernels.gpu.config import SHAPES

TREES = ((17, 1), (17, 1000), (32, 60), (33, 64), (33, 4090), (64, 127), (128, 0), (128, 1000))
PROMPTS = ((1, 0), (17, 64), (100, 0), (256, 0), (200, 256))  # rows, position


@pytest.fixture(params=SHAPES)
def check(request, load):
    """check(name of a check, rows, position): on each preset."""
    kernel = load(f"decode-{request.param}")
    from tests.gpu import check_rows

    return lambda what, *at: getattr(check_rows, what)(kernel, request.param, *at)


@pytest.mark.parametrize(("rows", "n"), TREES)
def test_trees_have_the_bits_of_decode_steps(check, rows, n):
    assert check("check_tree", rows, n).startswith("ok")


@pytest.mark.parametrize(("rows", "position"), PROMPTS)
def test_context_behind_a_prompt_is_that_of_draft_steps(check, rows, position):
    assert check("check_context", rows, position).startswith("ok")
