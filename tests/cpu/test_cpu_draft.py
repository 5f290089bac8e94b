"""The drafter on the CPU device: against its oracle, and bit for bit against itself."""

from __future__ import annotations

import dataclasses
import re

import cpu_step
import numpy as np
import pytest
import torch
from draft_step import DraftStep
from tiny_drafter import (
    DRAFTER,
    MASK,
    TARGET,
    drafter,
    module,
    random_features,
    random_tensors,
    target,
    variant,
)

from cute_kernels.cpu import draft, draft_pack, pack
from cute_kernels.cpu.state import PAGE
from megadecode.drafter import Drafter, Yarn
from megadecode.reference import Reference

SLIDING, FULL = "sliding_attention", "full_attention"
EPSILON = float(np.finfo(np.float32).eps)


def errors(
    got: np.ndarray, of: Drafter, features: np.ndarray, anchor: int
) -> tuple[float, float, float]:
    """Largest error of a draft, that of torch in fp32, and the largest logit."""
    n, rows = len(features), torch.from_numpy(features)
    exact = module(of, torch.float64).draft(rows.double(), anchor, n).numpy()
    plain = module(of).draft(rows, anchor, n).numpy()
    return np.abs(got - exact).max(), np.abs(plain - exact).max(), np.abs(exact).max()


VARIANTS = {
    "full": {},
    "anchor predicts": {"prediction": "next"},
    "block 2": {"block_size": 2},
    "block 16": {"block_size": 16, "is_causal": True},
    "sliding": {"layer_types": (SLIDING, SLIDING, FULL), "window": 20},
    "symmetric": {"layer_types": (SLIDING,) * 3, "window": 5, "is_causal": False},
    "page window": {"layer_types": (FULL, SLIDING, SLIDING), "window": 64, "block_size": 16},
    "window 1": {"layer_types": (SLIDING,) * 3, "window": 1},
    "yarn": {"yarn": Yarn(8.0, 32, mscale=1.0, mscale_all_dim=0.5), "rope_theta": 1000.0},
    "scaled": {"output_multiplier": 0.3, "rms_eps": 1e-2},
    "one head a group": {"heads": 2, "layers": 1, "taps": (4,)},
    "wide heads": {"heads": 8, "kv_heads": 1, "head_dim": 64, "ffn": 16, "taps": (3, 0)},
}
# Around pages, around windows of 20 and 64 with blocks of 8 and 16, and the shortest.
LENGTHS = (1, 2, 19, 20, 48, 56, 63, 64, 65, 84, 127, 128, 200)


@pytest.mark.parametrize("name", VARIANTS)
def test_accuracy(name: str) -> None:
    """No draft is more wrong than twice torch's worst one, and a rounding of the largest logit."""
    of = drafter(variant(**VARIANTS[name]))
    step = DraftStep(of)
    features = random_features(of.config, LENGTHS[-1])
    found, fed = [], 0
    for n in LENGTHS:
        step.feed(1, features[fed:n])
        fed = n
        found.append(errors(step.draft([1], [n])[0], of, features[:n], n))
    ours, plain, largest = np.array(found).T
    bound = 2 * plain.max() + 4 * EPSILON * largest.max()
    assert largest.min() > 0.5
    assert ours.max() <= bound, f"worst at {LENGTHS[ours.argmax()]} positions: {ours}, {plain}"


@pytest.mark.parametrize("name", ["full", "sliding", "symmetric"])
def test_every_count_of_accepted_tokens(name: str) -> None:
    """Features come from scattered rows, in path order; what they leave behind is the same as if
    all committed positions had been fed at once, whatever the blocks between have written."""
    of = drafter(variant(**VARIANTS[name]))
    step, rng = DraftStep(of), np.random.default_rng(0)
    known = random_features(of.config, 58)
    step.feed(2, known)
    for accepted in (*range(of.config.drafted + 1), 3, 0, 7):
        logits = step.draft([2], [accepted])
        n = len(known)
        fresh = DraftStep(of, seed=accepted + 5)
        fresh.feed(0, known)
        np.testing.assert_array_equal(step.cache(2, n), fresh.cache(0, n))
        np.testing.assert_array_equal(logits, fresh.draft([0], [accepted]))

        tree = random_features(of.config, 24, seed=accepted)
        path = [5, *(6 + np.sort(rng.choice(18, accepted, replace=False)))]
        step.draft_state.features[:24, : of.config.feature_size] = tree.reshape(24, -1)
        step.commit([(2, row) for row in path])
        known = np.concatenate([known, tree[path]])
        if accepted:  # the first rows would have been others
            first = DraftStep(of)
            first.feed(0, np.concatenate([known[:n], tree[5 : 6 + accepted]]))
            same = path == list(range(5, 6 + accepted))
            now = len(known)
            assert np.array_equal(first.cache(0, now), step.cache(2, now)) == same


