"""Speculation and sampling under load: nothing lost, no fault, and the target's distribution."""

import itertools
import math
import random

import numpy as np
import pytest
import tiny_drafter as td
from engine_checks import check_all_returned
from hypothesis import given, settings
from speculative import (
    BLOCK_16,
    engine,
    exact,
    half_right,
    ids,
    params,
    play,
    reference,
    run,
    scripted,
    target,
)
from test_soak import (
    QUIET,
    SMALL,
    any_parameters,
    force_parks,
    full_texts,
    race_parks,
    soak,
)
from test_soak import requests as any_request
from tiny_model import Spelled, greedy, prompt

FEW = 12
FEW_DRAFTER = td.variant(vocab=FEW, mask_token_id=FEW - 1)


def random_params(rng):
    """One way to sample, seeded so that its text is known."""
    how = dict(temperature=rng.choice((0, 0.7, 1.0, 1.5, 4.0)), seed=rng.getrandbits(64))
    for name, values in (
        ("top_k", (1, 5, 50)), ("top_p", (0.3, 0.9)), ("min_p", (0.01, 0.2)), ("logprobs", (1, 20)),
        ("logit_bias", ({5: 3.0, 9: -100.0}, {i: 0.1 * (i % 7) for i in range(200)})),
    ):  # fmt: skip
        if rng.random() < 0.4:
            how[name] = rng.choice(values)
    return how


@pytest.mark.parametrize("requests", [400, pytest.param(2000, marks=pytest.mark.slow)])
def test_thousands_of_requests_with_speculation_and_sampling(requests):
    rng = random.Random(3)
    with engine(slots=16, max_inflight=256, kv_tokens=16 * 512) as plain:
        texts = full_texts(plain, [random_params(rng) for _ in range(3)])
    with scripted(budget=15, **SMALL | {"slots": 5, "completion_entries": 512}) as speculating:
        play(speculating, half_right([(prompt(n), t) for n, _, t in texts], 1, most=40))
        results = soak(speculating, texts, requests)
    accepted = np.zeros(9, int)
    for result in results:
        accepted[: len(result.stats.accepted)] += result.stats.accepted
    assert (accepted[1:3] > 100).all() and accepted[3] > 5, accepted


def test_park_and_submit_races_with_speculation():
    with engine(BLOCK_16, budget=7, park_after_s=0.0, slots=2) as speculating:
        race_parks(speculating, 3000, tokens=5, temperature=1.0, seed=1)


def test_forced_parks_race_with_submits_and_speculation():
    with engine(slots=1) as plain:
        text = greedy(plain, prompt(3), 20, temperature=1.0, seed=2)[0]
    with scripted(budget=15, park_after_s=-1, slots=2) as speculating:
        play(speculating, half_right([(prompt(3), text)], 5))
        assert greedy(speculating, prompt(3), 20, temperature=1.0, seed=2)[0] == text
        force_parks(speculating, 150, temperature=1.0, seed=2)


@pytest.fixture(scope="module")
def shared():
    with engine(
        BLOCK_16, model=Spelled(target()), budget="auto", slots=3, park_after_s=0.05
    ) as speculating:
        yield speculating, greedy(speculating, prompt(11), 12)[0]


@settings(max_examples=200, deadline=None, suppress_health_check=QUIET)
@given(asked=any_request())
def test_any_parameters_are_refused_or_served(shared, asked):
    any_parameters(shared, *asked)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=5_000, deadline=None, suppress_health_check=QUIET)
@given(asked=any_request())
def test_five_thousand_parameter_sets(shared, asked):
    any_parameters(shared, *asked)


def test_after_all_of_it_nothing_is_missing(shared):
    check_all_returned(shared[0])


