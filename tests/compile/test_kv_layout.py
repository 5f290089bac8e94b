"""Layout of pages, of shared memory and of paths, by numpy alone."""

import dataclasses
import re

import numpy as np
import pytest

from cute_kernels.gpu import attention_plan, kv_layout
from cute_kernels.gpu.attention_plan import AttentionSmem
from cute_kernels.gpu.config import SHAPES, product

DIMS = (64, 128)


@pytest.mark.parametrize("dim", DIMS)
def test_swizzle_is_its_own_inverse_and_spreads_banks(dim):
    x = np.arange(64 * dim).reshape(64, dim)
    y = kv_layout.swizzle_rows(x)
    assert np.array_equal(kv_layout.swizzle_rows(y), x)
    for piece in range(dim // 8):  # eight rows' piece i lie in eight different bank groups
        where = [int(np.flatnonzero(y[r] == x[r, piece * 8])[0]) // 8 for r in range(8)]
        assert len({i % 8 for i in where}) == 8


@pytest.mark.parametrize("dim", DIMS)
def test_keys_meet_queries(dim):
    """A K row times Q's registers, paired as the mma pairs them, is the plain product."""
    rng = np.random.default_rng(0)
    q, key = rng.integers(-9, 9, (2, dim))
    row, columns = key[kv_layout.key_order(dim)], q[kv_layout.rotary_order(dim)]
    total = 0
    for step in range(dim // 16):
        for t in range(4):
            held = columns[16 * step + 4 * t :][:4]  # two words of a lane's vector
            total += held[:2] @ row[16 * step + 2 * t :][:2]
            total += held[2:] @ row[16 * step + 8 + 2 * t :][:2]
    assert total == q @ key


@pytest.mark.parametrize("dim", DIMS)
def test_rotary_pairs_are_neighbours(dim):
    rows = kv_layout.rotary_rows(3, dim)
    assert sorted(rows) == list(range(3 * dim))
    assert np.array_equal(rows[1::2], rows[::2] + dim // 2)


def test_paths_follow_parents():
    depth, words = kv_layout.paths([-1, 0, 0, 2, *range(3, 15)])
    assert depth.tolist() == [0, 1, 1, 2, *range(3, 15)]
    assert words[3].tolist() == [0 | 2 << 4 | 3 << 8, 0]
    assert words[15].tolist() == [0x87654320, 0xFEDCBA9]
    with pytest.raises(ValueError, match="row 1 has parent 1"):
        kv_layout.paths([-1, 1])


def test_tail_start():
    assert [kv_layout.tail_start(p) for p in (0, 15, 78, 79, 1039)] == [0, 0, 0, 64, 1024]
    longest = max(p - kv_layout.tail_start(p) + 1 for p in range(2000))
    assert longest == 79 <= attention_plan.TAIL_GROUPS * 32


@pytest.mark.parametrize("name", SHAPES)
def test_presets_have_room_for_attention(name):
    c = product(name)
    a = AttentionSmem.of(c)
    offsets = [a.new, a.rope, a.queries, a.tails, a.stats, a.places, a.step, a.bytes]
    assert offsets == sorted(set(offsets)) and all(v % 16 == 0 for v in offsets)
    assert a.new == 0  # rows of K and V lie at multiples of their length: their addresses are xored
    assert c.smem_plan()["partial sums"] >= attention_plan.exchange_bytes(c)
    assert attention_plan.halves(c) * c.group_heads <= c.warps


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("llama-3.2-1b", {"splits": 32}, "splits is 32; it must be at most 16"),
        ("llama-3.2-1b", {"splits": 12}, "splits is 12; it must be 4, 8, 16 or 32"),
        ("llama-3.1-8b", {"stages": 4}, "stages is 4; attention needs at least 5"),
        ("smollm2-135m", {"warps": 2}, "attention needs at least 4"),
    ],
)
def test_what_does_not_fit_is_refused(name, changes, says):
    c = product(name)
    with pytest.raises(ValueError, match=re.escape(says)):
        dataclasses.replace(c, **changes)


def test_other_heads_are_refused():
    c = product("llama-3.2-1b")
    for shape, says in (({"head_dim": 96}, "head_dim is 96"), ({"kv_heads": 2}, "serve 1 to 8")):
        with pytest.raises(ValueError, match=says):
            dataclasses.replace(c, shape=dataclasses.replace(c.shape, **shape))
