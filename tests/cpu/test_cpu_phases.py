"""Whole steps of the CPU device: accuracy, chunking, neighbours, workers, weights' precision."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from cpu_step import LAYER_PHASES, TINY, Segment, Step, random_tensors, reference

from cute_kernels.cpu.pack import round_bfloat16

LENGTH = 330


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, TINY.vocab, LENGTH)


@pytest.fixture(scope="module")
def one_by_one(tokens: np.ndarray) -> np.ndarray:
    """Logits `[LENGTH, vocab]` of plain decoding, a row at a time."""
    step = Step()
    return np.concatenate([step.run([Segment(0, i, [t])]) for i, t in enumerate(tokens)])


def test_accuracy(tokens: np.ndarray, one_by_one: np.ndarray) -> None:
    tensors = random_tensors(TINY)
    exact = reference(TINY, tensors, tokens, np.float64)
    plain = reference(TINY, tensors, tokens, np.float32)
    assert np.abs(exact).max() > 1
    assert np.abs(one_by_one - exact).max() <= 2 * np.abs(plain - exact).max()


SHAPES: dict[str, dict[str, Any]] = {
    "ungrouped": dict(heads=4, kv_heads=4, head_dim=64, hidden=64, ffn=16, vocab=31),
    "untied": dict(heads=8, kv_heads=1, hidden=160, ffn=48, vocab=65, tied_embeddings=False),
    "bias": dict(qkv_bias=True),
    "norms": dict(qk_norm=True, head_dim=64, rms_eps=1e-2),
    "bias and norms": dict(qkv_bias=True, qk_norm=True),
    # Groups and head sizes of published Qwen models.
    "groups of 5": dict(heads=10, kv_heads=2, qkv_bias=True),
    "groups of 7": dict(heads=14, kv_heads=2, head_dim=64, qkv_bias=True),
    "heads of 128": dict(heads=4, kv_heads=2, head_dim=128, qk_norm=True),
}


@pytest.mark.parametrize("name", SHAPES)
def test_other_shapes(name: str) -> None:
    config = dataclasses.replace(TINY, **SHAPES[name])
    tensors = random_tensors(config)
    tokens = np.random.default_rng(1).integers(0, config.vocab, 150)
    step = Step(config, tensors, workers=3)
    got = np.concatenate(
        [step.run([Segment(2, 0, tokens[:100])]), step.run([Segment(2, 100, tokens[100:])])]
    )
    exact = reference(config, tensors, tokens, np.float64)
    plain = reference(config, tensors, tokens, np.float32)
    assert np.abs(got - exact).max() <= 2 * np.abs(plain - exact).max()


@pytest.mark.parametrize("name", ["bias", "bias and norms"])
def test_biases_and_norms_are_row_invariant(name: str) -> None:
    """One row at a time, or a chunk beside a tree: the same bits."""
    config = dataclasses.replace(TINY, **SHAPES[name])
    tokens = np.random.default_rng(2).integers(0, config.vocab, 90)
    one = Step(config, workers=1)
    alone = np.concatenate([one.run([Segment(0, i, [t])]) for i, t in enumerate(tokens)])
    many = Step(config, workers=3)
    np.testing.assert_array_equal(many.run([Segment(1, 0, tokens[:70])]), alone[:70])
    tree = [tokens[70], 5, tokens[71], tokens[72]]
    segments = [Segment(1, 70, tree, [-1, 0, 0, 2]), Segment(3, 0, tokens[:33])]
    got = many.run(segments)
    np.testing.assert_array_equal(got[[0, 2, 3]], alone[70:73])
    np.testing.assert_array_equal(got[4:], alone[:33])


@pytest.mark.parametrize("chunk", [2, 7, 16, 17, 64, 100, 256])
def test_chunks_change_no_bit(tokens: np.ndarray, one_by_one: np.ndarray, chunk: int) -> None:
    step = Step(seed=chunk)
    got = [step.run([Segment(3, i, tokens[i : i + chunk])]) for i in range(0, LENGTH, chunk)]
    np.testing.assert_array_equal(np.concatenate(got), one_by_one)


@pytest.mark.parametrize("threads", [False, True])
def test_neighbours_change_no_bit(
    tokens: np.ndarray, one_by_one: np.ndarray, threads: bool
) -> None:
    step = Step(workers=3)
    step.run([Segment(0, 0, tokens[:200])])
    step.run([Segment(2, 0, tokens[:77])])
    # One decoding slot between a prompt chunk and a small block of another; logits of some rows.
    segments = [
        Segment(1, 0, tokens[:180]),
        Segment(0, 200, tokens[200:201]),
        Segment(2, 77, tokens[77:82]),
    ]
    wanted = [180, 5, 179, 181, 185]
    got = step.run(segments, wanted, threads)
    rows = [200, 5, 179, 77, 81]
    np.testing.assert_array_equal(got, one_by_one[rows])


@pytest.mark.parametrize("shape", [{}, SHAPES["bias and norms"]], ids=["plain", "bias and norms"])
def test_bf16_weights_compute_what_their_rounded_values_say(
    tokens: np.ndarray, shape: dict[str, Any]
) -> None:
    config = dataclasses.replace(TINY, **shape)
    tensors = random_tensors(config)
    rounded = {
        name: value
        if value.ndim == 1
        else (round_bfloat16(value).astype(np.uint32) << 16).view(np.float32)
        for name, value in tensors.items()
    }
    half, full = Step(config, tensors, dtype="bf16"), Step(config, rounded)
    for first, end in ((0, 90), (90, 91), (91, 100)):
        segment = [Segment(0, first, tokens[first:end])]
        np.testing.assert_array_equal(half.run(segment), full.run(segment))


def test_a_step_without_head_rows_only_fills_the_cache(
    tokens: np.ndarray, one_by_one: np.ndarray
) -> None:
    step = Step()
    assert step.run([Segment(0, 0, tokens[:64])], []).shape == (0, TINY.vocab)
    np.testing.assert_array_equal(step.run([Segment(0, 64, tokens[64:65])])[0], one_by_one[64])


def test_padding_and_other_pages_stay_untouched(tokens: np.ndarray) -> None:
    step = Step()
    step.run([Segment(1, 0, tokens[:70])])
    own = step.batch.pages[1, :2]
    others = np.setdiff1d(np.arange(step.kv.v.shape[1]), own)
    assert np.isnan(step.kv.v[:, others]).all()
    assert np.isnan(step.kv.k[:, others]).all()
    assert np.isnan(step.kv.v[:, own[1], :, 6:]).all()
    assert not np.isnan(step.kv.v[:, own[0]]).any()
    assert np.isnan(step.acts.x[:, TINY.hidden :]).all()
    assert np.isnan(step.acts.x[70:]).all()
    assert (step.acts.logits[:70, TINY.vocab :] == 0).all()


def test_each_phase_runs_with_more_workers_than_work(tokens: np.ndarray) -> None:
    few, many = Step(workers=1), Step(workers=16)
    for step in (few, many):
        step.load([Segment(0, 0, tokens[:1])])
        step.phase("embed")
        for name in LAYER_PHASES:
            step.phase(name, 1)
        step.phase("head")
    np.testing.assert_array_equal(few.acts.logits[0], many.acts.logits[0])
