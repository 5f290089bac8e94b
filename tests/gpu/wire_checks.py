"""Requests to the echo kernel against plain decoding. Needs torch and a GPU, no model."""

import numpy as np

from tests.gpu.echo_rig import LOGPROB, expect, prompt

PROMPT = prompt(57, 2)
TEXT = expect(PROMPT, 400)[0]


def check(answer, ids, new, **rules):
    """An answer against plain decoding; the tokens of its steps."""
    answer.wait()
    want, reason, position = expect(ids, new, **rules)
    assert answer.ids == want
    assert answer.reason == reason
    assert answer.details[0] == len(want)
    assert answer.details[1] >= len(answer.accepted)
    assert answer.details[3] == position
    by_the_warp = np.isclose(answer.logprobs, answer.merged, atol=2e-6)
    assert (by_the_warp | np.isclose(answer.logprobs, LOGPROB, atol=2e-6)).all()
    return list(answer.accepted.values())


def ask(rig, ids, new, **rules):
    values = {name: value for name, value in rules.items() if name != "ctx"}
    return rig.submit(ids, new, **values)


def one(rig, ids, new, **rules):
    return check(ask(rig, ids, new, **rules), ids, new, **rules)


def several(rig, jobs):
    """[(prompt, tokens, rules)], as many at once as there are places."""
    for i in range(0, len(jobs), 32):
        part = jobs[i : i + 32]
        answers = [ask(rig, ids, new, **rules) for ids, new, rules in part]
        for answer, (ids, new, rules) in zip(answers, part, strict=True):
            check(answer, ids, new, **rules)
