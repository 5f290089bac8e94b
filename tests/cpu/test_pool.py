"""The request pool's allocator never gives a block twice and loses none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host.pool import BlockPool


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=80))
def test_random_use_never_overlaps_and_returns_everything(operations):
    pool = BlockPool(32)
    held: list[tuple[int, int]] = []
    for wants, size in operations:
        if wants or not held:
            first = pool.allocate(size)
            if first is None:
                continue
            taken = {b for f, n in held for b in range(f, f + n)}
            assert not taken & set(range(first, first + size))
            assert first + size <= 32
            held.append((first, size))
        else:
            pool.release(*held.pop(size % len(held)))
        assert pool.free == 32 - sum(n for _, n in held)
    for run in held:
        pool.release(*run)
    assert pool.allocate(32) == 0


def test_release_of_free_blocks_is_refused():
    pool = BlockPool(8)
    first = pool.allocate(4)
    pool.release(first, 4)
    with pytest.raises(ValueError, match=r"blocks 0\.\.3 are not all in use"):
        pool.release(0, 4)


def test_a_run_larger_than_every_hole_waits():
    pool = BlockPool(8)
    a, b, c = pool.allocate(3), pool.allocate(2), pool.allocate(3)
    pool.release(a, 3)
    pool.release(c, 3)
    assert pool.free == 6
    assert pool.allocate(4) is None
    pool.release(b, 2)
    assert pool.allocate(8) == 0
