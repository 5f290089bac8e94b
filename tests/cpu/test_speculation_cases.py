"""Scripted drafters and small conditions that have broken speculative decoders elsewhere."""

import dataclasses

import numpy as np
import pytest
import tiny_drafter as td
from engine_checks import check_all_returned
from speculative import (
    ANYHOW,
    BLOCK_16,
    CTX,
    drafts,
    engine,
    exact,
    give_times,
    ids,
    one,
    params,
    play,
    run,
    scripted,
    target,
    truth,
)

from cute_kernels.cpu.speculate import make_script
from megadecode import ParameterError
from megadecode.drafter import Drafter

PROMPT = ids(50)
NEXT = td.variant(prediction="next")
BLOCK_2 = td.variant(block_size=2)
VOCAB, MASK = td.TARGET.vocab, td.MASK


@pytest.fixture(scope="module")
def plain():
    with engine() as plain:
        yield plain


@pytest.fixture(scope="module")
def text(plain):
    """400 tokens behind `PROMPT` and the log-probabilities, sampled."""
    return one(plain, PROMPT, max_new_tokens=400, **ANYHOW)


@pytest.fixture(scope="module")
def chain():
    with scripted(budget=15, shape="chain") as chain:
        yield chain


@pytest.fixture(scope="module")
def tree():
    with scripted(budget=255) as tree:
        yield tree


def check_same(result, text, count):
    """The first `count` tokens of the text, bit for bit."""
    assert result.token_ids == text.token_ids[:count]
    assert exact(result)[1] == exact(text)[1][:count]


def histogram(of, count):
    """`accepted` of a request whose first step committed one token, `count` further ones `of`."""
    found = [0] * (max(of, 1) + 1)
    found[1] += 1
    found[of] += count
    return tuple(found)


# -- what is drafted ------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize(
    ("config", "depth"), [(td.DRAFTER, 7), (BLOCK_16, 15), (NEXT, 8), (BLOCK_2, 1)]
)
def test_the_true_continuation_is_taken_to_the_depth_of_the_block(text, config, depth, shape):
    """B06: a block of b rows, the anchor included, drafts b - 1 positions (b where the anchor
    predicts too); B18: depth 1 works. tau is the depth + 1."""
    tokens = 1 + 6 * (depth + 1)
    with scripted(config, budget=depth, shape=shape) as speculating:
        play(speculating, truth(PROMPT, text.token_ids))
        result = one(speculating, PROMPT, max_new_tokens=tokens, **ANYHOW)
    check_same(result, text, tokens)
    assert result.stats.accepted == histogram(depth + 1, 6)


def test_wrong_candidates_cost_nothing_but_time(text, chain, tree):
    for speculating in (chain, tree):
        play(speculating, truth(PROMPT, text.token_ids, lambda k: False))
        before = drafts(speculating)
        result = one(speculating, PROMPT, max_new_tokens=40, **ANYHOW)
        check_same(result, text, 40)
        assert result.stats.accepted == (0, 40)
        assert drafts(speculating) - before == 38  # neither the first token nor the last is drafted


@pytest.mark.parametrize("scores", [(-0.1, -3.0), (-1.0, -1.0)])
def test_truth_at_the_second_rank_is_found_by_a_tree_and_not_by_a_chain(text, chain, tree, scores):
    """Ties are broken by rank: of two equal scores the first candidate comes first, both fit."""
    said = {
        len(PROMPT) + k: [((token + 1) % VOCAB, scores[0]), (token, scores[1])]
        for k, token in enumerate(text.token_ids)
    }
    for speculating, committed in ((chain, 1), (tree, 8)):  # 2 + 4 + ... + 2^7 = 254 nodes
        play(speculating, said)
        result = one(speculating, PROMPT, max_new_tokens=1 + 5 * committed, **ANYHOW)
        check_same(result, text, 1 + 5 * committed)
        assert result.stats.accepted == histogram(committed, 5)


