"""Speculative steps of the real service warp, around a model that answers at once.

Whatever the drafter says, tokens are those of plain decoding; what it says decides only how many
come in a step. The tables are those of tests/cpu/test_speculation_*.py.
"""

import itertools
import os
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from host.errors import DeviceHung
from host.ring import push_abort
from host.wire import FinishReason

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

from tests.gpu import echo_rig  # noqa: E402
from tests.gpu.echo_rig import (  # noqa: E402
    LOGPROB,
    OPERATIONS,
    PHASE,
    SAID,
    VOCAB,
    Rig,
    drafting,
    expect,
    prompt,
    truth,
)

DEPTH = 7
PROMPT = prompt(57, 2)
TEXT = expect(PROMPT, 400)[0]
NEAR_WRAP = 2**31 - 50


@pytest.fixture(scope="module")
def kernel(load):
    return load("echo")


@pytest.fixture(scope="module", params=["chain", "tree"])
def rig(request, kernel):
    how = drafting(DEPTH + 1, budget=DEPTH, chain=request.param == "chain")
    with Rig(kernel, draft=how, completion_entries=1024) as rig:
        yield rig


def check(answer, ids, new, **rules):
    """An answer against plain decoding; the tokens of its steps."""
    answer.wait()
    want, reason, position = expect(ids, new, **rules)
    assert answer.ids == want
    assert answer.reason == reason
    assert answer.details[0] == len(want)
    assert answer.details[1] >= len(answer.accepted)
    assert answer.details[3] == position
    merged = np.isclose(answer.logprobs, echo_rig.MERGED, atol=2e-6)
    assert (merged | np.isclose(answer.logprobs, LOGPROB, atol=2e-6)).all()
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


# -- on the rig that all share ---------------------------------------------------------------------
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


# -- rigs of their own: a cooperative kernel waits for one that is resident, so these come last ----
def lead_of(k):
    return (5 * k + 3) % SAID


@pytest.mark.parametrize(
    ("how", "width", "depth"),
    [
        (dict(block=8), 1, 7),
        (dict(block=8, first_drafted=0), 1, 8),
        (dict(block=2, budget=1), 1, 1),
        (dict(block=16, budget=15), 1, 15),
        (dict(block=16, budget=15, chain=True), 1, 15),
        (dict(block=16, budget=127), SAID, 15),  # 121 rows
        (dict(block=16, budget=40), SAID, 5),  # all eight of five positions
        (dict(block=16, budget=16), SAID, 2),
        (dict(block=16, budget=1, first_drafted=0), 1, 1),
        (dict(block=5, budget=32), SAID, 4),
        (dict(block=8, budget=127, drafted=3), SAID, 3),
        (dict(block=8, budget=0), 1, 0),
    ],
)
def test_the_truth_is_followed_to_the_depth_there_is(kernel, how, width, depth):
    """Also by rows far down in a tree of more than 16, 32, 64 rows."""
    lead = lead_of if width > 1 else lambda k: 0
    with Rig(kernel, draft=drafting(**how)) as rig:
        rig.play(truth(PROMPT, TEXT, width=width, lead=lead))
        new = 1 + 6 * (depth + 1)
        assert one(rig, PROMPT, new) == [1] + [depth + 1] * 6
        rig.play(truth(PROMPT, TEXT, lambda k: k % 3 > 0, width=width, lead=lead))
        one(rig, PROMPT, 100)
        rig.play({})  # no candidates: trees of the root alone
        assert one(rig, PROMPT, 40) == [1] * 40
        one(rig, prompt(1), 30)
        one(rig, prompt(513), 30)


@pytest.mark.parametrize("ctx", [120, 128, 130])
def test_the_end_of_the_context(kernel, ctx):
    with Rig(kernel, ctx=ctx, draft=drafting(16, budget=31)) as rig:
        for left in range(1, 19):
            ids = prompt(ctx - left)
            text = expect(ids, 1000, ctx=ctx)[0]
            assert len(text) == left
            for right in (lambda k: True, lambda k: k % 3 > 0):
                rig.play(truth(ids, text, right, width=2))
                one(rig, ids, 1000, ctx=ctx)


