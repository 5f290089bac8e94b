"""Speculative steps of the real service warp, around a model that answers at once.

Whatever the drafter says, tokens are those of plain decoding; what it says decides only how many
come in a step. The tables are those of tests/cpu/test_speculation_*.py.
"""

import itertools
import time

import numpy as np
import pytest

from host.wire import FinishReason

pytest.importorskip("torch")

from tests.gpu.echo_rig import (
    LOGPROB,
    SAID,
    VOCAB,
    Rig,
    drafting,
    expect,
    prompt,
    truth,
)
from tests.gpu.wire_checks import PROMPT, TEXT, check, one, several

DEPTH = 7


@pytest.fixture(scope="module")
def kernel(echo):
    return echo


@pytest.fixture(scope="module", params=["chain", "tree"])
def rig(request, kernel):
    how = drafting(DEPTH + 1, budget=DEPTH, chain=request.param == "chain")
    with Rig(kernel, draft=how, completion_entries=1024) as rig:
        yield rig


@pytest.mark.parametrize("accepted", range(DEPTH + 1))
def test_every_stop_and_every_limit_in_an_accepted_path(rig, accepted):
    """The stop is the j-th token of the text, `most` tokens are allowed, and the first draft is
    right for `accepted` positions, the second throughout. Earliest wins; a stop on the last allowed
    token is a stop."""
    rig.play(truth(PROMPT, TEXT, lambda k: not 1 + accepted <= k <= 1 + DEPTH))
    several(rig, [
        (PROMPT, most, dict(stop=[TEXT[j], 31_999]))
        for j, most in itertools.product(range(DEPTH + 4), range(1, DEPTH + 5))
    ])  # fmt: skip


def test_stops_do_not_count_before_min_new_tokens(rig):
    rig.play(truth(PROMPT, TEXT))
    everything = list(dict.fromkeys(TEXT[:20]))
    several(rig, [
        (PROMPT, most, dict(min_new=least, stop=everything))
        for least, most in itertools.product(range(20), (3, 9, 20))
        if least <= most
    ])  # fmt: skip


@pytest.mark.parametrize("tokens", range(27))
def test_steps_end_where_the_request_does(rig, tokens):
    """Nothing is drafted for a first or a last token; in between as few steps as the depth
    allows."""
    rig.play(truth(PROMPT, TEXT))
    before = rig.splits()
    found = one(rig, PROMPT, tokens)
    assert len(found) == (1 + -(-(tokens - 1) // (DEPTH + 1)) if tokens else 0)
    rig.link.ping()  # the words are shown once a turn
    new = {name: value - before[name] for name, value in rig.splits().items()}
    assert new["tokens"] == tokens and new["steps"] == len(found)
    alone_at_the_end = tokens > 1 and (tokens - 1) % (DEPTH + 1) == 1
    assert new["drafted"] == max(len(found) - 1, 0) - alone_at_the_end
    assert new["rows"] == sum(found)


def test_a_bad_logit_in_a_path(rig):
    """NaN at the k-th token: those before it are delivered, whether drafted or not."""
    rng, bad = np.random.default_rng(3), {}
    while len(bad) < 9:
        ids = rng.integers(0, VOCAB, 3).tolist()
        tokens, reason, _ = expect(ids, 12)
        if reason == FinishReason.ERROR:
            bad[len(tokens)] = ids
    for ids in bad.values():
        said = expect(ids, 40)[0] + [5] * 40
        for right in (lambda i: True, lambda i: i != 3, lambda i: False):
            rig.play(truth(ids, said, right))
            one(rig, ids, 40)
    rig.play(truth(PROMPT, TEXT))
    one(rig, PROMPT, 30)


@pytest.mark.parametrize("count", [0, 1, 2, 5, 11, 19, 20])
def test_alternatives_behind_every_token(rig, count):
    rig.play(truth(PROMPT, TEXT, lambda k: k % 9 > 0))
    answer = rig.submit(PROMPT, 43, logprobs=count)
    check(answer, PROMPT, 43)
    for k, token in enumerate(answer.ids):
        want = [((token + 1 + i) % VOCAB, LOGPROB - i) for i in range(count)]
        assert answer.others(k) == want
    assert len(answer.accepted) < 20


def test_how_a_request_samples_reaches_the_deciders(rig):
    bias = {i: 0.25 * i - 30 for i in range(300)}
    for values in (
        dict(temperature=0.7, seed=5, top_k=40, top_p=0.5, min_p=0.125),
        dict(bias={7: -1.5}), dict(bias=bias, temperature=1.0), dict(),
    ):  # fmt: skip
        for length in (3, 57, 300):
            ids = prompt(length)
            rig.play(truth(ids, expect(ids, 50, **values)[0]))
            found = one(rig, ids, 50, **values)
            assert len(found) == 1 + -(-49 // (DEPTH + 1))


def test_aborts_while_it_drafts(rig):
    rig.play(truth(PROMPT, TEXT))
    for wait in (0, 1, 30, 100):
        answer = rig.submit(PROMPT, 12_000)
        other = rig.submit(prompt(5), 9)
        while len(answer.ids) < wait:
            time.sleep(0.0002)
        rig.link.abort(answer.request_id)
        assert answer.wait().reason == FinishReason.ABORT
        assert answer.ids[:400] == TEXT[: len(answer.ids)]
        check(other, prompt(5), 9)


def test_park_while_it_drafts(rig):
    rig.play(truth(PROMPT, TEXT, lambda k: k % 5 > 0))
    answer = rig.submit(PROMPT, 400)
    for _ in range(20):
        rig.link.park()
        rig.link.unpark()
    check(answer, PROMPT, 400)


def test_random_trees(rig):
    """Some candidates a position, the true one among them or not, anywhere."""
    rng = np.random.default_rng(5)
    for _ in range(10):
        said = {}
        for k, token in enumerate(TEXT):
            found = rng.permutation(VOCAB)[: rng.integers(0, SAID + 1)].tolist()
            if found and rng.random() < 0.8:
                found[int(rng.integers(len(found)))] = token
            said[len(PROMPT) + k] = (found, int(rng.integers(max(len(found), 1))))
        rig.play(said)
        one(rig, PROMPT, 200)