@pytest.mark.parametrize("end", [np.nan, -np.inf, np.inf])
@pytest.mark.parametrize("depth", [0, 1, 4])
def test_a_position_without_finite_candidates_ends_the_draft(text, chain, tree, end, depth):
    """B15, D2: with `depth` usable positions in front, tau is depth + 1."""
    for speculating in (chain, tree):
        said = truth(PROMPT, text.token_ids)
        for k in range(1 + depth, 400, depth + 1):  # the position behind `depth` good ones
            position = len(PROMPT) + k
            said[position] = [(said[position][0][0], end)]
        play(speculating, said)
        tokens = 1 + 8 * (depth + 1)
        result = one(speculating, PROMPT, max_new_tokens=tokens, **ANYHOW)
        check_same(result, text, tokens)
        assert result.stats.accepted == histogram(depth + 1, 8)


def test_candidates_of_probability_zero_are_left_out(text, tree):
    said = truth(PROMPT, text.token_ids)
    for pairs in said.values():
        pairs += [((pairs[0][0] + 5) % VOCAB, -np.inf), ((pairs[0][0] + 6) % VOCAB, -np.inf)]
    play(tree, said)
    result = one(tree, PROMPT, max_new_tokens=33, **ANYHOW)
    check_same(result, text, 33)
    assert result.stats.accepted == histogram(8, 4)


@pytest.mark.parametrize("tensor", ["fc.weight", "norm.weight", "layers.1.mlp.down_proj.weight"])
@pytest.mark.parametrize("share", [1.0, 0.01])
def test_a_drafter_whose_weights_hold_nan_changes_nothing(plain, tensor, share):
    """B15: of NaN logits nothing is drafted."""
    tensors = td.random_tensors(BLOCK_16)
    values = tensors[tensor]
    values[np.random.default_rng(1).random(values.shape) <= share] = np.nan
    values.flat[0] = np.nan
    jobs = [(ids(n), params(max_new_tokens=30, **how)) for n, how in ((70, {}), (9, ANYHOW))]
    want = run(plain, jobs)
    for shape in ("chain", "tree"):
        with engine(Drafter(BLOCK_16, tensors), budget=15, shape=shape) as speculating:
            for ours, theirs in zip(run(speculating, jobs), want):
                assert exact(ours) == exact(theirs)
                assert ours.stats.accepted == (0, 30)
            assert drafts(speculating) > 20


@pytest.mark.parametrize("token", [0, MASK])
def test_token_0_and_mask_are_ordinary_tokens(plain, token):
    """B12: id 0 counts as a node; B64: a text may hold MASK. Both are forced, and drafted."""
    how = dict(logit_bias={token: 1000.0}, max_new_tokens=41)
    want = one(plain, PROMPT, **how)
    assert want.token_ids == [token] * 41
    for options in (dict(budget=15, shape="chain"), dict(budget=15)):
        with scripted(**options) as speculating:
            play(speculating, truth(PROMPT, want.token_ids))
            result = one(speculating, PROMPT, **how)
            assert exact(result) == exact(want)
            assert result.stats.accepted == histogram(8, 5)
            play(speculating, {p: [(0, -0.1), (1, -0.2)] for p in range(CTX)})
            assert exact(one(speculating, PROMPT, **how)) == exact(want)


def test_mask_as_a_stop_id_ends_where_it_is_emitted_and_nowhere_else(text, chain, tree):
    """B65: blocks are full of MASK, and so are trees here; only emitted tokens are looked at."""
    assert MASK not in text.token_ids[:60]
    for speculating in (chain, tree):
        said = truth(PROMPT, text.token_ids)
        for k in range(400):
            said[len(PROMPT) + k].append((MASK, -0.2))
        play(speculating, said)
        result = one(speculating, PROMPT, max_new_tokens=60, stop_token_ids=[MASK], **ANYHOW)
        check_same(result, text, 60)
        assert result.finish_reason == "length"
        forced = one(speculating, PROMPT, stop_token_ids=[MASK], logit_bias={MASK: 1000.0})
        assert (forced.token_ids, forced.finish_reason) == ([MASK], "stop")


