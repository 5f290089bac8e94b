"""When a speculating request ends, and what it reports: as if its tokens had come one by one."""

import itertools

import numpy as np
import pytest
import tiny_drafter as td
from engine_checks import check_all_returned
from speculative import (
    ANYHOW,
    BLOCK_16,
    CTX,
    engine,
    exact,
    half_right,
    ids,
    one,
    params,
    play,
    reference,
    run,
    scripted,
    target,
    truth,
)
from tiny_model import Spelled

PROMPT = ids(57, seed=2)
DEPTH = 7
VOCAB = td.TARGET.vocab


@pytest.fixture(scope="module")
def plain():
    with engine(model=Spelled(target())) as plain:
        yield plain


@pytest.fixture(scope="module")
def text(plain):
    """100 tokens behind `PROMPT`, bit for bit what plain decoding gives."""
    return one(plain, PROMPT, max_new_tokens=100, **ANYHOW)


@pytest.fixture(scope="module", params=["chain", "tree"])
def speculating(request):
    with scripted(model=Spelled(target()), budget=DEPTH, shape=request.param) as speculating:
        yield speculating
        check_all_returned(speculating)


def expected(tokens, stops, most, least=0):
    """Tokens and finish reason of a text that is scanned one token after the other."""
    for k, token in enumerate(tokens):
        if k + 1 >= least and token in stops:
            return tokens[: k + 1], "stop"
        if k + 1 == most:
            return tokens[:most], "length"
    raise AssertionError("the text is too short")


def check(result, text, want):
    tokens, reason = want
    assert result.token_ids == tokens
    assert result.finish_reason == reason
    assert exact(result)[1] == exact(text)[1][: len(tokens)]
    assert (
        result.stats.tokens
        == len(tokens)
        == sum(k * n for k, n in enumerate(result.stats.accepted))
    )


@pytest.mark.parametrize("accepted", range(DEPTH + 1))
def test_every_stop_and_every_limit_in_an_accepted_path(speculating, text, accepted):
    """B39, B41, B48: the stop is the j-th token of the text, `most` tokens are allowed, and the
    first draft is right for `accepted` positions, the second throughout. Earliest wins; a stop on
    the last allowed token is a stop."""
    said = truth(PROMPT, text.token_ids, lambda k: not 1 + accepted <= k <= 1 + DEPTH)
    play(speculating, said)
    jobs, wanted = [], []
    for j, most in itertools.product(range(DEPTH + 4), range(1, DEPTH + 5)):
        stop = text.token_ids[j]
        how = params(max_new_tokens=most, stop_token_ids=[stop, 201], **ANYHOW)
        jobs.append((PROMPT, how))
        wanted.append(expected(text.token_ids, {stop, 201}, most))
    for result, want in zip(run(speculating, jobs), wanted):
        check(result, text, want)
    assert {reason for _, reason in wanted} == {"stop", "length"}
    assert len({len(tokens) for tokens, _ in wanted}) == DEPTH + 4


def test_stops_do_not_count_before_min_new_tokens(speculating, text):
    play(speculating, truth(PROMPT, text.token_ids))
    everything = [int(t) for t in dict.fromkeys(text.token_ids[:20])]
    jobs, wanted = [], []
    for least, most in itertools.product(range(20), (3, 9, 20)):
        if least <= most:
            how = dict(max_new_tokens=most, min_new_tokens=least, stop_token_ids=everything)
            jobs.append((PROMPT, params(**how, **ANYHOW)))
            wanted.append(expected(text.token_ids, set(everything), most, least))
    for result, want in zip(run(speculating, jobs), wanted):
        check(result, text, want)


@pytest.mark.parametrize("config", [td.DRAFTER, BLOCK_16, td.variant(prediction="next")])
@pytest.mark.parametrize("ctx", [120, 128, 130])
def test_the_end_of_the_context(config, ctx):
    """B51, B54: no row, key or page beyond the table, whatever is still drafted near the end."""
    with (
        engine(ctx=ctx, slots=1) as plain,
        scripted(config, ctx=ctx, budget=31, slots=2) as speculating,
    ):
        for left in range(1, 19):
            prompt = ids(ctx - left)
            want = one(plain, prompt, max_new_tokens=1000, **ANYHOW)
            assert (len(want.token_ids), want.finish_reason) == (left, "length")
            for right in (lambda k: True, lambda k: k % 3 > 0):
                play(speculating, truth(prompt, want.token_ids, right))
                got = one(speculating, prompt, max_new_tokens=1000, **ANYHOW)
                assert exact(got) == exact(want)
        check_all_returned(speculating)


@pytest.mark.parametrize("new", [0, 1])
def test_requests_for_no_or_one_token_give_everything_back(speculating, text, new):
    """B95, B90."""
    play(speculating, truth(PROMPT, text.token_ids))
    for result in run(speculating, [(PROMPT, params(max_new_tokens=new, **ANYHOW))] * 9):
        assert result.token_ids == text.token_ids[:new]
        assert result.stats.steps == new
    check_all_returned(speculating)


def test_a_pool_for_one_request_at_a_time():
    """B28, B77: requests queue for pages and none runs out of them in the middle."""
    with engine(slots=1) as plain:
        jobs = [(ids(200, seed=i), params(max_new_tokens=100, seed=i)) for i in range(5)]
        want = [run(plain, [job])[0] for job in jobs]
    texts = [(prompt, result.token_ids) for (prompt, _), result in zip(jobs, want)]
    with scripted(budget=63, slots=4, kv_tokens=400) as speculating:
        play(speculating, half_right(texts, 1))
        assert [exact(r) for r in run(speculating, jobs)] == [exact(w) for w in want]
        check_all_returned(speculating)


