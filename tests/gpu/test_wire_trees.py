"""Speculative steps of the real service warp with drafters of many kinds, each on its own kernel: a
cooperative kernel waits for one that is resident, so none is kept."""

import os
import subprocess
import sys
import textwrap
import time

import pytest

from host.errors import DeviceHung
from host.ring import push_abort
from host.wire import FinishReason

pytest.importorskip("torch")

from cute_kernels.gpu.board import Segment
from tests.gpu import echo_rig
from tests.gpu.echo_rig import (
    OPERATIONS,
    PHASE,
    SAID,
    Rig,
    drafting,
    expect,
    prompt,
    truth,
)
from tests.gpu.wire_checks import PROMPT, TEXT, check, one

NEAR_WRAP = 2**31 - 50


@pytest.fixture(scope="module")
def kernel(echo):
    return echo


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
    from tests.gpu.echo_rig import OnGpu, Rig, drafting, expect, prompt, truth
    from host.errors import DeviceError
    kernel = Kernel.read(pathlib.Path(sys.argv[1]) / "echo")
    rig = Rig(OnGpu(kernel), draft=drafting(16, budget=100))
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


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["DRAFT", "ROWS"])
def test_a_planted_hang_names_phase_and_cta(kind):
    """In a process of its own: the context of a trapped kernel serves nobody again."""
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