# -- budgets and shapes ---------------------------------------------------------------------


def test_a_budget_of_zero_decodes_plainly(text):
    """B08; the engine needs no drafter then."""
    with engine(budget=0) as speculating:
        assert speculating.drafter is None
        result = one(speculating, PROMPT, max_new_tokens=30, **ANYHOW)
        check_same(result, text, 30)
        assert result.stats.accepted == (0, 30)
    with pytest.raises(ParameterError, match="budget is 256"):
        engine(td.DRAFTER, budget=256)


def test_nothing_is_drafted_for_a_last_token(text, chain, tree):
    """B90, D5: one token asked for, or one left, is one plain step."""
    for speculating in (chain, tree):
        play(speculating, truth(PROMPT, text.token_ids))
        for tokens in (0, 1, 2):
            before = drafts(speculating)
            result = one(speculating, PROMPT, max_new_tokens=tokens, **ANYHOW)
            check_same(result, text, tokens)
            assert drafts(speculating) == before
            assert result.stats.accepted == ((0, tokens) if tokens else (0,))


@pytest.mark.parametrize("tokens", range(3, 27))
def test_trees_end_where_the_request_does(text, tree, tokens):
    """B48: exactly as many tokens as asked for, in as few steps as the depth allows."""
    play(tree, truth(PROMPT, text.token_ids))
    result = one(tree, PROMPT, max_new_tokens=tokens, **ANYHOW)
    check_same(result, text, tokens)
    assert result.finish_reason == "length"
    assert result.stats.steps == 1 + -(-(tokens - 1) // 8)


def test_a_tree_without_branches_is_the_chain_over_200_rounds(text):
    """B19, B81: one candidate a position, half of them right."""
    right = np.random.default_rng(4).random(CTX) < 0.5
    said = truth(PROMPT, text.token_ids, lambda k: right[k])
    found = []
    for shape in ("chain", "tree"):
        with scripted(budget=7, shape=shape) as speculating:
            play(speculating, said)
            found.append(one(speculating, PROMPT, max_new_tokens=400, **ANYHOW))
    check_same(found[0], text, 400)
    assert exact(found[0]) == exact(found[1])
    assert found[0].stats.steps > 200 - 20
    assert found[0].stats.accepted == found[1].stats.accepted


def test_the_budget_does_not_change_what_is_drafted(text):
    """B07: blocks have the drafter's size whatever the budget; a smaller budget ranks fewer
    candidates, the same ones. Depth never exceeds the block's."""
    how = dict(stop_token_ids=[text.token_ids[1]], **ANYHOW)
    assert text.token_ids[0] != text.token_ids[1]
    ranked, deepest = {}, {}
    for budget in (1, 3, 16, 100, 202, 255):
        with engine(td.DRAFTER, budget=budget, slots=1) as speculating:
            result = one(speculating, PROMPT, **how)  # its one draft is at full depth
            assert result.token_ids == text.token_ids[:2] and drafts(speculating) == 1
            loop = speculating._parts.loop
            width = min(budget, VOCAB)
            assert (loop.ranked.widths[0] == [width] * 7 + [0] * 8).all()
            ranked[budget] = loop.ranked.ids[0, :7, :width], loop.ranked.logprobs[0, :7, :width]
            rows = int(loop.trees.rows[0, 0])
            assert rows == budget + 1
            deepest[budget] = int(loop.trees.depth[0, :rows].max())
    for tokens, logprobs in ranked.values():
        width = tokens.shape[1]
        assert (tokens == ranked[255][0][:, :width]).all()
        assert logprobs.tobytes() == ranked[255][1][:, :width].tobytes()
    assert max(deepest.values()) <= 7


def test_a_budget_beyond_all_prefixes_gives_them_all():
    """D6: two tokens, depth 2, 100 nodes asked for, 6 exist."""
    vocab = 2
    config = td.variant(block_size=3, vocab=vocab, mask_token_id=1)
    with engine(model=target(vocab)) as plain:
        want = one(plain, [0, 1, 1], **ANYHOW)
    with engine(config, model=target(vocab), budget=100) as speculating:
        result = one(speculating, [0, 1, 1], max_new_tokens=40, **ANYHOW)
        assert exact(result) == exact(want)
        assert result.stats.accepted == histogram(3, 13)
    small = dataclasses.replace(config, block_size=8)
    with engine(small, model=target(vocab), budget=255) as speculating:
        assert exact(one(speculating, [0, 1, 1], **ANYHOW)) == exact(want)


def test_a_script_says_nothing_behind_its_end(text):
    short = make_script(np.array(text.token_ids[:10])[:, None], np.full((10, 1), -0.1), np.ones(10))
    with engine(td.DRAFTER, budget=7, script=short) as speculating:
        result = one(speculating, PROMPT, max_new_tokens=20, **ANYHOW)
        check_same(result, text, 20)
        assert result.stats.accepted == (0, 20)


def mostly_right(text, seed):
    """One candidate a position, three in four of them true."""
    hits = np.random.default_rng(seed).random(400) < 0.75
    return truth(PROMPT, text.token_ids, lambda k: bool(hits[k]))


def auto(text, said, row_us, draft_us=200):
    """An engine with an automatic budget on a machine whose steps take 1 ms and `row_us` a row:
    (the result of a request of 400 tokens, its tokens by step, how often the drafter ran)."""
    by_step = []
    with scripted(budget="auto") as speculating:
        play(speculating, said)
        with speculating.parked():
            give_times(speculating, row_us, draft_us)
            request = speculating.submit(PROMPT, params(max_new_tokens=400, **ANYHOW))
            on_pairs = request.on_pairs

            def note(ids, logprobs, accepted, step, stamp_ns):
                if not by_step or by_step[-1][0] != step:
                    by_step.append((step, accepted))
                on_pairs(ids, logprobs, accepted, step, stamp_ns)

            request.on_pairs = note
        result = request.result(120)
        check_same(result, text, 400)
        check_all_returned(speculating)
        return result, [accepted for _, accepted in by_step], drafts(speculating)


@pytest.mark.parametrize("seed", range(3))
def test_auto_drafts_while_it_pays_and_never_shows(text, seed):
    """Useful, useless and again useful stretches of a drafter; whatever the budget does, the text
    stays. Step times are given, so that what it does is the same on every machine."""
    said = mostly_right(text, seed)
    bad = range(100, 250)
    for k in bad:
        said[len(PROMPT) + k] = [((text.token_ids[k] + 1) % VOCAB, -0.01)]
    result, accepted, ran = auto(text, said, row_us=2)
    ends = np.cumsum(accepted)
    first, last = np.searchsorted(ends, [bad[0], bad[-1] + 1], side="right")
    assert ends[-1] == 400 and len(accepted) == result.stats.steps
    assert np.mean(accepted[:first]) > 1.5 and np.mean(accepted[last:]) > 1.3
    assert set(accepted[first + 1 : last]) == {1}
    assert ran < len(accepted) - 60, "it went on drafting what was never accepted"
    again, the_same, as_often = auto(text, said, row_us=2)
    assert (the_same, as_often, again.stats.accepted) == (accepted, ran, result.stats.accepted)


def test_auto_decodes_plainly_where_rows_cost_too_much(text):
    """The same drafter pays where a row costs little, and not where it and a draft cost more than
    they bring."""
    said = mostly_right(text, 1)
    cheap, _, often = auto(text, said, row_us=2)
    dear, _, seldom = auto(text, said, row_us=5000, draft_us=2000)
    assert cheap.stats.steps < 250 and often > 0.9 * cheap.stats.steps
    assert dear.stats.steps > 350 and seldom < 0.3 * dear.stats.steps
