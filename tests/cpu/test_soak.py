"""Nothing lost: thousands of requests, races of park and submit, and a host that stands still."""

import asyncio
import ctypes
import random
import threading
import time

import pytest
from engine_checks import check_all_returned
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_model import CONFIG, Spelled, greedy, model, prompt, tiny_engine

from host.wire import Activity, Word
from megadecode import ParameterError, PromptError, SamplingParams

REQUESTS = 2000
TEXTS = 40
LONGEST = 60


def hold_interpreter(seconds):
    """Keep the interpreter lock: no Python thread runs meanwhile."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


SMALL = dict(
    slots=16, completion_entries=256, request_entries=16, max_inflight=256, pool_bytes=65536,
    kv_tokens=1500,
)  # fmt: skip
"""Rings and pools that run full all the time."""


def test_two_thousand_requests_end_exactly_once_with_exactly_their_tokens():
    with tiny_engine(**SMALL) as engine:
        soak(engine, full_texts(engine))


def full_texts(engine, hows=({},)):
    """The longest text of every prompt and every way to sample, as (prompt length, how, tokens)."""
    kinds = [(1 + 5 * i, how) for i in range(TEXTS) for how in hows]
    requests = [
        engine.submit(
            prompt(n), SamplingParams(**{"max_new_tokens": LONGEST, "ignore_eos": True} | how)
        )
        for n, how in kinds
    ]
    return [(n, how, r.result(120).token_ids) for (n, how), r in zip(kinds, requests)]


def soak(engine, texts, count=REQUESTS):
    """`count` random requests for beginnings of `texts`, with aborts and slow readers; results."""
    rng = random.Random(1)
    start = [int(engine._parts.wire.control[w]) for w in (Word.COMPLETION_HEAD, Word.REQUEST_HEAD)]
    ended: dict[int, int] = {}
    submitted = []
    readers = []

    def read_slowly(request):
        seen = []
        for chunk in request:
            seen += chunk.token_ids
            time.sleep(0.002)
        assert seen == request.result(0).token_ids

    def count_ends(request):
        original = request.on_end

        def on_end(*details):
            ended[request.request_id] = ended.get(request.request_id, 0) + 1
            original(*details)

        request.on_end = on_end

    errors = []
    threading.excepthook, before = (lambda args: errors.append(args)), threading.excepthook
    try:
        for i in range(count):
            (length, how, text), new = rng.choice(texts), rng.randrange(LONGEST + 1)
            how = {"max_new_tokens": new, "ignore_eos": True} | how
            request = engine.submit(prompt(length), SamplingParams(**how), timeout=60)
            count_ends(request)
            submitted.append((request, text, new))
            if rng.random() < 0.15:
                rng.choice(submitted[-100:])[0].abort()
            if rng.random() < 0.03:
                readers.append(threading.Thread(target=read_slowly, args=(request,)))
                readers[-1].start()
            if i == count // 2:
                _stand_still(engine)
        outcomes = [(r.result(60), text, new) for r, text, new in submitted]
        for reader in readers:
            reader.join(30)
    finally:
        threading.excepthook = before
    assert not errors, errors
    aborted = 0
    for result, text, new in outcomes:
        assert result.token_ids == text[: len(result.token_ids)]
        assert result.error is None
        aborted += result.finish_reason == "abort"
        if result.finish_reason == "length":
            assert len(result.token_ids) == new
    assert count / 100 < aborted < count / 2
    assert set(ended.values()) == {1}
    check_all_returned(engine)
    end = [int(engine._parts.wire.control[w]) for w in (Word.COMPLETION_HEAD, Word.REQUEST_HEAD)]
    assert end[0] - start[0] > 6 * count
    assert end[1] - start[1] > 0.8 * count
    return [result for result, _, _ in outcomes]


def _stand_still(engine):
    """The loop goes on without Python until the completion ring has no room for another step."""
    pauses, steps = engine.stats().pauses, engine.stats().steps
    hold_interpreter(2)
    assert engine.stats().pauses > pauses
    assert engine.stats().steps > steps


def test_a_paused_loop_still_hears_an_abort_and_a_park():
    """With nobody taking completions, control is read all the same."""
    with tiny_engine(completion_entries=64) as engine:
        greedy(engine, prompt(4), 2)
        with engine._link._lock:  # the poller cannot hand anything out
            request = engine.submit(
                prompt(4), SamplingParams(max_new_tokens=400, ignore_eos=True), timeout=5
            )
            end = time.monotonic() + 5
            while engine.stats().pauses == 0 and time.monotonic() < end:
                hold_interpreter(0.01)
            assert engine.stats().pauses > 0
            assert engine._parts.wire.control[Word.ACTIVITY] == Activity.PAUSED
            beat = engine._parts.wire.control[Word.HEARTBEAT]
            request.abort()
            hold_interpreter(0.05)
            assert engine._parts.wire.control[Word.HEARTBEAT] > beat
            assert engine._parts.wire.control[Word.ABORT_HEAD] == 1
        assert request.result(10).finish_reason == "abort"
        check_all_returned(engine)


@pytest.mark.parametrize("races", [10_000])
def test_park_and_submit_races(races):
    """The loop parks the moment it is idle, again and again, while requests come at any moment."""
    with tiny_engine(park_after_s=0.0, slots=2) as engine:
        race_parks(engine, races)


def race_parks(engine, races, tokens=2, **how):
    """Requests and pings after waits of random length, against a loop that parks when idle."""
    rng = random.Random(2)
    want = {n: greedy(engine, prompt(n), tokens, **how)[0] for n in (1, 2, 3)}
    launches = engine.stats().launches
    control = engine._parts.wire.control
    for i in range(races):
        if i % 5 == 0:
            n = rng.choice((1, 2, 3))
            assert greedy(engine, prompt(n), tokens, **how)[0] == want[n]
        else:
            assert engine.ping() < 5
        for _ in range(rng.randrange(40)):
            control[Word.STATE]  # a short wait of random length
    assert engine.stats().launches - launches > races / 20
    check_all_returned(engine)


def test_forced_parks_race_with_submits():
    with tiny_engine(park_after_s=-1, slots=2) as engine:
        force_parks(engine, 300)


def force_parks(engine, requests, **how):
    """Two threads park the loop all the time while requests run."""
    want = greedy(engine, prompt(3), 20, **how)[0]
    stop = threading.Event()

    def park_often():
        while not stop.is_set():
            with engine.parked():
                time.sleep(0.0002)
            time.sleep(0.002)  # with two who take turns without a break nobody would run

    threads = [threading.Thread(target=park_often) for _ in range(2)]
    [t.start() for t in threads]
    try:
        for _ in range(requests):
            assert greedy(engine, prompt(3), 20, **how)[0] == want
    finally:
        stop.set()
        [t.join() for t in threads]
    check_all_returned(engine)


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3),
    st.binary(max_size=3), st.lists(st.integers(-5, 400), max_size=3),
)  # fmt: skip
SOUND = {
    "max_new_tokens": st.integers(6, 12),
    "temperature": st.one_of(st.just(0.0), st.floats(0, 3)),
    "stop_token_ids": st.lists(st.integers(0, 199), max_size=31),
    "ignore_eos": st.booleans(),
    "top_k": st.integers(0, 250),
    "top_p": st.floats(0, 1, exclude_min=True),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**64 - 1),
    "min_new_tokens": st.integers(0, 6),
    "logprobs": st.integers(0, 20),
    "logit_bias": st.dictionaries(st.integers(0, 199), st.floats(-200, 200), max_size=4),
    "stop": st.one_of(
        st.text("abcxyz\u00e9", min_size=1, max_size=3),
        st.lists(st.text("abc", min_size=1, max_size=2), max_size=3),
    ),
}
WILD = {name: st.one_of(sound, ANYTHING) for name, sound in SOUND.items()}
TOKENS = st.lists(st.integers(0, CONFIG.vocab - 1), min_size=1, max_size=70)
TEXT = st.text(min_size=1, max_size=20)
ROLES = st.sampled_from(["user", "assistant", "system"])
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES, "content": TEXT}), min_size=1, max_size=3)
WILD_PROMPTS = st.one_of(
    TOKENS, st.lists(st.integers(-3, 203), max_size=6), st.lists(ANYTHING, max_size=3), ANYTHING,
    st.lists(st.dictionaries(st.text(max_size=3), ANYTHING, max_size=2), max_size=2),
    st.integers(500, 530).map(prompt),
)  # fmt: skip
WAYS = st.sampled_from(["submit", "stream", "generate", "agenerate", "leave"])


@st.composite
def requests(draw):
    """(way, prompt, parameters, chat): two in three in order, the others wrong somewhere."""
    if draw(st.integers(0, 2)):
        ids, values = st.one_of(TOKENS, TEXT, MESSAGES), st.fixed_dictionaries({}, optional=SOUND)
        return draw(WAYS), draw(ids), draw(values), draw(st.booleans())
    values = st.fixed_dictionaries({}, optional=WILD)
    chat = st.one_of(st.booleans(), st.booleans(), ANYTHING)
    return draw(WAYS), draw(WILD_PROMPTS), draw(values), draw(chat)


@pytest.fixture(scope="module")
def shared():
    with tiny_engine(model=Spelled(model()), slots=3, park_after_s=0.05) as engine:
        yield engine, greedy(engine, prompt(11), 12)[0]


def ask(engine, way, ids, params, chat):
    """One request through a part of the public interface; its result, or None when it was left."""
    if way == "submit":
        request = engine.submit(ids, params, chat=chat)
        if request.prompt_tokens + params.max_new_tokens > 100:
            request.abort()
        return request.result(20)
    if way == "generate":
        return engine.generate([ids, ids], [params, params], chat=chat)[1]
    if way == "agenerate":
        asking = engine.agenerate(ids, params, chat=chat)
        return asyncio.run(asyncio.wait_for(asking._result(), 20))
    for chunk in engine.stream(ids, params, chat=chat):
        assert chunk.text or chunk.token_ids
        if way == "leave":
            break
    return None


def any_parameters(shared, way, ids, values, chat):
    """Refused with a message, or served to the end; the engine stays as it was either way."""
    engine, want = shared
    neighbour = engine.submit(prompt(11), SamplingParams(max_new_tokens=12, ignore_eos=True))
    try:
        params = SamplingParams(**{"max_new_tokens": 12} | values)
        result = ask(engine, way, ids, params, chat)
    except (ParameterError, PromptError) as error:
        assert str(error)
    else:
        if result is not None:
            assert result.finish_reason in ("stop", "length", "abort")
            assert len(result.token_ids) == len(result.logprobs) <= params.max_new_tokens
            assert (result.stop_reason is not None) == (result.finish_reason == "stop")
            assert not any(stop in result.text for stop in params.stop) or params.min_new_tokens
    assert neighbour.result(20).token_ids == want


QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=400, deadline=None, suppress_health_check=QUIET)
@given(asked=requests())
def test_any_parameters_are_refused_or_served(shared, asked):
    any_parameters(shared, *asked)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=10_000, deadline=None, suppress_health_check=QUIET)
@given(asked=requests())
def test_ten_thousand_parameter_sets(shared, asked):
    any_parameters(shared, *asked)


def test_after_all_of_it_nothing_is_missing(shared):
    check_all_returned(shared[0])
