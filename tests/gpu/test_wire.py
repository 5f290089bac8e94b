"""The wire on a device: the real service warp, around a model that answers at once."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from host.errors import DeviceHung
from host.wire import CompletionKind, FinishReason, State

pytest.importorskip("torch")

import torch

from cute_kernels.gpu.service_block import Own, Stage
from tests.gpu.echo_rig import (
    BAD,
    CTAS,
    OPERATIONS,
    PHASE,
    VOCAB,
    Rig,
    calm,
    digest,
    expect,
    prompt,
)

NEAR_WRAP = 2**31 - 50


@pytest.fixture(scope="module")
def kernel(echo):
    return echo


@pytest.fixture(scope="module")
def rig(kernel):
    with Rig(kernel) as rig:
        yield rig


@pytest.fixture
def alone(rig):
    """For tests with a kernel of their own: a cooperative kernel waits for one that is resident."""
    with rig.link.parked():
        yield


def check(rig, ids, new, **rules):
    """One request against the rules; its answer."""
    answer = rig.submit(ids, new, **rules).wait()
    want, reason, position = expect(ids, new, **rules)
    assert answer.ids == want
    assert answer.reason == reason
    assert answer.details[0] == len(want)
    assert answer.details[3] == position
    np.testing.assert_allclose(answer.logprobs, answer.merged, atol=2e-6)
    return answer


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 255, 256, 257, 258, 513, 1000])
def test_every_prompt_token_arrives_in_its_place(rig, length):
    answer = check(rig, prompt(length), 20)
    assert answer.details[1] == 20
    assert np.diff(answer.steps).tolist() == [1] * 19
    assert sorted(answer.stamps) == answer.stamps


@pytest.mark.parametrize("new", [0, 1, 2])
def test_few_tokens(rig, new):
    check(rig, prompt(70), new)


def test_stop_rules_in_order(rig):
    ids = prompt(30)
    free = expect(ids, 40)[0]
    stops = [31_999, *free[5:6]]
    assert check(rig, ids, 40, stop=stops).reason == FinishReason.STOP
    check(rig, ids, 40, stop=stops, min_new=6)  # the sixth token counts
    assert check(rig, ids, 40, stop=stops, min_new=7).reason == FinishReason.LENGTH
    # a stop on the last allowed token is a stop
    assert check(rig, ids, 6, stop=stops).reason == FinishReason.STOP
    many = [*range(31_000, 31_031), free[3]]
    assert len(check(rig, ids, 40, stop=many).ids) == 4


def test_the_context_ends_a_request(kernel, alone):
    with Rig(kernel, ctx=128) as rig:
        answer = rig.submit(prompt(100), 500).wait()
        want = expect(prompt(100), 500, ctx=128)
        assert (answer.ids, answer.reason) == (want[0], FinishReason.LENGTH)
        assert len(answer.ids) == 28


def test_a_bad_logit_ends_its_own_request_only(rig):
    ids = calm(20, 60)
    h = 0
    for position, token in enumerate(ids):
        h = digest(h, token, position)
    bad = next([*ids[:19], t] for t in range(VOCAB) if (h - ids[19] + t) % BAD == 0)
    assert check(rig, bad, 60).reason == FinishReason.ERROR
    check(rig, ids, 5)


def test_requests_in_order_behind_each_other(rig):
    jobs = [(prompt(5 + i, i), 1 + 3 * i) for i in range(20)]
    answers = [rig.submit(*job) for job in jobs]
    for answer, (ids, new) in zip(answers, jobs):
        assert answer.wait().ids == expect(ids, new)[0]


def own(rig, word):
    """A word of the service warp's, while the device is parked."""
    return int(rig.block.view(torch.int64)[int(word)])


def test_aborts_of_requests_that_wait(rig):
    """One is in front, in the slot; all but two of those behind it end without a token."""
    with rig.link.parked():
        front = rig.submit(prompt(2000), 50)
        pending = [rig.submit(prompt(9, i), 50) for i in range(5)]
        for answer in pending[1:4]:
            rig.link.abort(answer.request_id)
    for answer in pending[1:4]:
        assert answer.wait().reason == FinishReason.ABORT and answer.ids == []
    assert front.wait().ids == expect(prompt(2000), 50)[0]
    for i in (0, 4):
        assert pending[i].wait().ids == expect(prompt(9, i), 50)[0]
    assert rig.link.free_blocks == len(rig.wire.params)