def test_chunks_neighbours_and_workers_change_no_bit() -> None:
    of = drafter(variant(**VARIANTS["sliding"]))
    lengths, anchors = (64, 201, 330), (3, 1, 4)
    features = [random_features(of.config, n, seed=n) for n in lengths]
    want = []
    for rows, anchor in zip(features, anchors):
        alone = DraftStep(of, workers=1, pages=8)
        for row in rows:
            alone.feed(0, row[None])
        want.append(alone.draft([0], [anchor])[0])
    for workers, threads in ((1, False), (2, True), (3, True), (3, False), (16, False)):
        step = DraftStep(of, workers=workers, threads=threads, pages=8, seed=workers)
        for slot in range(3):
            for first in range(0, lengths[slot], 37 * workers):
                step.feed(slot, features[slot][first : first + 37 * workers])
        np.testing.assert_array_equal(step.draft([0, 1, 2], anchors), want)
        np.testing.assert_array_equal(step.draft([2, 0], [4, 3]), [want[2], want[0]])


def test_several_slots_commit_in_one_step() -> None:
    of = drafter()
    features = random_features(of.config, 30)
    step, alone = DraftStep(of), DraftStep(of)
    step.feed(0, features[:9])
    step.feed(2, features[:4])
    step.draft_state.features[:30, : of.config.feature_size] = features.reshape(30, -1)
    step.commit([(0, 9), (0, 12), (2, 20), (0, 13), (2, 4), (1, 29)])
    for slot, rows in ((0, [*range(9), 9, 12, 13]), (1, [29]), (2, [*range(4), 20, 4])):
        alone.feed(slot, features[rows])
        np.testing.assert_array_equal(step.cache(slot, len(rows)), alone.cache(slot, len(rows)))


def test_the_anchor_stands_in_row_0() -> None:
    """A block of nothing but MASK is another block."""
    step = DraftStep(drafter())
    step.feed(0, random_features(DRAFTER, 70))
    one, other, mask, again = (step.draft([0], [t])[0] for t in (5, 6, MASK, 5))
    assert (one != other).any(axis=1).all()
    assert (one != mask).any(axis=1).all()
    np.testing.assert_array_equal(one, again)


def test_layouts_take_their_rows() -> None:
    """Same weights: the anchor's row comes in front of the others."""
    features = random_features(DRAFTER, 40)
    logits = []
    for config in (DRAFTER, variant(prediction="next")):
        step = DraftStep(drafter(config))
        step.feed(0, features)
        logits.append(step.draft([0], [9])[0])
    assert logits[0].shape == (7, 203)
    assert logits[1].shape == (8, 203)
    np.testing.assert_array_equal(logits[0], logits[1][1:])


@pytest.mark.parametrize("window", [1, 9, 63, 64, 65])
def test_a_window_ends_where_it_should(window: int) -> None:
    """One layer, a block of 8 at 130: changing position j changes the rows that see it."""
    config = variant(layers=1, layer_types=(SLIDING,), window=window, prediction="next")
    step = DraftStep(drafter(config))
    features = random_features(config, 130)
    step.feed(0, features)
    before = step.draft([0], [1])[0]
    for j in (0, 63, 64, 65, 66, 67, 72, 73, 74, 121, 122, 123, 129):
        changed = features.copy()
        changed[j] += 1
        other = DraftStep(drafter(config))
        other.feed(0, changed)
        after = other.draft([0], [1])[0]
        np.testing.assert_array_equal(
            (before != after).any(axis=1), 130 + np.arange(8) - j < window
        )


def test_nothing_but_the_slots_positions_is_written() -> None:
    step = DraftStep(drafter())
    step.feed(1, random_features(DRAFTER, 60))
    assert not np.isnan(step.cache(1, 60)).any()
    assert np.isnan(step.cache(1, 6 * PAGE)[..., 60:, :]).all()
    before = step.cache(1, 60)
    step.draft([1], [3])
    np.testing.assert_array_equal(step.cache(1, 60), before)
    assert not np.isnan(step.cache(1, 68)).any()
    assert np.isnan(step.cache(1, 6 * PAGE)[..., 68:, :]).all()
    for slot in (0, 2):
        assert np.isnan(step.cache(slot, 6 * PAGE)).all()


def test_bf16_weights_compute_what_their_rounded_values_say() -> None:
    def rounded(values: np.ndarray) -> np.ndarray:
        return (pack.round_bfloat16(values).astype(np.uint32) << 16).view(np.float32)

    tensors = random_tensors(DRAFTER)
    matrices = {name: rounded(values) for name, values in tensors.items() if values.ndim > 1}
    half = DraftStep(Drafter(DRAFTER, tensors), dtype="bf16")
    full = DraftStep(Drafter(DRAFTER, tensors | matrices))
    for shared in (full.weights.embed, full.weights.head):  # the target's arrays
        shared[:] = rounded(shared)
    features = random_features(DRAFTER, 66)
    for step in (half, full):
        step.feed(0, features)
    np.testing.assert_array_equal(half.cache(0, 66), full.cache(0, 66))
    np.testing.assert_array_equal(half.draft([0], [8]), full.draft([0], [8]))


