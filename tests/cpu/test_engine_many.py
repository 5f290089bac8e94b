"""Many prompts at once, from lists, threads and asyncio."""

import asyncio
import gc
import threading

import pytest
from engine_checks import check_all_returned
from tiny_model import greedy, prompt, tiny_engine

from megadecode import DeviceError, ParameterError, PromptError, SamplingParams

LENGTHS = (5, 90, 1, 33, 64, 7, 130, 12, 3)
LONG = SamplingParams(max_new_tokens=480, ignore_eos=True)


@pytest.fixture(scope="module")
def engine():
    with tiny_engine(max_inflight=4) as engine:
        yield engine
        check_all_returned(engine)


@pytest.fixture(scope="module")
def alone(engine):
    return [greedy(engine, prompt(n), 20)[0] for n in LENGTHS]


def short(new=20):
    return SamplingParams(max_new_tokens=new, ignore_eos=True)


# -- generate -----------------------------------------------------------------------------------


def test_generate_keeps_the_order_of_more_prompts_than_places(engine, alone):
    results = engine.generate((prompt(n) for n in LENGTHS), short())
    assert [r.token_ids for r in results] == alone
    assert [r.stats.prompt_tokens for r in results] == list(LENGTHS)
    assert engine.generate([]) == []


def test_generate_takes_parameters_for_each_prompt(engine, alone):
    news = [1, 0, 7, 20, 3, 2, 5, 4, 9]
    results = engine.generate([prompt(n) for n in LENGTHS], [short(new) for new in news])
    assert [r.token_ids for r in results] == [a[:n] for a, n in zip(alone, news)]


@pytest.mark.parametrize(
    ("prompts", "params", "kind", "message"),
    [
        (
            [prompt(3), [1, 200]], None, PromptError,
            "prompt 1: token id 200 at position 1 is outside the vocabulary of 200 tokens",
        ),
        (
            [prompt(3), [5]], [None, 7], ParameterError,
            "prompt 1: params is 7; give a SamplingParams",
        ),
        (
            "text", None, PromptError,
            "prompts is 'text'; give a list of prompts, [prompt] for a single one",
        ),
        (
            [1, 2], None, PromptError,
            "prompt 0: a prompt is text, chat messages or token ids, not int",
        ),
        (
            [{"role": "user", "content": "hi"}], None, PromptError,
            "prompt 0: a prompt is text, chat messages or token ids, not dict",
        ),
        ([[1], [2]], [short()], ParameterError, "1 params for 2 prompts; give one per prompt"),
        (
            [[1]], 5, ParameterError,
            "params is 5; give a SamplingParams, or a list of one per prompt",
        ),
    ],
)  # fmt: skip
def test_generate_refuses_before_it_sends_anything(engine, prompts, params, kind, message):
    before = engine._link._request_tail
    with pytest.raises(kind) as error:
        engine.generate(prompts, params)
    assert str(error.value) == message
    assert engine._link._request_tail == before


def test_what_the_device_cannot_do_is_refused_before_anything_is_sent(engine, monkeypatch):
    def refuse(params):
        raise ParameterError("not on this device")

    monkeypatch.setattr(engine._parts, "refuse", refuse)
    before = engine._link._request_tail
    for ask in (engine.submit, engine.stream, engine.agenerate, lambda ids: engine.generate([ids])):
        with pytest.raises(ParameterError, match="not on this device"):
            ask(prompt(3))
    assert engine._link._request_tail == before


def test_leaving_generate_aborts_what_is_in_flight(engine, monkeypatch):
    send, sent = engine._send, []

    def interrupted(*job):
        if len(sent) == 2:
            raise KeyboardInterrupt
        sent.append(send(*job))
        return sent[-1]

    monkeypatch.setattr(engine, "_send", interrupted)
    with engine.parked(), pytest.raises(KeyboardInterrupt):
        engine.generate([prompt(5)] * 4, LONG)
    assert [request.result(10).finish_reason for request in sent] == ["abort"] * 2
    check_all_returned(engine)


def test_many_threads_share_an_engine(engine, alone):
    results = {}

    def work(at):
        for _ in range(5):
            results.setdefault(at, []).append(greedy(engine, prompt(LENGTHS[at]), 20)[0])

    threads = [threading.Thread(target=work, args=(at,)) for at in range(len(LENGTHS))]
    [t.start() for t in threads]
    [t.join(60) for t in threads]
    assert results == {at: [text] * 5 for at, text in enumerate(alone)}


# -- stream -------------------------------------------------------------------------------------


def test_stream_refuses_at_the_call(engine):
    with pytest.raises(PromptError):
        engine.stream([])


