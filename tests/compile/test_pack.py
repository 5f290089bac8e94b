"""Layouts and tile assignment, by numpy alone."""

import dataclasses

import numpy as np
import pytest

from cute_kernels.gpu import pack
from cute_kernels.gpu.config import KINDS, LLAMA_1B, MAX_VOCAB, SHAPES, TILE, DraftShape, product
from cute_kernels.gpu.tiles import (
    Buffers,
    draft_bytes,
    draft_phases,
    make_plan,
    step_bytes,
    target_phases,
    tile_stride,
)

NAMES = ["llama-3.2-1b", "smollm2-135m", "odd-960", "odd-768"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layers", [1, 3])
def test_every_granule_is_streamed_once(name, layers):
    c = product(name)
    index, offsets = pack.stream_index(c, layers)
    assert np.array_equal(np.sort(index), np.arange(len(index)))
    assert len(index) * pack.granule(c) == step_bytes(c, layers)
    plan = make_plan(c, layers)
    ends = offsets + plan[..., 2].astype(np.int64) * plan[..., 3]
    assert np.array_equal(ends.ravel()[:-1], offsets.ravel()[1:])


@pytest.mark.parametrize("name", NAMES)
def test_every_tile_has_one_owner(name):
    c = product(name)
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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("columns", [0, 16384])
def test_the_drafters_phases_follow_the_targets(name, columns):
    """Numbers, owners and streams of fc by taps, ckv, the layers and the head."""
    c, draft = product(name), DraftShape(layers=3, taps=5, columns=columns)
    plan, target = make_plan(c, 2, draft), make_plan(c, 2)
    phases = target_phases(c, 2) + draft_phases(c, draft)
    assert plan.shape[1] == len(phases) == 9 + 5 + 1 + 12 + 1 == 9 + draft.phases
    assert np.array_equal(plan[:, :9], target)
    for p in range(9, len(phases)):
        kind, tiles = phases[p]
        g = c.gemm(kind)
        owned = [
            first + np.arange(n) * tile_stride(c, kind) for first, n in plan[:, p, :2].tolist()
        ]
        if g.split > 1:
            owned = [t[np.arange(len(t)) % c.team == i % c.team] for i, t in enumerate(owned)]
        assert sorted(np.concatenate(owned)) == list(range(tiles)), (p, kind)
        if kind == "fc":  # columns whose sums the CTA keeps
            assert np.array_equal(plan[:, p, :2], plan[:, 1, :2])
    assert phases[9 + 5] == ("ckv", 3 * c.gemm("ckv").tiles)
    index, offsets = pack.draft_stream_index(c, draft)
    assert np.array_equal(np.sort(index), np.arange(len(index)))
    own = plan[:, 9:] if columns else plan[:, 9:-1]
    assert offsets.shape == own.shape[:2]
    ends = offsets + own[..., 2].astype(np.int64) * own[..., 3]
    assert np.array_equal(ends.ravel()[:-1], offsets.ravel()[1:])
    head = 0 if columns else c.gemm("lm").unit_bytes * c.gemm("lm").tiles
    assert len(index) * pack.granule(c) == draft_bytes(c, draft) - head
    if columns:
        assert phases[-1] == ("lm", columns // TILE)
    else:
        assert np.array_equal(plan[:, -1], plan[:, 8])


def test_every_cta_hears_of_the_layer_before():
    """janitor.py: of `down` or of the next qkv."""
    c = product("smollm2-135m", ctas=200, splits=32)
    with pytest.raises(ValueError, match="has a tile neither of down nor of the next"):
        make_plan(c, 2)


def test_a_vocabulary_has_a_limit():
    """Of what a token id has room for in topk.py and prefix.py."""
    for vocab in (MAX_VOCAB, MAX_VOCAB + 1):
        shape = dataclasses.replace(LLAMA_1B, vocab=vocab)
        if vocab <= MAX_VOCAB:
            assert product(shape).shape.vocab == vocab
        else:
            with pytest.raises(ValueError, match="262145 tokens; the GPU's kernels take up to"):
                product(shape)


@pytest.mark.parametrize("name", NAMES)
def test_residual_stays_with_its_cta(name):
    """A CTA finishes the same tiles in `o` and in `down`, in the same order."""
    c = product(name)
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
    chunks = g.slab // 32 // c.warps
    u = pack.pack_matrix(w, c, name).reshape(g.tiles, g.split, chunks, c.warps, 8, 4, 2, 4)
    a = pack.to_fragments(x).reshape(g.split, c.warps, chunks, 2, 8, 4, 2, 4)
    # tile n, split q, chunk c, warp w, column g, t, step s, element e; block b, row r
    return np.einsum("nqcwgtse,qwcbrtse->brng", u, a).reshape(16, g.cols)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["o", "down"])
def test_packed_operands_meet(name, kind):
    c, rng = product(name), np.random.default_rng(0)
    g = c.gemm(kind)
    x = rng.integers(-4, 5, (16, g.k)).astype(np.int64)
    w = rng.integers(-4, 5, (g.cols, g.k)).astype(np.int64)
    assert np.array_equal(fragment_product(c, kind, x, w), x @ w.T)


@pytest.mark.parametrize("blocks", [2, 32])
def test_fragments_round_trip(blocks):
    x = np.arange(8 * blocks * 64).reshape(8 * blocks, 64)
    assert np.array_equal(pack.from_fragments(pack.to_fragments(x, blocks), blocks), x)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "odd-960", "odd-768"])
