"""The prompt segment: its plan by numpy, and that it compiles without spilling."""

import itertools
import re

import numpy as np
import pytest

from cute_kernels.gpu import build
from cute_kernels.gpu.config import CHUNK, SHAPES, TILE, product
from cute_kernels.gpu.prompt_plan import (
    FEW_TILES,
    MAX_ROWS,
    ROW_TILE,
    PromptBuffers,
    chunks_ahead,
    chunks_of,
    consumer_registers,
    from_row_quads,
    group_tiles,
    most_tiles,
    pair_slots,
    pair_sweep,
    slice_count,
    slice_warps,
    task_count,
    tasks_of,
    to_row_quads,
    warp_bytes,
)
from cute_kernels.gpu.tiles import make_plan

PRESETS = {name: product(name) for name in SHAPES}


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(
    ("rows", "position"), [(1, 0), (16, 64), (17, 0), (200, 192), (256, 65280)]
)
def test_tasks_cover_every_row_once(name, rows, position):
    """Every (kv head, row tile) has one task, whose blocks reach its last row and no further."""
    c, seen = PRESETS[name], []
    for cta in range(c.ctas):
        for task in tasks_of(c, cta, rows, position):
            seen += [(task.kv_head, tile) for tile in task.tiles]
            last = position + min(task.tiles.stop * ROW_TILE, rows) - 1
            assert (task.blocks - 1) * 64 <= last < task.blocks * 64
            # a warp for every row tile and query head
            assert len(task.tiles) * c.group_heads <= c.warps
    tiles = -(-rows // ROW_TILE)
    assert sorted(seen) == [(h, t) for h in range(c.shape.kv_heads) for t in range(tiles)]
    assert task_count(c, tiles) >= len({(h, t) for h, t in seen}) / (c.warps // c.group_heads)


@pytest.mark.parametrize("name", PRESETS)
def test_groups_fit_the_ring(name):
    c = PRESETS[name]
    plan = make_plan(c, 1)
    for phase, kind in enumerate(("qkv", "o", "gu", "down")):
        assert most_tiles(c, kind) == plan[:, phase, 1].max()
        assert 1 <= group_tiles(c, kind) < c.stages  # one more slice can be on its way
        slice_bytes = slice_warps(c, kind) * warp_bytes(c, kind)
        assert slice_bytes <= c.stage_bytes
        assert slice_bytes * slice_count(c, kind) == c.gemm(kind).unit_bytes
        assert c.gemm(kind).slab // CHUNK // c.warps <= 32  # pieces of a slice: a lane each


@pytest.mark.parametrize("name", PRESETS)
def test_pairs_fit(name):
    """Steps of a sweep over two row tiles cover a warp's K; their weights, its sums have room."""
    c = PRESETS[name]
    plan = c.smem_plan()
    for kind in ("qkv", "o", "gu", "down", "lm"):
        chunks = c.gemm(kind).slab // CHUNK // c.warps
        assert 1 <= chunks_ahead(c, kind) <= slice_warps(c, kind) * chunks
        s = pair_sweep(c, kind)
        assert s.steps * s.chunks == chunks
        assert s.steps * s.piece_bytes == c.gemm(kind).unit_bytes
        assert s.together >= 1 and s.together * s.piece_bytes <= c.stage_bytes
        assert 1 <= s.tiles <= most_tiles(c, kind)
        assert -(-s.tiles // s.together) < c.stages  # one more can be on its way
        assert 16 * (s.tiles + s.chunks) < consumer_registers(c)
    assert 1 <= pair_slots(c) <= c.warps
    assert pair_slots(c) * c.warps * ROW_TILE * TILE * 4 <= plan["partial sums"]
    assert c.warps * FEW_TILES * ROW_TILE * 4 <= plan["results"]  # squares


@pytest.mark.parametrize("name", PRESETS)
def test_buffers_do_not_overlap(name):
    b = PromptBuffers.of(PRESETS[name])
    at = [b.x, b.q, b.a, b.h, b.residual, b.parts, b.tree]
    assert at == sorted(at) and len(set(at[:-1])) == len(at) - 1 and b.bytes > at[-1]
    assert all(v % 16 == 0 for v in at)


def test_quads_round_trip():
    x = np.arange(MAX_ROWS * 24, dtype=np.float32).reshape(MAX_ROWS, 24)
    quads = to_row_quads(x)
    assert np.array_equal(from_row_quads(quads), x)
    # tile 1, row tile 2, lane (g 3, t 1): columns 10 and 11 of rows 35 and 43
    at = ((1 * 16 + 2) * 32 + 3 * 4 + 1) * 4
    assert quads[at : at + 4].tolist() == [x[35, 10], x[35, 11], x[43, 10], x[43, 11]]


def test_chunks_start_at_pages():
    assert chunks_of(300) == [(0, 256), (256, 44)]
    assert chunks_of(300, (64, 192)) == [(0, 64), (64, 192), (256, 44)]
    with pytest.raises(ValueError, match=re.escape("a chunk would start at 100; starts are")):
        chunks_of(300, (100,))


def test_segment_compiles(tmp_path):
    from cute_kernels.gpu.prompt_kernel import make_prompt

    c = PRESETS["llama-3.2-1b"]
    a = build.build(f"prompt {c}", lambda: make_prompt(c), c.arch, tmp_path)
    # keys are stored before the fence towards the copy engine, which the producer repeats
    assert a.ptx.count("fence.proxy.async.global") == 2
    assert "bar.arrive 10, 64" in a.ptx and "bar.sync 10, 64" in a.ptx
    # addresses and squares wait in local memory between sweeps; where products are made, next to
    # nothing does: some words in the loop with the most sums, `down` of two row tiles
    lines = [s for s in build.sass(a.cubin).splitlines() if re.search(r"/\*[0-9a-f]{4,5}\*/", s)]
    mma = [i for i, s in enumerate(lines) if "HMMA" in s]
    local = [i for i, s in enumerate(lines) if re.search(r"\b(STL|LDL)", s)]
    runs = [(a, b) for a, b in itertools.pairwise(mma) if b - a < 60]
    assert len(mma) > 200
    among = [i for i in local if any(a < i < b for a, b in runs)]
    assert len(among) <= len(mma) // 32