@pytest.mark.parametrize("first", [2**63 - 40 - 2**62, 2**32 - 30])
def test_counters_near_their_wrap(kernel, first):
    with Rig(kernel, first=first, first_tag=NEAR_WRAP, draft=drafting(8)) as rig:
        for i in range(40):
            ids = prompt(1 + 10 * i, i)
            rig.play(truth(ids, expect(ids, 20)[0], lambda k: k % 4 > 0))
            one(rig, ids, 20)


def test_a_full_completion_ring_pauses_and_loses_nothing(kernel):
    with Rig(kernel, completion_entries=16, draft=drafting(8)) as rig:
        rig.play(truth(PROMPT, TEXT))
        with rig.link._lock:  # the poller cannot take anything
            answer = rig.submit(PROMPT, 400)
            end = time.monotonic() + 5
            while rig.wire.control[35] == 0 and time.monotonic() < end:
                time.sleep(0.001)
        check(answer, PROMPT, 400)
        assert answer.details[2] >= 1, "no pause was counted"


def test_of_two_aborts_of_one_place_the_newer_counts(kernel):
    with Rig(kernel, max_inflight=2) as rig:
        for _ in range(5):
            first = rig.submit(PROMPT, 3).wait()
            with rig.link.parked():
                answers = [rig.submit(PROMPT, 5000) for _ in range(2)]
                same = next(a for a in answers if (a.request_id - first.request_id) % 2 == 0)
                # as if the first had been aborted just before it ended
                push_abort(rig.wire, rig.link._abort_tail, first.request_id)
                rig.link._abort_tail += 1
                for answer in answers:
                    rig.link.abort(answer.request_id)
            assert same.wait().reason == FinishReason.ABORT
            assert [a.wait().reason for a in answers] == [FinishReason.ABORT] * 2


def test_where_the_time_goes_adds_up(kernel):
    with Rig(kernel, draft=drafting(8)) as rig:
        rig.play(truth(PROMPT, TEXT, lambda k: k % 5 > 0))
        one(rig, PROMPT, 400)
        rig.link.ping()
        split = rig.splits()
        assert split["tokens"] == 400
        parts = [split[name] for name in ("compact", "draft", "tree", "verify", "decide")]
        assert min(parts) >= 0 and split["tree"] > 0 and split["decide"] > 0
        assert sum(parts) <= split["total"]
        print(split)


HANG = """
    import sys, time, pathlib
    from cute_kernels.gpu.load import Kernel
    import torch
    torch.zeros(1, device="cuda")
    from tests.gpu.echo_rig import Rig, drafting, expect, prompt, truth
    from host.errors import DeviceError
    kernel = Kernel.read(pathlib.Path(sys.argv[1]) / "echo")
    rig = Rig(kernel, draft=drafting(16, budget=100))
    rig.play(truth(prompt(1), expect(prompt(1), 400)[0], width=8))
    rig.submit(prompt(1), 5).wait()
    rig.plant(77, int(sys.argv[2]))
    start = time.monotonic()
    try:
        rig.submit(prompt(1), 400).wait()
    except DeviceError as error:
        print(f"{type(error).__name__} after {time.monotonic() - start:.1f} s: {error}", flush=True)
    rig.link.close()
"""


@pytest.mark.parametrize("kind", ["DRAFT", "ROWS"])
def test_a_planted_hang_names_phase_and_cta(kind):
    """In a process of its own: the context of a trapped kernel serves nobody again."""
    from cute_kernels.gpu.board import Segment

    folder, number = os.environ["MEGADECODE_CUBINS"], str(int(Segment[kind]))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(HANG), folder, number],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    print(done.stdout, done.stderr[-2000:])
    assert done.returncode == 0
    assert done.stdout.startswith(DeviceHung.__name__)
    assert float(done.stdout.split()[2]) < 5
    assert f"in phase {OPERATIONS[PHASE]}: CTA 77 of {echo_rig.CTAS}" in done.stdout
