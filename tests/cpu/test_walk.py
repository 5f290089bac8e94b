"""The evaluator's walk is the engine's, step for step, at temperature 0 and above."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_drafter as td
import torch
from speculative import engine, ids, one, reference
from test_noise import philox
from tree_cases import candidates as numpy_candidates
from tree_cases import sharp

from cute_kernels.cpu.tree import build_tree, child_with_token, make_frontier, make_tree
from megadecode.training.corpus import loop_start
from megadecode.training.evaluate import Text, candidates, evaluate, overall, score, truths
from megadecode.training.noise import choose, noise_words
from megadecode.training.walk import (
    accepted,
    policies,
    true_rows,
    walk,
)

CONFIG = td.variant()
SOME = td.variant(draft_tokens=tuple(range(5, 101)))


def features(tokens):
    """[positions, taps, hidden] of the tiny target."""
    return reference().forward(tokens, taps=CONFIG.taps)[1]


@pytest.mark.parametrize("how", [dict(), dict(temperature=1.0, seed=3), dict(ignore_eos=False)])
@pytest.mark.parametrize(
    ("rows", "config"), [("chain", CONFIG), (4, CONFIG), (16, SOME), (64, CONFIG), ("chain", SOME)]
)
def test_steps_are_those_of_the_engine(rows, config, how):
    """Also of a drafter that knows some of the tokens only."""
    drafter = td.drafter(config, seed=4)
    module = td.module(drafter)
    shape = dict(shape="chain", budget=7) if rows == "chain" else dict(budget=rows - 1)
    committed = 0
    with engine(drafter, **shape) as speculating:
        for prompt in (ids(20), ids(63), ids(64, 1), ids(90, 2)):
            result = one(speculating, prompt, max_new_tokens=50, **how)
            text = Text((*prompt, *result.token_ids), len(prompt), 50)
            kinds = policies((4, 16, 64))
            name = "chain" if rows == "chain" else f"N={rows}"
            steps = score(module, features(text.ids[:-1]), text, kinds).commits[name]
            histogram = np.bincount(steps, minlength=9)
            histogram[1] += 1  # the prompt's own token
            assert list(result.stats.accepted) == list(histogram[: len(result.stats.accepted)])
            assert sum(steps) == len(result.token_ids) - 1
            committed += sum(s > 1 for s in steps)
    assert committed > 0  # something was accepted, so that the comparison says something


def test_a_smaller_tree_is_the_beginning_of_a_larger_one():
    rng = np.random.default_rng(0)
    anchors, drafted, vocab, most = 40, 7, 60, 63
    made = [numpy_candidates(sharp(rng, drafted, vocab, 2.0), most, rng) for _ in range(anchors)]
    tokens, logprobs, widths = (np.stack(part) for part in zip(*made))
    truth = tokens[:, np.arange(drafted), rng.integers(0, 3, drafted)].astype(np.int32)
    depth = rng.integers(0, drafted + 1, anchors).astype(np.int32)
    rows = true_rows(tokens, logprobs, widths, truth, depth, most)
    tree, frontier = make_tree(most), make_frontier(most)
    for budget in (1, 3, 15, 31, 63):
        found = []
        for a in range(anchors):
            build_tree(
                0, tokens[a], logprobs[a], widths[a], depth[a], budget, False, tree, frontier
            )
            row, reached = 0, 0
            while reached < drafted:
                row = child_with_token(tree, row, truth[a, reached])
                if row < 0:
                    break
                reached += 1
            found.append(reached)
        assert accepted(rows, budget).tolist() == found
    assert len(set(found)) > 3


def test_candidates_are_in_the_engines_order():
    rng = np.random.default_rng(1)
    logits = (rng.integers(-8, 8, (20, 50)) / 4).astype(np.float32)  # full of ties
    logits[3, 5], logits[4, 6], logits[5, 7:] = np.nan, np.inf, -np.inf
    tokens, logprobs, widths = (t.numpy() for t in candidates(torch.from_numpy(logits), 50))
    expected, values, counts = numpy_candidates(logits, 50, rng)
    counts[4] = 0
    counts[5] = 7
    assert widths.tolist() == counts.tolist()
    for row in range(20):
        assert tokens[row, : widths[row]].tolist() == expected[row, : widths[row]].tolist()
        np.testing.assert_allclose(
            logprobs[row, : widths[row]], values[row, : widths[row]], atol=1e-6
        )


def test_noise_is_philox():
    seeds, positions = [0, 7, 2**64 - 1, 2**63 + 5], [0, 1, 2**31, 2**40 + 3]
    signed = torch.tensor([s - 2**64 if s >= 2**63 else s for s in seeds])
    words = noise_words(signed, torch.tensor(positions), 23)
    for row, (seed, position) in enumerate(zip(seeds, positions)):
        assert words[row].tolist() == philox(seed, position, 23).tolist()


def test_sampled_texts_are_the_engines():
    """Logits of the oracle and `choose` write, token by token, what the engine writes."""
    with engine() as plain:
        for temperature, seed in ((0.0, 0), (0.7, 1), (1.5, 2**63 + 5)):
            result = one(plain, ids(30), max_new_tokens=12, temperature=temperature, seed=seed)
            text = list(ids(30))
            for token in result.token_ids:
                logits, _ = reference().forward(text, logits_rows=[len(text) - 1])
                chosen = choose(
                    logits, torch.tensor([temperature]),
                    torch.tensor([seed - 2**64 if seed >= 2**63 else seed]),
                    torch.tensor([len(text)]),
                )  # fmt: skip
                assert chosen.tolist() == [token]
                text.append(token)


def test_walk_and_truth():
    assert walk(np.array([2, 0, 0, 7, 1, 0])) == [3, 3]
    assert walk(np.array([0, 0])) == [1, 1]
    assert walk(np.array([], np.int64)) == []
    text = Text((9, 9, 1, 2, 3), 2, 3)
    assert truths(text, 3).tolist() == [[2, 3, -1], [3, -1, -1]]


def test_looping_texts_count_apart():
    drafter = td.drafter(CONFIG, seed=4)
    with engine() as plain:
        written = [one(plain, ids(30, s), max_new_tokens=30) for s in range(3)]
    texts = [
        Text((*ids(30, s), *r.token_ids), 30, 30, domain="ab"[s % 2], context=512)
        for s, r in enumerate(written)
    ]
    texts.append(Text((*ids(30), *[5] * 40), 30, 40, domain="a", context=2048))
    found = evaluate(td.module(drafter), texts, features)
    every = found[0]
    assert (every["domain"], every["context"]) == (None, None)
    loops = sum(loop_start(t.answer) is not None for t in texts)
    assert loops >= 1
    assert every["texts"] == 4 - loops and every["looping"]["texts"] == loops
    assert overall(found).keys() == every["tau"].keys()
    assert all(len(row) == CONFIG.drafted for row in every["recall"].values())