def test_a_stream_that_nobody_reads_is_aborted(engine):
    with engine.parked():
        stream = engine.stream(prompt(5), LONG)
        request = stream._request
        del stream
        gc.collect()
    assert request.result(10).finish_reason == "abort"
    check_all_returned(engine)


# -- asyncio ------------------------------------------------------------------------------------


def test_await_gives_the_generation_and_gather_keeps_the_order(engine, alone):
    async def main():
        requests = [engine.agenerate(prompt(n), short()) for n in LENGTHS]
        return await asyncio.gather(*requests)

    assert [r.token_ids for r in asyncio.run(main())] == alone


def test_iterating_gives_chunks_and_awaiting_afterwards_the_whole(engine, alone):
    async def main():
        request = engine.agenerate(prompt(LENGTHS[1]), short())
        ids = [token async for chunk in request for token in chunk.token_ids]
        return ids, await request, await request

    ids, result, again = asyncio.run(main())
    assert ids == result.token_ids == alone[1]
    assert again is result


def test_the_event_loop_goes_on_while_a_request_runs_or_waits_for_a_place(engine):
    async def main():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticking = asyncio.create_task(tick())
        with engine.parked():
            held = [engine.submit(prompt(5), short(2)) for _ in range(4)]
            waiting = asyncio.create_task(engine.agenerate(prompt(5), short(2))._result())
            await asyncio.sleep(0.05)
            assert not waiting.done()
            assert ticks > 10
        result = await asyncio.wait_for(waiting, 20)
        ticking.cancel()
        return result, held

    result, held = asyncio.run(main())
    assert result.token_ids == held[0].result(10).token_ids


def test_nothing_is_sent_before_somebody_waits(engine):
    async def main():
        before = engine._link._request_tail
        engine.agenerate(prompt(5), LONG)
        await asyncio.sleep(0.01)
        assert engine._link._request_tail == before

    asyncio.run(main())


@pytest.mark.parametrize("how", ["await", "iterate", "before it has a place"])
def test_cancelling_aborts(engine, how):
    async def main():
        request = engine.agenerate(prompt(5), LONG)

        async def wait():
            if how == "iterate":
                async for _ in request:
                    pass
            else:
                await request

        task = asyncio.create_task(wait())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return request

    if how == "before it has a place":
        with engine.parked():
            held = [engine.submit(prompt(5), short(2)) for _ in range(4)]
            request = asyncio.run(main())
        assert request._request is None
        assert [h.result(10).finish_reason for h in held] == ["length"] * 4
    else:
        with engine.parked():
            request = asyncio.run(main())
        assert request._request.result(10).finish_reason == "abort"
    check_all_returned(engine)


def test_leaving_an_iteration_early_aborts(engine):
    async def main():
        request = engine.agenerate(prompt(5), LONG)
        async for chunk in request:
            assert chunk.token_ids
            break
        await asyncio.sleep(0.02)
        return request._request

    assert asyncio.run(main()).result(10).finish_reason == "abort"
    check_all_returned(engine)


def test_timeouts_of_asyncio_work(engine):
    async def main():
        with engine.parked(), pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await engine.agenerate(prompt(5), LONG)

    asyncio.run(main())
    check_all_returned(engine)


def test_agenerate_refuses_at_the_call(engine):
    with pytest.raises(PromptError):
        engine.agenerate([])
    with pytest.raises(ParameterError):
        engine.agenerate([1], {"max_new_tokens": 3})


def test_a_lost_device_reaches_whoever_awaits_or_iterates():
    async def main(engine):
        waiting = [
            asyncio.create_task(engine.agenerate(prompt(5), LONG)._result()) for _ in range(2)
        ]

        async def iterate():
            async for _ in engine.agenerate(prompt(5), LONG):
                pass

        waiting.append(asyncio.create_task(iterate()))
        await asyncio.sleep(0.01)
        with engine._link._changed:
            engine._link._lose(DeviceError("gone"))
        return await asyncio.gather(*waiting, return_exceptions=True)

    with tiny_engine() as engine, engine.parked():
        assert [str(error) for error in asyncio.run(main(engine))] == ["gone"] * 3


def test_the_reason_of_a_stop_is_named(engine):
    tokens, _ = greedy(engine, prompt(9), 8)
    result = engine.submit(prompt(9), SamplingParams(stop_token_ids=tokens[2:3])).result(10)
    assert (result.finish_reason, result.stop_reason) == ("stop", tokens[2])
    assert engine.submit(prompt(9), short(2)).result(10).stop_reason is None