@pytest.mark.parametrize("wanted", [Stage.PREFILL, Stage.DECODE])
def test_an_abort_in_the_slot(rig, wanted):
    """The device is parked with the request there, so that it cannot end by itself before the abort
    is on the wire: not a token comes behind it, and the next request is as if nothing had been."""
    ids, met = calm(16_000, 300), []
    while wanted not in met and len(met) < 50:
        request = rig.submit(ids, 300)
        while wanted == Stage.DECODE and not request.ids:
            time.sleep(0.0002)
        with rig.link.parked():
            met.append(own(rig, Own.STAGE))
            tokens = own(rig, Own.NEW_TOKENS)
            rig.link.abort(request.request_id)
        request.wait()
    print(f"met in {wanted.name} at attempt {len(met)}")
    assert wanted in met, "the request was never there"
    assert request.reason == FinishReason.ABORT
    assert len(request.ids) == request.details[0] == (tokens if wanted == Stage.DECODE else 0)
    assert request.ids == expect(ids, 300)[0][: len(request.ids)]
    check(rig, prompt(8), 9)
    assert rig.link.free_blocks == len(rig.wire.params)


def test_an_abort_of_a_running_request_and_of_one_that_has_ended(rig):
    """By the device's stamps: behind an abort come the tokens of the step that runs, and of the one
    that may have been published before it was seen."""
    ids = calm(3, 12_000)
    rig.delay(1_000_000)  # ns: 12,000 such steps outlast any pause of the host
    try:
        request = rig.submit(ids, 12_000)
        while len(request.ids) < 5:
            time.sleep(0.0005)
        rig.link.abort(request.request_id)
        pushed_ns = time.monotonic_ns()
        request.wait()
    finally:
        rig.delay(0)
    assert request.reason == FinishReason.ABORT
    assert request.ids == expect(ids, 12_000)[0][: len(request.ids)]
    late = [stamp for stamp in request.stamps[:-1] if stamp > pushed_ns]
    assert len(late) <= 2
    rig.link.abort(request.request_id)  # nothing happens
    check(rig, prompt(8), 9)


def test_ping(rig):
    """Idle, the quickest says what device and wire need. While a request runs, an answer comes
    before the second of its further steps has ended: by the device's stamps, so that it does not
    count when the host gets round to reading them."""
    rig.link.ping()
    quickest = min(rig.link.ping() for _ in range(50))
    print(f"ping from Python, idle: {quickest * 1e6:.1f} us at best")
    assert quickest < 0.001
    stamps, dispatch = [], rig.link._dispatch

    def note(entry):
        if entry["kind"] == CompletionKind.PONG:
            stamps.append(int(entry["stamp_ns"]))
        dispatch(entry)

    busy = None
    rig.delay(1_000_000)
    rig.link._dispatch = note
    try:
        busy = rig.submit(calm(3, 12_000), 12_000)
        while len(busy.ids) < 5:
            time.sleep(0.0005)
        pushed = []
        for _ in range(20):
            pushed.append(time.monotonic_ns())
            rig.link.ping()
        assert not busy.ended.is_set()
    finally:
        del rig.link._dispatch
        if busy:
            rig.link.abort(busy.request_id)
            busy.wait()
        rig.delay(0)
    steps = [sum(a < t < b for t in busy.stamps) for a, b in zip(pushed, stamps, strict=True)]
    print(f"steps that ended between a ping and its answer: {steps}")
    assert sorted(steps)[10] <= 2


@pytest.mark.gpu
def test_what_the_hand_over_between_steps_costs(rig):
    """The echo computes nothing, so its step is all that the service warp does in one, most of it
    while a real step runs. With steps of 40 us only what is on their path is left: from the first
    CTA's results, before they are written, to the next descriptor."""
    answer = rig.submit(calm(3, 12_000), 4000).wait()
    steps = np.diff(answer.stamps[:-1]) / 1e3
    print(f"a step of nothing: median {np.median(steps):.2f} us, longest {steps.max():.1f} us")
    rig.delay(40_000)
    before = rig.splits()
    rig.submit(calm(3, 12_000), 1000).wait()
    rig.link.ping()
    path = (rig.splits()["decide"] - before["decide"]) / 1e6
    print(f"of a step of 40 us, from its end to the next descriptor: {path:.2f} us")
    rig.delay(0)
    assert path < np.median(steps) < 50


def test_park_and_go_on_while_busy(rig):
    launches = rig.link.launches
    ids = prompt(300)
    answer = rig.submit(ids, 3000)
    for _ in range(30):
        rig.link.park()
        assert rig.link.state() == State.PARKED
        rig.link.unpark()
    assert answer.wait().ids == expect(ids, 3000)[0]
    assert rig.link.launches >= launches + 2


