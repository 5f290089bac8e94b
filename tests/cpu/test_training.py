"""Training on the CPU: what a block is, that it learns, that a resumed run repeats itself."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_drafter import MASK, TARGET, target

from megadecode.drafter import load_drafter
from megadecode.errors import ModelError
from megadecode.training.batches import Batches
from megadecode.training.corpus import Corpus, Sample, is_held_out, loop_start
from megadecode.training.features import Features
from megadecode.training.head_loss import head_loss
from megadecode.training.held_out import HeldOutChain, walk
from megadecode.training.lockstep import Lockstep
from megadecode.training.recipe import Recipe, spread_taps
from megadecode.training.start import start_module
from megadecode.training.target import TorchTarget
from megadecode.training.trainer import Trainer

SMALL = Recipe(
    layers=1, steps=120, warm_up=10, rate=6e-3, tokens=256, blocks=64, shortest=64, seed=3
)


@pytest.fixture(scope="module")
def torch_target() -> TorchTarget:
    return TorchTarget(target())


@pytest.fixture(scope="module")
def corpus(torch_target) -> Corpus:
    """Greedy answers of a random target to random prompts."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, TARGET.vocab - 1, (24, 6)).tolist()
    answers = Lockstep(torch_target, 24, 64, stop_id=MASK).write(prompts, 48, [0.0] * 24)
    samples = [Sample(p + a, [(6, 54)], "chat", 0.0, False) for p, a in zip(prompts, answers)]
    return Corpus.of(samples, {"written": "by a test"})


def test_a_drafter_for_a_random_target_trains_and_is_loaded(torch_target, corpus, tmp_path) -> None:
    trainer = Trainer(torch_target, corpus, SMALL, MASK)
    chain = HeldOutChain(trainer, corpus, 24, held_out=False)
    before = chain.tau()
    trainer.run()
    after = chain.tau()
    assert before < 1.2 and after > 1.5, (before, after)
    trainer.write(tmp_path / "drafter.safetensors")
    drafter = load_drafter(tmp_path / "drafter.safetensors", target())
    assert drafter.config == trainer.config
    for name, parameter in trainer.module.named_parameters():
        torch.testing.assert_close(
            torch.from_numpy(drafter.tensor(name)), parameter.bfloat16().float(), rtol=0, atol=0
        )


def test_a_resumed_run_repeats_itself(torch_target, corpus, tmp_path) -> None:
    recipe = dataclasses.replace(SMALL, steps=12, warm_up=2)
    straight = Trainer(torch_target, corpus, recipe, MASK)
    straight.run(every=3)
    first = Trainer(torch_target, corpus, recipe, MASK)
    first.run(6, every=3)
    first.save(tmp_path / "checkpoint.pt")
    second = Trainer(torch_target, corpus, recipe, MASK)
    second.load(tmp_path / "checkpoint.pt")
    second.run(every=3)
    assert [r.loss for r in second.history] == [r.loss for r in straight.history]
    for one, other in zip(second.module.parameters(), straight.module.parameters()):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    other = Trainer(torch_target, corpus, dataclasses.replace(recipe, rate=1e-4), MASK)
    with pytest.raises(ModelError, match="its recipe is"):
        other.load(tmp_path / "checkpoint.pt")


def numbered(answers: int) -> Corpus:
    """Samples whose token at position i is 1 + i: labels are their positions."""
    samples = [
        Sample(list(range(1, 41)), [(10, 14), (20, 40)], "chat", 0.0, False) for _ in range(answers)
    ]
    return Corpus.of(samples, {})


def test_slot_k_is_labelled_with_the_token_at_anchor_plus_k() -> None:
    """Slot 0 is the anchor's own token and is not trained; labels end where the target's text
    does."""
    batches = Batches(
        numbered(3), seed=1, block_size=8, mask_id=MASK, decay=4.0, tokens=128, blocks=60,
        device=torch.device("cpu"), shortest=64,
    )  # fmt: skip
    made = batches.at(5)
    assert made.labels.shape == made.weights.shape == (2, 30, 7)
    used = made.weights[..., 0] > 0
    anchors = made.anchors[used]
    assert sorted(set(anchors.tolist())) == [10, 11, 12, *range(20, 39)]
    assert (made.tokens[used][:, 0] == anchors + 1).all()
    assert (made.tokens[..., 1:] == MASK).all()
    end = torch.where(anchors < 14, 14, 40)[:, None]
    place = anchors[:, None] + torch.arange(1, 8)
    weights = made.weights[used]
    assert ((weights > 0) == (place < end)).all()
    assert (made.labels[used] == place + 1)[weights > 0].all()
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0))
    whole = weights[anchors == 20][0]
    torch.testing.assert_close(whole / whole[0], torch.exp(-torch.arange(7.0) / 4))
    same, other = batches.at(5), batches.at(6)
    assert torch.equal(same.anchors, made.anchors) and not torch.equal(other.anchors, made.anchors)


def test_no_context_at_or_after_the_anchor_reaches_a_block(torch_target, corpus) -> None:
    """Later features change nothing, the last one before the anchor does."""
    trainer = Trainer(torch_target, corpus, SMALL, MASK)
    batch = trainer.batches.at(0)
    _, features = torch_target.forward(batch.sequences, trainer.config.taps)
    anchor = int(batch.anchors[0, 0])
    want = trainer.draft(features, batch.tokens, batch.anchors)[0, 0]
    for position, changes in ((anchor - 1, True), (anchor, False), (anchor + 1, False)):
        changed = features.clone()
        changed[0, position] += 1
        made = trainer.draft(changed, batch.tokens, batch.anchors)[0, 0]
        assert torch.equal(made, want) is not changes, position


