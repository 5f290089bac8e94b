"""Layouts and tile assignment, by numpy alone."""

import numpy as np
import pytest

from cute_kernels.gpu import pack
from cute_kernels.gpu.config import KINDS
from cute_kernels.gpu.tiles import Buffers, make_plan, step_bytes, tile_stride
from experiments.handoffs.variants import VARIANTS

CONFIGS = {n: VARIANTS[n] for n in ("llama", "llama-c2", "llama-c4", "smol-132", "rows64-pairs")}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("layers", [1, 3])
def test_every_granule_is_streamed_once(name, layers):
    c = CONFIGS[name]
    index, offsets = pack.stream_index(c, layers)
    assert np.array_equal(np.sort(index), np.arange(len(index)))
    assert len(index) * pack.granule(c) == step_bytes(c, layers)
    plan = make_plan(c, layers)
    ends = offsets + plan[..., 2].astype(np.int64) * plan[..., 3]
    assert np.array_equal(ends.ravel()[:-1], offsets.ravel()[1:])


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tile_has_one_owner(name):
    c = CONFIGS[name]
    plan = make_plan(c, 2)
    for p in range(plan.shape[1]):
        kind = KINDS[p % 4] if p < 8 else "lm"
        g, owned = c.gemm(kind), []
        for cta in range(c.ctas):
            first, n = plan[cta, p, :2]
            tiles = first + np.arange(n) * tile_stride(c, kind)
            if g.split > 1:
                tiles = tiles[np.arange(n) % g.split == cta % c.team]
            owned += tiles.tolist()
        assert sorted(owned) == list(range(g.tiles)), kind


@pytest.mark.parametrize("name", CONFIGS)
def test_residual_stays_with_its_cta(name):
    """A CTA finishes the same tiles in `o` and in `down`, in the same order."""
    c = CONFIGS[name]
    plan = make_plan(c, 1)
    for cta in range(c.ctas):
        owned = []
        for p, kind in ((1, "o"), (3, "down")):
            first, n = plan[cta, p, :2]
            tiles = first + np.arange(n) * tile_stride(c, kind)
            if c.gemm(kind).split > 1:
                tiles = tiles[np.arange(n) % c.team == cta % c.team]
            owned.append(tiles.tolist())
        assert owned[0] == owned[1]
        assert len(owned[0]) <= c.own_tiles


def fragment_product(c, name, x, w):
    """x @ w.T from the packed forms alone, the way lanes walk them."""
    g = c.gemm(name)
    units = pack.pack_matrix(w, c, name)
    chunks = g.slab // 32 // c.k_warps
    u = units.reshape(g.tiles, g.split, g.passes, chunks, c.k_warps, 8, 4, 2, 4)
    a = pack.to_fragments(x, c).reshape(-1, 2, c.m_tiles, 8, 4, 2, 2, 2)
    # chunk, step, m, g, t, pair, half, element -> chunk, step, t, (pair, element), row
    rows = a.transpose(0, 1, 4, 5, 7, 2, 6, 3).reshape(-1, 2, 4, 4, c.tile_rows)
    rows = rows.reshape(g.split, g.passes, c.k_warps, chunks, 2, 4, 4, c.tile_rows)
    return np.einsum("nqpcwgtse,qpwcster->rng", u, rows).reshape(c.tile_rows, g.cols)


@pytest.mark.parametrize("name", ["llama", "smol-132", "rows64-pairs"])
@pytest.mark.parametrize("kind", ["o", "down"])
def test_packed_operands_meet(name, kind):
    c, rng = CONFIGS[name], np.random.default_rng(0)
    g = c.gemm(kind)
    x = rng.integers(-4, 5, (c.tile_rows, g.k)).astype(np.int64)
    w = rng.integers(-4, 5, (g.cols, g.k)).astype(np.int64)
    assert np.array_equal(fragment_product(c, kind, x, w), x @ w.T)


@pytest.mark.parametrize("name", ["llama", "llama-rows8", "rows64-pairs"])
def test_fragments_round_trip(name):
    c = VARIANTS[name]
    x = np.arange(c.tile_rows * 64).reshape(c.tile_rows, 64)
    assert np.array_equal(pack.from_fragments(pack.to_fragments(x, c), c), x[: c.rows])


def test_swizzle_is_its_own_inverse_and_spreads_banks():
    x = np.arange(64 * 64).reshape(64, 64)
    y = pack.swizzle_rows(x)
    assert np.array_equal(pack.swizzle_rows(y), x)
    for piece in range(8):  # eight rows' piece i lie in eight different places
        where = {int(np.flatnonzero(y[r] == x[r, piece * 8])[0]) // 8 for r in range(8)}
        assert len(where) == 8


def test_key_order_is_a_permutation_with_pairs_together():
    order = pack.key_order()
    assert sorted(order) == list(range(64))
    assert all(order[i + 1] == order[i] + 32 for i in range(0, 64, 2))


def test_row_table_follows_paths():
    table = pack.row_table([-1, 0, 0, 2], committed=100)
    assert table[:4, 0].tolist() == [100, 101, 101, 102]
    assert table[3, 2] == 0 | 2 << 4 | 3 << 8
    assert [pack.tail_start(p) for p in (0, 15, 78, 79, 1039)] == [0, 0, 0, 64, 1024]


def test_buffers_do_not_overlap():
    b = Buffers.of(VARIANTS["llama-1k"])
    at = [b.q, b.y, b.h, b.x, b.parts, b.kv, b.a, b.part, b.bytes]
    assert at == sorted(set(at))
    assert all(v % 16 == 0 for v in at)
