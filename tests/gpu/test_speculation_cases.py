"""Small conditions that have broken speculative decoders elsewhere, on a GPU.

A scripted engine (SmolLM2's real weights; candidates by position in the drafter's place) answers as
plain decoding does, and commits as many tokens a step as the script deserves. Environment: as
test_speculation.py.
"""

import itertools
import json
import os
import pathlib

import numpy as np
import pytest

from tests.gpu.needs import need

need("MEGADECODE_KERNELS", "MEGADECODE_MODEL", "MEGADECODE_TAU")

import torch  # noqa: E402

from cute_kernels.gpu.rank_plan import RANKED_BYTES, unpack_candidates  # noqa: E402
from megadecode import ParameterError  # noqa: E402
from megadecode.acceptance import propose  # noqa: E402
from megadecode.models.load import load_model  # noqa: E402
from tests.gpu.speculating import (  # noqa: E402
    close_all,
    exact,
    make,
    one,
    params,
    play,
    run,
    set_policy,
    truth,
)

KERNELS = os.environ["MEGADECODE_KERNELS"]
PROMPT = json.loads(pathlib.Path(os.environ["MEGADECODE_TAU"]).read_text())["prompts"][1]
ANYHOW = dict(temperature=1.5, seed=11, top_k=2000)  # so that a text hardly repeats itself
DEPTH, VOCAB, MASK, NEW = 7, 49152, 0, 400  # of the shipped drafter: a block of 8
SHAPES = {"chain": (DEPTH, True), "tree": (127, False)}


@pytest.fixture(scope="module")
def model():
    return load_model(os.environ["MEGADECODE_MODEL"])


@pytest.fixture(scope="module")
def engine(model):
    found = make(
        model, 1024, draft="auto", budget=127, script=propose([0], 0, vocab=VOCAB), kernels=KERNELS
    )
    assert found.stats().acceptance == "scripted"
    yield found
    close_all()


@pytest.fixture(scope="module")
def text(engine):
    """400 tokens behind `PROMPT`, decoded plainly."""
    set_policy(engine, 0)
    found = one(engine, PROMPT, max_new_tokens=NEW, **ANYHOW)
    assert found.stats.accepted == (0, NEW)
    return found


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


