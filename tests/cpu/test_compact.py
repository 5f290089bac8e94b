"""Compaction of keys and values by path, and many rounds of trees against plain decoding."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from cpu_step import TINY, Segment, Step
from tree_cases import bush

from cute_kernels.cpu import pack
from cute_kernels.cpu.compact import compact_kv
from cute_kernels.cpu.state import MAX_DEPTH, PAGE, Kv

LAYERS, PAGES, HEADS, SIZE = 2, 9, 2, 32


def unpacked(kv: Kv, layer: int, pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of a slot in order of position, `[positions, kv heads, D]`, copied."""
    k = kv.k[layer, pages].transpose(0, 2, 4, 1, 3)  # page, tile, lane, head, d
    v = kv.v[layer, pages].transpose(0, 2, 1, 3)
    return k.reshape(-1, HEADS, SIZE).copy(), v.reshape(-1, HEADS, SIZE).copy()


@pytest.fixture(scope="module")
def kv() -> Kv:
    """Every element differs from every other."""
    k = np.arange(LAYERS * PAGES * HEADS * PAGE * SIZE, dtype=np.float32)
    return Kv(
        k.reshape(LAYERS, PAGES, HEADS, PAGE // 16, SIZE, 16),
        -1 - k.reshape(LAYERS, PAGES, HEADS, PAGE, SIZE),
    )


def check(kv: Kv, base: int, path: list[int], pages: np.ndarray) -> None:
    """The path's rows arrive, and nothing else changes anywhere."""
    count = len(path)
    ours = Kv(kv.k.copy(), kv.v.copy())
    scratch = np.full(MAX_DEPTH * SIZE + 8, np.nan, np.float32)
    padded = np.array(path + [-7] * 3, np.int32)
    compact_kv(ours, 1, pages, base, padded, count, scratch[: MAX_DEPTH * SIZE])
    assert np.isnan(scratch[MAX_DEPTH * SIZE :]).all()
    for before, after in zip(unpacked(kv, 1, pages), unpacked(ours, 1, pages)):
        wanted = before.copy()
        wanted[base : base + count] = before[base + np.array(path)]
        assert np.array_equal(after, wanted)
    others = np.setdiff1d(np.arange(PAGES), pages)
    for before, after in zip(kv, ours):
        assert np.array_equal(after[0], before[0])
        assert np.array_equal(after[1, others], before[1, others])


@pytest.mark.parametrize("base", [0, 12, 58, 63, 64])
def test_every_path_equals_a_gather_into_a_fresh_buffer(kv: Kv, base: int) -> None:
    pages = np.array([5, 0, 7], np.int32)
    rows = 8
    for length in range(rows):
        for rest in itertools.combinations(range(1, rows), length):
            check(kv, base, [0, *rest], pages)


def test_long_paths_over_several_pages(kv: Kv) -> None:
    rng = np.random.default_rng(0)
    pages = np.array([3, 8, 1, 6, 2, 0, 4], np.int32)
    for _ in range(300):
        base, count = int(rng.integers(0, 190)), int(rng.integers(2, MAX_DEPTH + 2))
        rows = int(rng.integers(count, 257))
        rest = np.sort(rng.choice(np.arange(1, rows), count - 1, replace=False))
        check(kv, base, [0, *rest.tolist()], pages)


def test_the_scratch_of_a_worker_is_large_enough() -> None:
    for size in (32, 64, 128, 256):
        config = dataclasses.replace(TINY, hidden=32, heads=1, kv_heads=1, head_dim=size)
        assert pack.scratch_words(config, 1) >= MAX_DEPTH * size


def test_many_rounds_of_trees_leave_the_bits_of_plain_decoding() -> None:
    """Two sequences with unequal trees in one step; any path may be the accepted one."""
    rng = np.random.default_rng(1)
    step, prompts = Step(), (50, 117)
    tokens = [rng.integers(0, TINY.vocab, n).tolist() for n in prompts]
    logits: list[list[np.ndarray]] = [[], []]
    for slot, prompt in enumerate(tokens):
        step.run([Segment(slot, 0, prompt)], head_rows=[])
    newest = [3, 4]
    moved = 0
    for turn in range(40):
        sizes = [1, int(rng.integers(2, 40))][:: 1 if turn % 3 == 0 else -1]
        if turn % 3 == 1:
            sizes = [int(rng.choice([8, 64])), int(rng.integers(1, 130))]
        segments = []
        for slot, rows in enumerate(sizes):
            drafted = [newest[slot], *rng.integers(0, TINY.vocab, rows - 1).tolist()]
            segments.append(Segment(slot, len(tokens[slot]), drafted, bush(rows, rng)))
        got = step.run(segments)
        for slot, segment in enumerate(segments):
            paths = segment.paths()
            path = max((paths[i] for i in rng.integers(0, len(paths), 3)), key=len)
            first = 0 if slot == 0 else len(segments[0].tokens)
            logits[slot] += [got[first + row] for row in path]
            tokens[slot] += [segment.tokens[row] for row in path]
            newest[slot] = int(rng.integers(TINY.vocab))
            moved += path != list(range(len(path)))
            for layer in range(TINY.layers):
                compact_kv(
                    step.kv, layer, step.batch.pages[slot], segment.start,
                    np.array(path, np.int32), len(path), step.acts.scratch[0],
                )  # fmt: skip
    assert moved > 20
    plain = Step(seed=9)
    for slot, n in enumerate(prompts):
        plain.run([Segment(slot, 0, tokens[slot][:n])], head_rows=[])
        for i, got_row in zip(range(n, len(tokens[slot])), logits[slot], strict=True):
            wanted = plain.run([Segment(slot, i, [tokens[slot][i]])])[0]
            np.testing.assert_array_equal(got_row, wanted)
        count = len(tokens[slot])
        for layer in range(TINY.layers):
            ours = unpacked(step.kv, layer, step.batch.pages[slot])
            theirs = unpacked(plain.kv, layer, plain.batch.pages[slot])
            for a, b in zip(ours, theirs):
                np.testing.assert_array_equal(a[:count], b[:count])