@pytest.mark.parametrize(
    "rounds", [2_000, pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
@pytest.mark.parametrize("budget", [15, "auto"])
def test_rounds_at_temperature_one_without_a_fault(rounds, budget):
    """Eight slots on a vocabulary so small that a random drafter is often right; every fifth
    request has a seed and must repeat what plain decoding gives."""
    rng = random.Random(rounds)
    model = target(FEW)
    with (
        engine(model=model, slots=1) as plain,
        engine(FEW_DRAFTER, model=model, slots=8, budget=budget) as speculating,
    ):
        committed = steps = 0
        while speculating.stats().steps < rounds:
            jobs = []
            for i in range(40):
                seed = rng.getrandbits(64) if i % 5 == 0 else None
                how = params(max_new_tokens=rng.randrange(1, 200), temperature=1.0, seed=seed)
                prompt = [rng.randrange(FEW) for _ in range(rng.randrange(1, 200))]
                jobs.append((prompt, how))
            results = run(speculating, jobs)
            for (_, how), result in zip(jobs, results):
                assert len(result.token_ids) == how.max_new_tokens
                assert min(result.token_ids) >= 0 and max(result.token_ids) < FEW
                committed += result.stats.tokens
                steps += result.stats.steps
            prompt, how = jobs[5 * rng.randrange(8)]
            at = jobs.index((prompt, how))
            assert exact(run(plain, [(prompt, how)])[0]) == exact(results[at])
        # How much `auto` drafts here depends on the machine's times, see test_policy for that; that
        # it drafts at all does not.
        assert committed > (1.5 if budget == 15 else 1.0) * steps
        check_all_returned(speculating)


def test_the_marginals_of_emitted_tokens_are_the_targets():
    """Total variation of the first and the third token over 3,000 seeds against the exact
    distribution, from the oracle's logits of all continuations.

    The distance of 3,000 draws from their own distribution has a mean of at most
    sum sqrt(2 p (1 - p) / (pi 3000)) / 2, and by McDiarmid's inequality exceeds its mean by
    sqrt(log(1000) / 6000) = 0.034 in one of a thousand cases.
    """
    seeds = 3000
    text = [int(i) % FEW for i in ids(20)]
    with engine(FEW_DRAFTER, model=target(FEW), budget=63, slots=16) as speculating:
        jobs = [(text, params(max_new_tokens=4, temperature=1.0, seed=s)) for s in range(seeds)]
        results = [r for i in range(0, seeds, 200) for r in run(speculating, jobs[i : i + 200])]
    accepted = np.sum([np.pad(r.stats.accepted, (0, 6 - len(r.stats.accepted))) for r in results],
                      axis=0)  # fmt: skip
    assert accepted[2] + accepted[3] > seeds / 2  # the third token is mostly an accepted node

    # One forward over the text, every token behind it, and every token behind each of those.
    n = len(text)
    tokens = [*text, *range(FEW), *(b for _ in range(FEW) for b in range(FEW))]
    positions = [*range(n), *[n] * FEW, *[n + 1] * FEW**2]
    mask = np.tril(np.ones((len(tokens),) * 2, bool))
    mask[n:, n:] = np.eye(len(tokens) - n, dtype=bool)
    for i in range(FEW**2):
        mask[n + FEW + i, n + i // FEW] = True
    logits, _ = reference(FEW).forward(tokens, positions, mask)
    rows = logits.double().softmax(-1).numpy()
    first, second, behind = rows[n - 1], rows[n : n + FEW], rows[n + FEW :]
    third = (first[:, None] * second).reshape(-1) @ behind
    assert abs(third.sum() - 1) < 1e-9
    for k, exactly in ((0, first), (2, third)):
        counts = np.bincount([r.token_ids[k] for r in results], minlength=FEW)
        distance = np.abs(counts / seeds - exactly).sum() / 2
        noise = np.sqrt(2 * exactly * (1 - exactly) / (np.pi * seeds)).sum() / 2
        assert distance < noise + math.sqrt(math.log(1000) / (2 * seeds)), (k, distance, noise)
    # The bound has teeth: another position's distribution does not pass for this one.
    assert np.abs(first - third).sum() / 2 > 0.06


def test_a_text_is_the_same_in_every_mode_and_mix():
    """Modes side by side over the same requests: off, chain, tree, auto; alone and in a crowd."""
    jobs = [
        ([i % FEW, 3, 5], params(max_new_tokens=60, temperature=t, seed=i, top_p=0.95))
        for i, t in itertools.product(range(6), (0.0, 1.0))
    ]
    found = []
    for how in (
        dict(),
        dict(draft=FEW_DRAFTER, budget=7, shape="chain"),
        dict(draft=FEW_DRAFTER, budget=63),
        dict(draft=FEW_DRAFTER),
    ):
        with engine(model=target(FEW), **how) as any_engine:
            found.append([exact(r) for r in run(any_engine, jobs)])
            text, values = jobs[-1]
            assert exact(run(any_engine, [(text, values)])[0]) == found[-1][-1]
    assert found[1:] == found[:1] * 3