# -- stop strings ---------------------------------------------------------------------------


def pieces(plain, text):
    """What the whole text says after each token, as far as it can be shown."""
    shown, found = "", []
    stream = plain._text_stream()
    for token in text.token_ids:
        shown += stream.push([token])
        found.append(shown)
    return found


def test_a_stop_string_ends_ids_logprobs_and_text_at_one_token(speculating, plain, text):
    """B45: strings of every length and place, cut by tokens and by steps in every way."""
    shown = pieces(plain, text)
    play(speculating, truth(PROMPT, text.token_ids, lambda k: k % 11 > 0))
    whole = shown[60]
    jobs, wanted = [], []
    for start, length in itertools.product(range(0, 100, 3), (1, 2, 3, 5, 9)):
        stop = whole[start : start + length]
        last = next(k for k, sofar in enumerate(shown) if stop in sofar)
        wanted.append((last + 1, whole[: whole.index(stop)]))
        how = params(max_new_tokens=100, stop=[stop, "no such text"], **ANYHOW)
        jobs.append((PROMPT, how))
    assert len({count % (DEPTH + 1) for count, _ in wanted}) == DEPTH + 1
    for result, (count, said) in zip(run(speculating, jobs), wanted):
        check_text(result, text, count, said)
    for result, (count, said) in zip(run(plain, jobs), wanted):
        check_text(result, text, count, said)


def check_text(result, text, count, said):
    assert result.finish_reason == "stop"
    assert result.token_ids == text.token_ids[:count]
    assert exact(result)[1] == exact(text)[1][:count]
    assert result.text == said


def test_of_two_stop_strings_the_first_to_be_complete_wins(speculating, plain, text):
    shown = pieces(plain, text)
    play(speculating, truth(PROMPT, text.token_ids))
    late, early = shown[20][-2:], shown[10][-4:]
    for stops in ([late, early], [early, late]):
        result = one(speculating, PROMPT, max_new_tokens=100, stop=stops, **ANYHOW)
        at = min(shown[20].index(stop) for stop in stops)
        assert result.text == shown[20][:at]
        assert exact(result) == exact(one(plain, PROMPT, max_new_tokens=100, stop=stops, **ANYHOW))


def test_a_stop_string_that_begins_and_never_ends_is_shown_in_the_end(speculating, plain, text):
    play(speculating, truth(PROMPT, text.token_ids))
    whole = one(plain, PROMPT, max_new_tokens=30, **ANYHOW).text
    result = one(speculating, PROMPT, max_new_tokens=30, stop=[whole[-5:] + "?"], **ANYHOW)
    assert (result.text, result.finish_reason) == (whole, "length")


# -- log-probabilities and biases -----------------------------------------------------------


@pytest.mark.parametrize("vocab", [12, VOCAB])
def test_alternatives_are_those_of_the_oracle(vocab):
    """0 to 20 of them, fewer where the vocabulary has fewer, at every place of a step."""
    config = td.variant(vocab=vocab, mask_token_id=vocab - 1)
    prompt = [int(i) % vocab for i in PROMPT]
    bias = {1: 3.0, 2: -200.0}
    with scripted(config, model=target(vocab), budget=31) as speculating:
        for count in (0, 1, 2, 5, 11, 19, 20):
            how = dict(max_new_tokens=25, logprobs=count, logit_bias=bias, **ANYHOW)
            play(speculating, {})
            text = one(speculating, prompt, **how)
            play(speculating, {
                len(prompt) + k: [(token, -0.1)] for k, token in enumerate(text.token_ids)
            })  # fmt: skip
            result = one(speculating, prompt, **how)
            assert exact(result) == exact(text)
            assert len(result.stats.accepted) == DEPTH + 2
            assert 2 not in result.token_ids
            logits, _ = reference(vocab).forward(prompt + result.token_ids[:-1])
            rows = logits[len(prompt) - 1 :].log_softmax(-1).numpy()
            for row, token, logprob in zip(rows, result.token_ids, result.logprobs):
                assert abs(row[token] - logprob) < 2e-5
            assert len(result.top_logprobs) == (25 if count else 0)
            for row, top in zip(rows, result.top_logprobs):
                assert len({i for i, _ in top}) == len(top) == min(count, vocab)
                np.testing.assert_allclose([p for _, p in top], [row[i] for i, _ in top], atol=2e-5)
                best = np.sort(row)[::-1][: len(top)]
                np.testing.assert_allclose([p for _, p in top], best, atol=2e-5)


def test_a_bias_forces_and_forbids(speculating, text):
    """Along accepted paths, too: what the drafter proposes and a bias forbids is never taken."""
    play(speculating, truth(PROMPT, text.token_ids))
    never = sorted(set(text.token_ids))[:30]
    result = one(speculating, PROMPT, logit_bias=dict.fromkeys(never, -1e4), **ANYHOW)
    assert not set(result.token_ids) & set(never)
    two = {17: 5000.0, 180: 5000.0}
    result = one(speculating, PROMPT, logit_bias=two, **ANYHOW)
    assert set(result.token_ids) == set(two)


def test_what_top_p_removes_is_never_accepted(speculating):
    """B29: every draft proposes all tokens but the likeliest; with top-k 1 only that one is out."""
    with engine() as plain:
        want = one(plain, PROMPT, temperature=1.0, seed=1, top_k=1)
        assert want.token_ids == one(plain, PROMPT).token_ids
    play(speculating, {p: [(i, -1.0 - 0.01 * i) for i in range(60)] for p in range(CTX)})
    for how in (dict(top_k=1), dict(top_p=1e-9), dict(min_p=1.0)):
        result = one(speculating, PROMPT, temperature=1.0, seed=1, **how)
        assert result.token_ids == want.token_ids
