"""Speculating engines on the tiny target, scripts in the drafter's place, and what to compare."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import tiny_drafter as td

from cute_kernels.cpu.speculate import make_script
from cute_kernels.plan import phase_number
from megadecode import Engine, SamplingParams
from megadecode.models.random_model import random_model
from megadecode.reference import Reference

CTX = 512
CANDIDATES = 64
BLOCK_16 = td.variant(block_size=16)
ANYHOW = dict(temperature=1.5, seed=11)
"""Sampled so that a text hardly repeats itself."""


@cache
def target(vocab=td.TARGET.vocab):
    """The tiny target with its own or another vocabulary; the same object every time."""
    return random_model(dataclasses.replace(td.TARGET, vocab=vocab), seed=5)


@cache
def reference(vocab=td.TARGET.vocab):
    """Its oracle, fp32."""
    return Reference(target(vocab).config, target(vocab).tensors())


def engine(draft="off", model=None, **options):
    """Two workers and four slots, plain unless a drafter's config (or a drafter) is given."""
    if isinstance(draft, td.DrafterConfig):
        draft = td.drafter(draft)
    settings = dict(ctx=CTX, slots=4, workers=2, park_after_s=2.0) | options
    return Engine(model or target(), draft=draft, **settings)


def scripted(config=td.DRAFTER, **options):
    """An engine whose drafter says what `play` tells it, and nothing until then."""
    positions = options.get("ctx", CTX) + 1
    none = np.zeros((positions, CANDIDATES))
    blank = make_script(none, none, none[:, 0])
    return engine(config, script=blank, **options)


def give_times(engine, row_us=2, draft_us=200):
    """A parked engine's automatic budget goes by these step times instead of the machine's: 1 ms
    and `row_us` a row, `draft_us` a draft."""
    given = engine._parts.loop.policy.given
    given[:] = 1_000_000 + 1000 * row_us * np.arange(len(given))
    given[0] = 1000 * draft_us


def play(engine, candidates):
    """What the drafter of a `scripted` engine says from now on: {position: [(id, logprob)]}."""
    with engine.parked():
        script = engine._parts.loop.script
        script.widths[:] = 0
        for position, pairs in candidates.items():
            script.widths[position] = len(pairs)
            for i, (token, logprob) in enumerate(pairs):
                script.ids[position, i] = token
                script.logprobs[position, i] = logprob


def truth(prompt, tokens, right=lambda k: True):
    """Candidates that hold the text's own k-th token where `right(k)`, else another one."""
    said = {}
    for k, token in enumerate(tokens):
        guess = token if right(k) else (token + 1) % td.TARGET.vocab
        said[len(prompt) + k] = [(guess, -0.1)]
    return said


def half_right(texts, seed, most=12, right=0.7):
    """Candidates in random order and with random scores for [(prompt, tokens)] side by side: the
    true token of each text is among them with probability `right`."""
    rng = np.random.default_rng(seed)
    said = {}
    for position in range(CTX + 1):
        ids = [
            tokens[position - len(prompt)]
            for prompt, tokens in texts
            if 0 <= position - len(prompt) < len(tokens) and rng.random() < right
        ]
        ids += rng.integers(0, td.TARGET.vocab, max(most - len(ids), 0)).tolist()
        ids = rng.permutation(list(dict.fromkeys(ids)))[:most]
        scores = np.sort(-rng.exponential(2.0, len(ids)))[::-1]
        said[position] = [(int(i), float(s)) for i, s in zip(ids, scores)]
    return said


def ids(length, seed=0):
    """A random prompt."""
    return np.random.default_rng([length, seed]).integers(0, 200, length).tolist()


def params(**values):
    return SamplingParams(**{"max_new_tokens": 40, "ignore_eos": True} | values)


def run(engine, jobs):
    """Results of [(prompt, params)], submitted at one step boundary."""
    with engine.parked():
        requests = [engine.submit(prompt, how) for prompt, how in jobs]
    results = [request.result(120) for request in requests]
    assert [result.error for result in results] == [None] * len(jobs)
    return results


def one(engine, prompt, **values):
    """The result of one request alone."""
    return run(engine, [(prompt, params(**values))])[0]


def exact(result):
    """Everything a request brings that must not depend on speculation, floats as bits."""

    def bits(values):
        return np.array(values, np.float32).view(np.int32).tolist()

    top = [[(i, bits([p])[0]) for i, p in pairs] for pairs in result.top_logprobs]
    return result.token_ids, bits(result.logprobs), top, result.finish_reason, result.text


def drafts(engine):
    """How often the drafter has run."""
    return int(engine._parts.trace[:, phase_number("draft_rank"), 0].sum())


JOBS = [
    (ids(20), params()),
    (ids(57), params(temperature=1.0, seed=7, top_p=0.9, top_k=50, min_p=0.01)),
    (ids(94), params(temperature=0.7, seed=1, logit_bias={3: 2.5, 150: 2.0, 7: -50.0})),
    (ids(3), params(temperature=2.0, seed=3, min_p=0.05, logprobs=3)),
    (ids(131), params(max_new_tokens=31, logprobs=20)),
    (ids(64), params(max_new_tokens=37, temperature=1.0, seed=2**63 + 5)),
    (ids(40), params(max_new_tokens=9, temperature=1.0, seed=9, top_k=8)),
]
"""Unequal lengths and parameters; prompts end before, at and behind the edge of a page."""


@cache
def alone():
    """The plain results of `JOBS`, one request at a time on one worker."""
    with engine(slots=1, workers=2) as plain:
        return [run(plain, [job])[0] for job in JOBS]


def jobs_script(seed, **how):
    """Candidates that are half right for all of `JOBS` at once."""
    texts = [(prompt, result.token_ids) for (prompt, _), result in zip(JOBS, alone())]
    return half_right(texts, seed, **how)


def check_jobs(engine):
    """`JOBS` side by side give what each gives alone; their acceptance histograms."""
    results = run(engine, JOBS)
    for job, (ours, theirs) in enumerate(zip(results, alone())):
        assert exact(ours) == exact(theirs), job
    return [result.stats.accepted for result in results]


def state_of(engine, result_id, positions, kv=None):
    """Keys and values at the first positions of a request, from pages nobody has taken since."""
    parts = engine._parts
    kv = kv or parts.target.kv
    slot = int(np.flatnonzero(parts.sched.slot["request_id"] == result_id)[0])
    pages = parts.target.batch.pages[slot, : -(-positions // 64)]
    keys = kv.k[:, pages].transpose(1, 3, 5, 0, 2, 4)  # page, tile, lane, layer, head, d
    values = kv.v[:, pages].transpose(1, 3, 0, 2, 4)  # page, position, layer, head, d
    return [a.reshape(64 * len(pages), *a.shape[-3:])[:positions].copy() for a in (keys, values)]