@pytest.mark.parametrize("shape", SHAPES)
def test_the_true_continuation_is_taken_to_the_depth_of_the_block(engine, text, shape):
    """B06: a block of 8, the anchor included, drafts 7 positions. B18: depth 1 works. D5, B48: a
    request ends exactly where it should, in as few steps as the depth allows."""
    play(engine, truth(PROMPT, text.token_ids, VOCAB))
    for depth in (1, 2, DEPTH):
        set_policy(engine, depth, shape == "chain")
        result = one(engine, PROMPT, max_new_tokens=1 + 6 * (depth + 1), **ANYHOW)
        check_same(result, text, 1 + 6 * (depth + 1))
        assert result.stats.accepted == histogram(depth + 1, 6)
    set_policy(engine, *SHAPES[shape])
    for tokens in range(3, 20):
        result = one(engine, PROMPT, max_new_tokens=tokens, **ANYHOW)
        check_same(result, text, tokens)
        assert result.finish_reason == "length"
        assert result.stats.steps == 1 + -(-(tokens - 1) // (DEPTH + 1))


@pytest.mark.parametrize("shape", SHAPES)
def test_wrong_candidates_cost_nothing_but_time(engine, text, shape):
    set_policy(engine, *SHAPES[shape])
    play(engine, truth(PROMPT, text.token_ids, VOCAB, lambda k: False))
    result = one(engine, PROMPT, max_new_tokens=40, **ANYHOW)
    check_same(result, text, 40)
    assert result.stats.accepted == (0, 40)


@pytest.mark.parametrize(("scores", "depth"), [((-0.1, -0.2), 4), ((-1.0, -1.0), 6)])
def test_truth_at_the_second_rank_is_found_by_a_tree_and_not_by_a_chain(
    engine, text, scores, depth
):
    """How deep 127 nodes reach along second candidates: with equal scores level by level, 2 + 4 +
    ... + 64 nodes; with others, 53 nodes are likelier than the truth at depth 4 and 132 than that
    at depth 5."""
    said = {
        len(PROMPT) + k: [((token + 1) % VOCAB, scores[0]), (token, scores[1])]
        for k, token in enumerate(text.token_ids)
    }
    play(engine, said)
    for shape, committed in (("chain", 1), ("tree", depth + 1)):
        set_policy(engine, *SHAPES[shape])
        result = one(engine, PROMPT, max_new_tokens=1 + 4 * committed, **ANYHOW)
        check_same(result, text, 1 + 4 * committed)
        assert result.stats.accepted == histogram(committed, 4)


@pytest.mark.parametrize("end", [np.nan, -np.inf, np.inf])
@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_position_without_finite_candidates_ends_the_draft(engine, text, shape, end, depth):
    """B15, D2: with `depth` usable positions in front, tau is depth + 1."""
    said = truth(PROMPT, text.token_ids, VOCAB)
    for k in range(1 + depth, NEW, depth + 1):  # the position behind `depth` good ones
        position = len(PROMPT) + k
        said[position] = [(said[position][0][0], end)]
    play(engine, said)
    set_policy(engine, *SHAPES[shape])
    tokens = 1 + 8 * (depth + 1)
    result = one(engine, PROMPT, max_new_tokens=tokens, **ANYHOW)
    check_same(result, text, tokens)
    assert result.stats.accepted == histogram(depth + 1, 8)


def test_a_drafter_whose_weights_hold_nan_changes_nothing(model, engine):
    """B15: of NaN logits nothing is drafted."""
    set_policy(engine, 0)
    want = one(engine, PROMPT, max_new_tokens=60)
    broken = make(model, 1024, draft="auto", budget=15, kernels=KERNELS)
    with broken.parked():
        broken._parts.memory["DRAFT_NORM"].fill_(float("nan"))
        torch.cuda.synchronize()
    result = one(broken, PROMPT, max_new_tokens=60)
    broken.close()
    assert exact(result) == exact(want)
    assert result.stats.accepted == (0, 60)


@pytest.mark.parametrize("token", [0, 5])
def test_token_0_and_mask_are_ordinary_tokens(engine, token):
    """B12: id 0 counts as a node; B64: a text may hold MASK, which is 0. Forced, and drafted."""
    how = dict(logit_bias={token: 1000.0}, max_new_tokens=41)
    set_policy(engine, 0)
    want = one(engine, PROMPT, **how)
    assert want.token_ids == [token] * 41
    for shape in SHAPES.values():
        set_policy(engine, *shape)
        play(engine, truth(PROMPT, want.token_ids, VOCAB))
        result = one(engine, PROMPT, **how)
        assert exact(result) == exact(want)
        assert result.stats.accepted == histogram(8, 5)
        play(engine, {p: [(0, -0.1), (1, -0.2)] for p in range(1024)})
        assert exact(one(engine, PROMPT, **how)) == exact(want)


@pytest.mark.parametrize("shape", SHAPES)
def test_mask_as_a_stop_id_ends_where_it_is_emitted_and_nowhere_else(engine, text, shape):
    """B65: blocks are full of MASK, and so are trees here; only emitted tokens are looked at."""
    count = next(k for k in range(60, 0, -1) if MASK not in text.token_ids[:k])
    said = truth(PROMPT, text.token_ids, VOCAB)
    for k in range(NEW):
        said[len(PROMPT) + k].append((MASK, -0.2))
    play(engine, said)
    set_policy(engine, *SHAPES[shape])
    result = one(engine, PROMPT, max_new_tokens=count, stop_token_ids=[MASK], **ANYHOW)
    check_same(result, text, count)
    assert result.finish_reason == "length"
    forced = one(engine, PROMPT, stop_token_ids=[MASK], logit_bias={MASK: 1000.0})
    assert (forced.token_ids, forced.finish_reason) == ([MASK], "stop")


def test_a_tree_without_branches_is_the_chain_over_200_rounds(engine, text):
    """B19, B81: one candidate a position, half of them right."""
    right = np.random.default_rng(4).random(NEW) < 0.5
    play(engine, truth(PROMPT, text.token_ids, VOCAB, lambda k: right[k]))
    found = []
    for chain in (True, False):
        set_policy(engine, DEPTH, chain)
        found.append(one(engine, PROMPT, max_new_tokens=NEW, **ANYHOW))
    check_same(found[0], text, NEW)
    assert exact(found[0]) == exact(found[1])
    assert found[0].stats.steps > 150
    assert found[0].stats.accepted == found[1].stats.accepted


def test_every_stop_and_every_limit_in_an_accepted_path(engine, text):
    """B39, B41, B48: the stop is the j-th token of the text, `most` tokens are allowed; drafts are
    right for `accepted` positions, then throughout. The earliest wins; a stop on the last allowed
    token is a stop."""
    set_policy(engine, *SHAPES["tree"])
    for accepted in (0, 3, DEPTH):
        wrong = range(1 + accepted, 2 + DEPTH)
        play(engine, truth(PROMPT, text.token_ids, VOCAB, lambda k, wrong=wrong: k not in wrong))
        jobs, wanted = [], []
        for j, most in itertools.product(range(DEPTH + 4), range(1, DEPTH + 5)):
            stop = text.token_ids[j]
            jobs.append((PROMPT, params(max_new_tokens=most, stop_token_ids=[stop, 201], **ANYHOW)))
            first = next(k for k, t in enumerate(text.token_ids) if t in (stop, 201))
            wanted.append((min(first + 1, most), "stop" if first < most else "length"))
        for result, (count, reason) in zip(run(engine, jobs), wanted, strict=True):
            check_same(result, text, count)
            assert result.finish_reason == reason
            committed = sum(k * n for k, n in enumerate(result.stats.accepted))
            assert result.stats.tokens == count == committed


def test_stops_do_not_count_before_min_new_tokens(engine, text):
    play(engine, truth(PROMPT, text.token_ids, VOCAB))
    everything = list(dict.fromkeys(text.token_ids[:20]))
    for least in range(1, 20):
        how = dict(max_new_tokens=20, min_new_tokens=least, stop_token_ids=everything)
        result = one(engine, PROMPT, **how, **ANYHOW)
        check_same(result, text, least)
        assert result.finish_reason == "stop"


@pytest.mark.parametrize("new", [0, 1, 2])
def test_nothing_is_drafted_for_a_last_token(engine, text, new):
    """B08, B90, B95, D5."""
    play(engine, truth(PROMPT, text.token_ids, VOCAB))
    set_policy(engine, *SHAPES["tree"])
    result = one(engine, PROMPT, max_new_tokens=new, **ANYHOW)
    check_same(result, text, new)
    assert sum(k * n for k, n in enumerate(result.stats.accepted)) == new
    stats = engine.stats()
    assert (stats.free_slots, stats.free_pages) == (1, stats.pages)  # B28, B77


@pytest.mark.parametrize("left", [1, 2, 5, 8, 9, 17])
def test_the_end_of_the_context(engine, text, left):
    """B51, B54, B70: no row, key or page beyond the table, whatever is still drafted near the end,
    which is a power of two."""
    prompt = (PROMPT + text.token_ids * 3)[: 1024 - left]
    set_policy(engine, 0)
    want = one(engine, prompt, max_new_tokens=1000, **ANYHOW)
    assert (len(want.token_ids), want.finish_reason) == (left, "length")
    for right in (lambda k: True, lambda k: k % 3 > 0):
        play(engine, truth(prompt, want.token_ids, VOCAB, right))
        for shape in SHAPES.values():
            set_policy(engine, *shape)
            assert exact(one(engine, prompt, max_new_tokens=1000, **ANYHOW)) == exact(want)


def test_what_top_k_removes_is_never_accepted(engine):
    """B29, B31: every position proposes 120 tokens, the likeliest among them or not."""
    set_policy(engine, 0)
    how = dict(max_new_tokens=48, top_k=1, temperature=1.0, seed=3)
    want = one(engine, PROMPT, **how)
    ids = np.random.default_rng(5).integers(0, VOCAB, (1024, 120))
    said = {}
    for p in range(1024):
        pairs = dict.fromkeys(ids[p].tolist())
        if 0 <= p - len(PROMPT) < 48:
            pairs.pop(want.token_ids[p - len(PROMPT)], None)
        said[p] = [(t, -0.01 * i) for i, t in enumerate(pairs)]
    play(engine, said)
    set_policy(engine, *SHAPES["tree"])
    result = one(engine, PROMPT, **how)
    assert exact(result) == exact(want) and result.stats.accepted == (0, 48)


def test_the_budget_does_not_change_what_is_drafted(model, engine):
    """B07: blocks have the drafter's size whatever the budget; a smaller budget ranks fewer
    candidates, the same ones."""
    set_policy(engine, 0)
    first, second = one(engine, PROMPT, max_new_tokens=2).token_ids
    assert first != second
    drafting = make(model, 1024, draft="auto", budget=127, kernels=KERNELS)
    assert drafting.stats().acceptance == "drafter"
    ranked = {}
    for budget in (127, 100, 16, 3, 1):
        set_policy(drafting, budget)
        result = one(drafting, PROMPT, stop_token_ids=[second])  # its one draft has full depth
        assert result.token_ids == [first, second]
        with drafting.parked():
            block = drafting._parts.memory["RANKED"].cpu().numpy()[: DEPTH * RANKED_BYTES]
        ids, logprobs, widths = unpack_candidates(block.reshape(DEPTH, RANKED_BYTES))
        assert (widths >= budget).all()
        ranked[budget] = ids[:, :budget], logprobs[:, :budget].view(np.int32)
    drafting.close()
    for budget, found in ranked.items():
        for ours, most in zip(found, ranked[127], strict=True):
            assert np.array_equal(ours, most[:, :budget])


def test_budgets_there_is_no_room_for_are_refused(model):
    with pytest.raises(ParameterError, match="budget is 128; device 'cuda' verifies at most 127"):
        make(model, draft="auto", budget=128, kernels=KERNELS)