class TappedStep(cpu_step.Step):
    """The target's step with `tap` after `phase_after` of layer `layer + later`."""

    def __init__(self, state: draft.Draft, later: int, phase_after: str) -> None:
        tensors = dict(target().tensors())
        super().__init__(TARGET, tensors, pages=4)
        self.state, self.later, self.phase_after = state, later, phase_after

    def phase(self, name: str, layer: int = 0, threads: bool = False) -> None:
        super().phase(name, layer, threads)
        if name == self.phase_after and layer >= self.later:
            for worker in range(self.workers):
                if worker == 0:
                    self.counters[:] = 0
                draft.tap(
                    self.dims, self.weights, self.state, self.kv, self.batch, self.acts,
                    layer - self.later, worker, self.counters, 3,
                )  # fmt: skip


@pytest.mark.parametrize(("later", "phase_after"), [(0, "down"), (1, "qkv"), (1, "merge")])
def test_features_are_the_residual_stream_after_their_layers(later: int, phase_after: str) -> None:
    """Order is the list's. Each tapped layer is nearer to its own output than to a neighbour's."""
    config = variant(taps=(3, 0, 2))
    state = DraftStep(drafter(config)).draft_state
    tokens = np.random.default_rng(2).integers(0, TARGET.vocab, 90)
    step = TappedStep(state, later, phase_after)
    step.run([cpu_step.Segment(0, 0, tokens[:80])], [])
    step.run([cpu_step.Segment(0, 80, tokens[80:])], [])
    got = state.features[:10, : config.feature_size].reshape(10, 3, TARGET.hidden)

    tensors = dict(target().tensors())
    _, plain = Reference(TARGET, tensors).forward(tokens, taps=range(5))
    _, exact = Reference(TARGET, tensors, torch.float64).forward(tokens, taps=range(5))
    plain, exact = plain[80:].numpy(), exact[80:].numpy()
    for column, layer in enumerate(config.taps):
        bound = 2 * np.abs(plain[:, layer] - exact[:, layer]).max()
        wrong = [np.abs(got[:, column] - exact[:, other]).max() for other in range(5)]
        assert wrong[layer] <= bound
        assert all(w > 100 * bound for other, w in enumerate(wrong) if other != layer)


def test_taps_to_logits_through_the_target() -> None:
    """Prompt, features, draft keys and values, block: the whole way against the two oracles."""
    of = drafter()
    step = DraftStep(of)
    tokens = np.random.default_rng(3).integers(0, TARGET.vocab, 71)
    tapped = TappedStep(step.draft_state, 0, "down")
    tapped.run([cpu_step.Segment(0, 0, tokens)], [])
    step.commit([(1, row) for row in range(71)])
    got = step.draft([1], [11])[0]
    dtypes, logits = (torch.float32, torch.float64), []
    for dtype in dtypes:
        reference = Reference(TARGET, dict(target().tensors()), dtype)
        _, features = reference.forward(tokens, taps=DRAFTER.taps)
        logits.append(module(of, dtype).draft(features.clone(), 11, 71).numpy())
    plain, exact = logits
    assert np.abs(got - exact).max() <= 2 * np.abs(plain - exact).max()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"final_logit_softcapping": 20.0},
            "drafter 'tiny drafter': final_logit_softcapping is 20.0; the CPU device has no kernel "
            "for it",
        ),
        (
            {"input_embedding_scale": 2.0},
            "drafter 'tiny drafter': input_embedding_scale is 2.0; the CPU device has no kernel "
            "for it",
        ),
        (
            {"head_dim": 16},
            "model 'tiny drafter': head_dim is 16; the CPU device needs a multiple of 32",
        ),
    ],
)
def test_what_the_device_does_not_compute_is_refused(changes, message) -> None:
    of = drafter(dataclasses.replace(DRAFTER, **changes))
    weights = target()
    theirs = pack.pack_weights(TARGET, weights.tensor, 1)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        draft_pack.pack_drafter(of.config, of.get, theirs, 10, target_rows=8, context_rows=8)


@pytest.mark.parametrize("name", ["fc", "context_norm", "layers.2.q_norm", "layers.0.k"])
def test_tensors_of_another_shape_are_refused(name: str) -> None:
    of, weights = drafter(), target()
    theirs = pack.pack_weights(TARGET, weights.tensor, 1)

    def get(asked: str) -> np.ndarray:
        return of.get(asked)[..., :-1] if asked == name else of.get(asked)

    shape = list(of.get(name).shape)
    cut = [*shape[:-1], shape[-1] - 1]
    said = f"'tiny drafter': tensor '{name}' has shape {cut}; expected {shape}"
    with pytest.raises(ValueError, match=re.escape(said)):
        draft_pack.pack_drafter(of.config, get, theirs, 10, target_rows=8, context_rows=8)