def test_packed_head_holds_embeddings(name):
    """A token's vectors, found as the kernel finds them, are its row in activation order."""
    shape = dataclasses.replace(SHAPES[name], layers=1, vocab=2051)
    c = product(shape)
    w = np.random.default_rng(1).integers(0, 1 << 15, (2051, shape.hidden)).astype(np.int16)
    packed = pack.pack_matrix(w, c, "lm").reshape(-1)
    if shape.tied:
        index, _ = pack.stream_index(c, 1)
        head, size = c.gemm("lm"), pack.granule(c) // 2
        body = (len(index) * size) - head.tiles * head.unit_bytes // 2
        packed = np.concatenate([np.zeros(body, np.int16), packed]).reshape(-1, size)[index]
        packed = packed.reshape(-1)
    table = pack.embed_table(c, 1 if shape.tied else None)
    chunks = shape.hidden // 32 // c.warps
    for token in (0, 7, 8, 1000, 2050):
        got = np.empty((c.warps, chunks, 4, 8), np.int16)
        for warp, i, t in np.ndindex(got.shape[:3]):
            at = table[token >> 3] + (i * c.warps + warp) * 512 + ((token & 7) * 4 + t) * 16
            got[warp, i, t] = packed[at // 2 : at // 2 + 8]
        x = np.zeros((16, shape.hidden), np.int16)
        x[3] = w[token]
        row = pack.to_fragments(x).reshape(-1, 2, 8, 4, 8)[:, 0, 3]
        assert np.array_equal(got.reshape(row.shape), row)
        assert np.array_equal(pack.norm_row(w[token]), row.ravel())


@pytest.mark.parametrize("name", NAMES)
def test_buffers_do_not_overlap(name):
    b = Buffers.of(product(name))
    at = list(dataclasses.asdict(b).values())
    assert at == sorted(at)
    assert all(v % 16 == 0 for v in at)


def test_presets_are_the_models():
    assert (LLAMA_1B.qkv, SHAPES["smollm2-135m"].qkv, SHAPES["qwen3-8b"].qkv) == (3072, 960, 6144)
    # weights a step reads, in GB: the models' sizes less an untied embedding
    gb = {n: step_bytes(product(n)) / 1e9 for n in SHAPES}
    assert 2.46 < gb["llama-3.2-1b"] < 2.48
    assert 14.9 < gb["llama-3.1-8b"] < 15.1
    assert 15.0 < gb["qwen3-8b"] < 15.2