def test_park_races_with_submits(kernel, alone):
    """The device parks by itself as often as it can while requests come: none is lost."""
    with Rig(kernel, park_after_s=0.0) as rig:
        rng = np.random.default_rng(3)
        for i in range(200):
            ids = prompt(1 + i % 7, i)
            assert rig.submit(ids, 2).wait(5).ids == expect(ids, 2)[0]
            time.sleep(float(rng.uniform(0, 60e-6)))
        print(f"{rig.link.launches} launches for 200 requests")
        assert rig.link.launches > 20


def test_two_threads_park_and_submit(kernel, alone):
    with Rig(kernel, park_after_s=0.0005) as rig:
        stop = threading.Event()

        def park():
            while not stop.is_set():
                rig.link.park()
                rig.link.unpark()  # a request may have been in flight
                time.sleep(0.0003)  # the link's lock is not fair

        thread = threading.Thread(target=park)
        thread.start()
        for i in range(100):
            ids = prompt(5, i)
            assert rig.submit(ids, 4).wait(10).ids == expect(ids, 4)[0]
        stop.set()
        thread.join(10)


@pytest.mark.parametrize("first", [2**63 - 40 - 2**62, 2**32 - 30])
def test_counters_near_their_wrap(kernel, alone, first):
    with Rig(kernel, first=first, first_tag=NEAR_WRAP) as rig:
        for i in range(60):
            ids = prompt(1 + 10 * i, i)
            assert rig.submit(ids, 5).wait().ids == expect(ids, 5)[0]
            if i % 10 == 0:
                rig.link.park()


def test_a_full_completion_ring_pauses_and_loses_nothing(kernel, alone):
    with Rig(kernel, completion_entries=16) as rig:
        with rig.link._lock:  # the poller cannot take anything
            answer = rig.submit(prompt(10), 200)
            end = time.monotonic() + 5
            while rig.wire.control[35] == 0 and time.monotonic() < end:
                time.sleep(0.001)
            held = rig.submit(prompt(5), 3)
            rig.link.abort(held.request_id)
        assert answer.wait().ids == expect(prompt(10), 200)[0]
        assert answer.details[2] >= 1, "no pause was counted"
        assert held.wait().reason == FinishReason.ABORT
        check(rig, prompt(4), 4)


@pytest.mark.gpu
def test_a_stopped_host_loses_nothing(alone):
    """SIGSTOP for a second: the device fills the ring and waits; all is there afterwards."""
    code = """
        import sys, time, pathlib
        from cute_kernels.gpu.load import Kernel
        import torch
        torch.zeros(1, device="cuda")
        from tests.gpu.echo_rig import OnGpu, Rig, expect, prompt
        kernel = Kernel.read(pathlib.Path(sys.argv[1]) / "echo")
        with Rig(OnGpu(kernel), completion_entries=128) as rig:
            rig.link.ping()
            answer = rig.submit(prompt(10), 3000)
            print("go", flush=True)
            assert answer.wait(30).ids == expect(prompt(10), 3000)[0]
            print("pauses", answer.details[2], flush=True)
    """
    folder = os.environ["MEGADECODE_CUBINS"]
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), folder], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "go\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.0)
    process.send_signal(signal.SIGCONT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    print(out)


HANG = """
    import sys, time, pathlib
    from cute_kernels.gpu.load import Kernel
    import torch
    torch.zeros(1, device="cuda")
    from tests.gpu.echo_rig import OnGpu, Rig, prompt
    from host.errors import DeviceError
    rig = Rig(OnGpu(Kernel.read(pathlib.Path(sys.argv[1]) / "echo")))
    rig.submit(prompt(10), 5).wait()
    rig.plant(77)
    start = time.monotonic()
    try:
        rig.submit(prompt(int(sys.argv[2])), 5).wait()
    except DeviceError as error:
        print(f"{type(error).__name__} after {time.monotonic() - start:.1f} s: {error}", flush=True)
    rig.link.close()
"""


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 100])  # in a decode step, in a prompt step
def test_a_planted_hang_names_phase_and_cta_and_lets_the_process_end(alone, length):
    """In a process of its own: the context of a trapped kernel serves nobody again."""
    start = time.monotonic()
    done = subprocess.run(
        [
            sys.executable, "-c", textwrap.dedent(HANG), os.environ["MEGADECODE_CUBINS"],
            str(length),
        ],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    print(done.stdout, done.stderr[-2000:], time.monotonic() - start)
    assert done.returncode == 0
    assert done.stdout.startswith(DeviceHung.__name__)
    assert float(done.stdout.split()[2]) < 5
    assert f"in phase {OPERATIONS[PHASE]}: CTA 77 of {CTAS}" in done.stdout