def test_kept_features_are_those_computed_on_the_fly(torch_target, corpus) -> None:
    trainer = Trainer(torch_target, corpus, SMALL, MASK)
    kept = Features(torch_target, trainer.batches, trainer.config.taps, keep=True)
    batch = trainer.batches.at(3)
    assert trainer.batches.inside(np.arange(24), 64).sum() == corpus.lengths.sum()
    fresh, stored = trainer.features.of(batch), kept.of(batch)
    for row, anchors in enumerate(batch.anchors):
        end = int(anchors.max())  # what lies behind the last anchor is nobody's
        torch.testing.assert_close(stored[row, :end], fresh[row, :end], rtol=1e-4, atol=1e-4)
    other = Trainer(torch_target, corpus, SMALL, MASK, features=kept, samples=np.arange(5))
    assert sum(map(len, other.batches.buckets.values())) == 5
    loss, _ = other.advance()
    assert torch.isfinite(loss)


def test_the_clock_may_end_a_run(torch_target, corpus) -> None:
    recipe = dataclasses.replace(SMALL, steps=10_000, warm_up=1)
    trainer = Trainer(torch_target, corpus, recipe, MASK)
    trainer.run(every=1000, seconds=1.0)
    assert 2 < trainer.step < 10_000
    assert trainer.history[-1].rate == pytest.approx(recipe.rate * recipe.last_rate)


def test_loss_by_chunks_is_torchs_loss() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(23, 16, requires_grad=True)
    head, labels, weights = torch.randn(50, 16), torch.randint(0, 50, (23,)), torch.rand(23)
    loss, right = head_loss(hidden, head, labels, weights, chunk=8)
    (3 * loss).backward()
    got, hidden.grad = hidden.grad.clone(), None
    logits = hidden @ head.T
    want = (F.cross_entropy(logits, labels, reduction="none") * weights).sum()
    (3 * want).backward()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(got, hidden.grad)
    assert torch.equal(right, logits.argmax(-1) == labels)


def test_layers_may_start_as_the_targets_last(torch_target, corpus) -> None:
    """With its heads' norms out of the way, context goes through what the target's layer does."""
    recipe = dataclasses.replace(SMALL, layers=2, ffn=TARGET.ffn, start="target")
    trainer = Trainer(torch_target, corpus, recipe, MASK)
    weights = target()
    layer = trainer.module.layers[0]
    np.testing.assert_array_equal(
        layer.mlp.down_proj.weight.detach(), weights.tensor("layers.3.down")
    )
    _, features = torch_target.forward(torch.tensor([[1, 2, 3]]), trainer.config.taps)
    context = trainer.module.hidden_norm(trainer.module.fc(features.flatten(2)))
    last, gain = features[:, :, -1], torch.from_numpy(weights.tensor("layers.3.attn_norm"))
    torch.testing.assert_close(context, F.rms_norm(last, gain.shape, gain, 1e-6))
    with pytest.raises(ValueError, match="cannot start a drafter of ffn 80"):
        start_module(
            Trainer(torch_target, corpus, dataclasses.replace(SMALL, ffn=80), MASK).module,
            torch_target, "target",
        )  # fmt: skip


def test_a_corpus_is_read_back_and_split_by_prompt(tmp_path) -> None:
    samples = [
        Sample([5, 6, 7, 8, 9], [(1, 2), (3, 5)], "code", 0.0, False),
        Sample([70_000, 1], [(1, 2)], "list", 0.75, True),
    ]
    Corpus.of(samples, {"seed": 4}).save(tmp_path / "corpus.npz")
    read = Corpus.load(tmp_path / "corpus.npz")
    assert [read.sample(i) for i in range(2)] == samples
    assert read.about["seed"] == 4 and read.answer_tokens == 4
    twice = Corpus.joined([read, read])
    assert [twice.sample(i) for i in range(4)] == samples * 2
    held_out = sum(is_held_out([i, i + 1]) for i in range(32_000))
    assert 900 < held_out < 1100
    (tmp_path / "corpus.npz").write_bytes(b"no zip")
    with pytest.raises(ModelError, match="cannot be read as a corpus"):
        Corpus.load(tmp_path / "corpus.npz")


def test_loops_are_seen() -> None:
    gram = list(range(16))
    assert loop_start(gram * 2) is None
    assert loop_start([9, *gram, 7, *gram, *gram, 4]) == 34
    assert loop_start([3] * 18) == 2


def test_walk_and_schedule_and_taps() -> None:
    anchors, accepted = np.array([12, 10, 11, 13, 14]), np.array([9, 1, 9, 9, 9])
    assert walk(anchors, accepted) == (12, 2)
    recipe = Recipe(steps=100, warm_up=10, rate=1.0, last_rate=0.1)
    assert recipe.rate_at(0) == pytest.approx(0.1) and recipe.rate_at(9) == 1
    assert recipe.rate_at(55) == pytest.approx(0.55) and recipe.rate_at(100) == pytest.approx(0.1)
    assert spread_taps(30) == (1, 8, 14, 21, 27)
    assert spread_taps(2) == (1,)
