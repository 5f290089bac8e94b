"""Steps as descriptors: the table of a tree's rows, and what a descriptor makes of it."""

import numpy as np
import pytest
from tree_cases import bush, chain

from cute_kernels.gpu.board import MAX_ROWS, ROW_WORDS, Desc, RowWord, Segment
from cute_kernels.gpu.script import (
    FREE,
    TREE,
    as_script,
    decode_step,
    draft_phases,
    draft_step,
    prompt_step,
    rows_step,
    tree_step,
)
from cute_kernels.gpu.tree_rows import put_rows, row_table

POSITION = 1000


def ancestors(parents, row):
    """Root first, the row itself last."""
    found = []
    while row >= 0:
        found.insert(0, row)
        row = parents[row]
    return found


def described_path(desc, row, length):
    """The first `length` entries of a row's path in a descriptor."""
    words = desc.view(np.uint32)[Desc.PATH + 2 * row : Desc.PATH + 2 * row + 2]
    bits = int(words[0]) | int(words[1]) << 32
    assert bits >> 4 * length == 0
    return [bits >> 4 * d & 15 for d in range(length)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rows", [1, 2, 9, 16, 17, 128])
def test_the_table_says_where_every_row_is(rows, seed):
    rng = np.random.default_rng([rows, seed])
    parents = chain(min(rows, 16)) if seed == 0 else bush(rows, rng)
    tokens = rng.integers(0, 2**31, len(parents)).tolist()
    table = row_table(tokens, POSITION, parents)
    assert table.shape == (MAX_ROWS, ROW_WORDS)
    for row, found in enumerate(table[: len(parents)]):
        path = ancestors(parents, row)
        assert found[RowWord.TOKEN] == tokens[row]
        assert found[RowWord.DEPTH] == len(path) - 1 == found[RowWord.POSITION] - POSITION
        assert found[RowWord.PARENT] == parents[row]
        assert list(found[RowWord.PATH :].tobytes()[: len(path)]) == path
    assert not table[len(parents) :].any()


@pytest.mark.parametrize("seed", range(6))
def test_a_descriptor_holds_the_table_s_rows(seed):
    rng = np.random.default_rng(seed)
    parents = chain(16) if seed == 0 else bush(16, rng)
    tokens = rng.integers(0, 2**31, 16).tolist()
    desc = decode_step(tokens, POSITION, 2, parents=parents)
    for row in range(16):
        path = ancestors(parents, row)
        assert desc[Desc.TOKEN + row] == tokens[row]
        assert desc[Desc.ROW_POSITION + row] == POSITION + len(path) - 1
        assert described_path(desc, row, len(path)) == path
    again = np.zeros_like(desc)
    put_rows(again, row_table(tokens, POSITION, parents), 16)
    assert (again[Desc.TOKEN : Desc.PATH + 32] == desc[Desc.TOKEN : Desc.PATH + 32]).all()


def test_trees_without_a_place_are_refused():
    with pytest.raises(ValueError, match="129 rows"):
        row_table([1] * 129, 0, [-1] + [0] * 128)
    with pytest.raises(ValueError, match="row 16 is at depth 16"):
        row_table([1] * 17, 0)
    with pytest.raises(ValueError, match="block of 17 rows"):
        draft_step([1] * 17, 0, (9, 20))


def test_a_script_says_what_follows_each_step():
    phases = draft_phases(layers=2, taps=3, draft_layers=1)
    assert phases == (9, 9 + 3 + 1 + 4 + 1)
    guess = draft_step([5, 0, 0], 10, phases, context=[0])
    guess[Desc.NEXT] = Segment.PROMPT  # a wrong one, on purpose
    steps = [
        prompt_step(10, 0, 2), decode_step([3], 9, 2, free=True), guess, tree_step(10, 2),
        rows_step(40, 10, 2), draft_step([], 11, phases, context=[0, 2]),
    ]  # fmt: skip
    script = as_script(steps)
    decode, draft, rows = Segment.DECODE, Segment.DRAFT, Segment.ROWS
    assert script[:, Desc.NEXT].tolist() == [decode, draft, Segment.PROMPT, rows, draft, decode]
    assert script[:, Desc.TAG].tolist() == [0, FREE, 0, TREE, 0, 0]
    assert script[:, Desc.DECIDE].tolist() == [0, 0, 0, 1, 1, 0]
    assert script[2, Desc.DEPTH] == 2 and script[5, Desc.DEPTH] == 0
    assert script[2, Desc.ROW_POSITION : Desc.ROW_POSITION + 3].tolist() == [10, 11, 12]
    assert script[5, Desc.ACCEPTED : Desc.ACCEPTED + 2].tolist() == [0, 2]
