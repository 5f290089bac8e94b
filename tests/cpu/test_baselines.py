"""The graph baselines' parts, run without a GPU: the same trees, the same greedy tokens."""

import numpy as np
import pytest
import tiny_drafter as td
import torch
from speculative import reference, target

from cute_kernels.cpu.tree import build_tree, make_frontier, make_tree
from experiments.baselines import KINDS, Setup, make
from experiments.baselines.trees import (
    DeviceTree,
    Planted,
    accept,
    ancestor_mask,
    best_first,
    candidates,
    root_paths,
)

PROMPT = [5, 17, 101, 33, 64, 90, 12]
NEW = 40


def scores(depth, width, seed, equal=False):
    """Sorted candidates; with `equal`, many of the same score, zero among them."""
    rng = np.random.default_rng(seed)
    values = -np.sort(rng.exponential(2.0, (depth, width)), axis=1)
    if equal:
        values = np.ceil(values)
    ids = np.stack([rng.permutation(width * 3)[:width] for _ in range(depth)])
    return values.astype(np.float32), ids


def oracle(values, ids, budget):
    tree, frontier = make_tree(budget), make_frontier(budget)
    widths = np.full(len(values), values.shape[1], np.int32)
    build_tree(7, ids.astype(np.int32), values, widths, 15, budget, False, tree, frontier)
    assert tree.rows[0] == budget + 1
    return tree


def planted(depth, budget, values, ids, chain=False):
    rows = budget + 1
    into = Planted(
        *(torch.zeros(rows, dtype=torch.int64) for _ in range(2)),
        torch.zeros(rows, rows, dtype=torch.uint8),
        torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, depth + 1, dtype=torch.int64),
    )  # fmt: skip
    build = DeviceTree(depth, budget, values.shape[1], chain, into)
    build(torch.from_numpy(values), torch.from_numpy(ids), torch.tensor([7]))
    build(torch.from_numpy(values), torch.from_numpy(ids), torch.tensor([7]))  # buffers are reused
    return into


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize(("depth", "budget"), [(1, 1), (3, 4), (7, 15), (7, 31), (15, 15)])
def test_trees_are_those_of_the_engine(depth, budget, equal):
    for seed in range(5):
        values, ids = scores(depth, budget, seed, equal)
        want = oracle(values, ids, budget)
        tokens, parents, depths = best_first(values.tolist(), ids.tolist(), 7, budget)
        got = planted(depth, budget, values, ids)
        for mine in ((tokens, parents, depths), (got.tokens, [-1, *got.parents[1:]], got.depths)):
            assert np.array_equal(mine[0], want.token)
            assert np.array_equal(mine[1], want.parent)
            assert np.array_equal(mine[2], want.depth)
        rows = range(budget + 1)
        mask = [[(int(bits[j // 64]) >> (j % 64)) & 1 for j in rows] for bits in want.mask]
        assert np.array_equal(ancestor_mask(parents), mask)
        assert np.array_equal(got.mask, mask)
        assert np.array_equal(root_paths(parents, depth + 1), got.paths)


def test_the_table_of_candidates_is_as_large_as_counted():
    assert len(candidates(7, 16)[0]) == 285
    assert len(candidates(7, 32)[0]) == 1379
    assert len(candidates(15, 16)[0]) == 397


def test_a_walk_takes_the_child_with_the_chosen_token():
    tokens, parents = [9, 1, 2, 1, 5], [-1, 0, 0, 1, 3]
    assert accept(tokens, parents, [1, 1, 0, 5, 8]) == [0, 1, 3, 4]
    assert accept(tokens, parents, [2, 1, 0, 5, 8]) == [0, 2]
    assert accept(tokens, parents, [3, 1, 0, 5, 8]) == [0]


@pytest.fixture(scope="module")
def expected():
    """Plain greedy decoding by the reference; every gap far above what fp32 sums differ by."""
    tokens, gaps = reference().greedy(PROMPT, NEW)
    assert min(gaps) > 1e-3
    return tokens


@pytest.mark.parametrize("rows", [1, 8, 16])
@pytest.mark.parametrize("name", list(KINDS))
def test_greedy_tokens_are_the_reference_s(name, rows, expected):
    if name == "graph_device_tree" and rows == 1:
        with pytest.raises(ValueError, match="needs a drafter"):
            make(name, Setup(target(), td.drafter(), rows=1, ctx=128))
        return
    made = make(name, Setup(target(), td.drafter(), rows=rows, ctx=128)).generate(PROMPT, NEW)
    assert made.tokens == expected
    assert sum(made.step_tokens) >= NEW - 1 and len(made.step_tokens) == made.steps


def test_a_prompt_in_chunks_gives_the_same_text(expected, monkeypatch):
    monkeypatch.setattr("experiments.baselines.core.CHUNK", 3)
    made = make("graph_whole_step", Setup(target(), td.drafter(), rows=8, ctx=128))
    assert made.generate(PROMPT, NEW).tokens == expected


@pytest.mark.parametrize("name", list(KINDS))
def test_acceptance_can_be_forced_and_freed(name, expected):
    """One rival for both: its own acceptance, a forced one, its own again."""
    made = make(name, Setup(target(), td.drafter(), rows=8, ctx=128))
    assert made.generate(PROMPT, NEW).tokens == expected
    made.force(0)
    made.pretend(40, 3)
    assert [len(made.step()) for _ in range(3)] == [1, 1, 1]
    made.force(1)
    made.pretend(40, 3)
    assert [len(made.step()) for _ in range(3)] == [2, 2, 2]
    made.force(None)
    assert made.generate(PROMPT, NEW).tokens == expected


def scripted(core, truth, seed=3):
    """In the drafter's place: the text's own next tokens, each at a random rank or missing."""
    rng = np.random.default_rng(seed)

    def draft(keys):
        values, ids = scores(core.depth, core.width, int(rng.integers(1 << 30)))
        ids = ids % td.TARGET.vocab
        at = int(core.length) + 1 - len(PROMPT)
        for d in range(core.depth):
            rank = int(rng.integers(0, 5))
            if rank < core.width and at + d < len(truth):
                ids[d] = np.where(ids[d] == truth[at + d], truth[at + d] + 1, ids[d])
                ids[d, rank] = truth[at + d]
        core.ids.copy_(torch.from_numpy(ids))
        core.logprobs.copy_(torch.from_numpy(values))

    return draft


@pytest.mark.parametrize("name", list(KINDS))
def test_accepted_paths_are_moved_where_they_belong(name, expected):
    """Branching paths: keys and values of accepted rows decide every later token."""
    made = make(name, Setup(target(), td.drafter(), rows=16, ctx=128))
    made.core.draft = scripted(made.core, expected)
    result = made.generate(PROMPT, NEW)
    assert result.tokens == expected
    assert result.steps < NEW * 0.7
    text = [*PROMPT, *expected]
    n = min(made.length, len(text) - 1)
    again = make(name, Setup(target(), td.drafter(), rows=16, ctx=128)).core
    again.prefill(text[:n])
    for mine, clean in zip(
        (made.core.target.stack.keys, made.core.target.stack.values),
        (again.target.stack.keys, again.target.stack.values),
    ):
        # Rows of the last step may still wait for the next graph's commit.
        settled = slice(0, n - 16)
        torch.testing.assert_close(mine[:, :, settled], clean[:, :, settled], atol=2e-5, rtol=1e-4)


def test_drafts_are_the_module_s():
    """The joined and static form of the drafter against the oracle, round after round."""
    config = td.variant(layer_types=("sliding_attention",) * 3, window=24, is_causal=False)
    drafter = td.drafter(config)
    made = make("graph_whole_step", Setup(target(), drafter, rows=16, ctx=128))
    core = made.core
    core.prefill(PROMPT * 4)
    oracle_module, text = td.module(drafter), PROMPT * 4
    for _ in range(3):
        anchor = int(core.anchor)
        core.draft(core.keys(len(text)))
        _, features = reference().forward(text, taps=config.taps)
        logits = oracle_module.draft(features, anchor, len(text))
        best = logits.log_softmax(-1).topk(core.width)
        torch.testing.assert_close(core.logprobs, best.values, atol=1e-4, rtol=1e-4)
        assert torch.equal(core.ids, best.indices)
        core.plant()
        core.verify(core.keys(len(text)))
        core.accept()
        text = [*text, anchor, *core.out[1 : int(core.out[0])].tolist()]
        core.commit()
        assert int(core.length) == len(text)


@pytest.mark.parametrize("forced", [0, 2])
@pytest.mark.parametrize("name", list(KINDS))
def test_a_forced_acceptance_commits_so_many(name, forced):
    setup = Setup(target(), td.drafter(), rows=16, ctx=128, forced=forced)
    made = make(name, setup)
    made.pretend(40, 5)
    counts = [len(made.step()) for _ in range(5)]
    assert max(counts) <= forced + 1 and (forced or counts == [1] * 5)
    assert made.length == 40 + sum(counts)


def test_stop_tokens_end_the_text(expected):
    made = make("graph_host_tree", Setup(target(), td.drafter(), rows=8, ctx=128))
    stop = expected[11]
    result = made.generate(PROMPT, NEW, [stop])
    assert result.tokens == expected[: expected.index(stop) + 1]


def test_what_is_not_known_is_said():
    with pytest.raises(ValueError, match="known: eager, graph_host_tree"):
        make("graph", Setup(target(), None, rows=1))
    with pytest.raises(ValueError, match="known: sdpa, triton"):
        make("eager", Setup(target(), None, rows=1, attention="none"))
