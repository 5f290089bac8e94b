"""What cannot be served is refused at the call, with a message that says what to do."""

import dataclasses
import re

import numpy as np
import pytest
from tiny_model import greedy, prompt, tiny_engine

from megadecode import (
    DeviceError,
    DeviceHung,
    DeviceUnavailable,
    Engine,
    MegadecodeError,
    ModelConfig,
    ModelError,
    ParameterError,
    PromptError,
    QueueFull,
    SamplingParams,
    aliases,
)
from megadecode.models.random_model import random_model


@pytest.fixture(scope="module")
def engine():
    with tiny_engine(kv_tokens=300) as engine:
        want = greedy(engine, prompt(5), 5)
        yield engine
        # Nothing that was refused has disturbed the engine.
        assert greedy(engine, prompt(5), 5)[0] == want[0]
        assert engine.stats().inflight == 0


def refused(kind, message, call, *args, **kwargs):
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        call(*args, **kwargs)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "the prompt is empty; give at least one character, token or message"),
        ("", "the prompt is empty; give at least one character, token or message"),
        (np.zeros(0, int), "the prompt is empty; give at least one character, token or message"),
        (
            prompt(512),
            "the prompt has 512 tokens; with ctx=512 at most 511 fit. Shorten it or give the "
            "engine a larger ctx",
        ),
        ([1, 200], "token id 200 at position 1 is outside the vocabulary of 200 tokens"),
        ([-1], "token id -1 at position 0 is outside the vocabulary of 200 tokens"),
        ([2**70], f"token id {2**70} at position 0 is outside the vocabulary of 200 tokens"),
        ([1, 2.0], "token ids must be integers; position 1 holds 2.0"),
        ([True], "token ids must be integers; position 0 holds True"),
        ([[1]], "token ids must be integers; position 0 holds [1]"),
        (
            np.zeros((2, 2), int),
            "token ids must be integers in one dimension; the array is int64 of shape (2, 2)",
        ),
        (
            np.zeros(2),
            "token ids must be integers in one dimension; the array is float64 of shape (2,)",
        ),
        (b"text", "a prompt is text, chat messages or token ids, not bytes"),
        (None, "a prompt is text, chat messages or token ids, not NoneType"),
        (7, "a prompt is text, chat messages or token ids, not int"),
        ("text", "model 'tiny' has no tokenizer; give the prompt as token ids"),
        (
            [{"role": "user", "content": "hi"}],
            "model 'tiny' has no tokenizer; give the prompt as token ids",
        ),
    ],
)
def test_prompts(engine, ids, message):
    refused(PromptError, message, engine.submit, ids)


def test_what_can_never_fit_the_pages(engine):
    message = (
        "the request needs 7 KV pages of 64 positions, the engine has 5; ask for fewer tokens or "
        "give the engine more kv_tokens"
    )
    refused(PromptError, message, engine.submit, prompt(300), SamplingParams(max_new_tokens=100))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"max_new_tokens": -1},
            "max_new_tokens is -1; it must be between 0 and 2147483647",
        ),
        (
            {"max_new_tokens": 2**31},
            "max_new_tokens is 2147483648; it must be between 0 and 2147483647",
        ),
        ({"max_new_tokens": 1.5}, "max_new_tokens is 1.5; it must be an integer"),
        ({"max_new_tokens": None}, "max_new_tokens is None; it must be an integer"),
        ({"max_new_tokens": True}, "max_new_tokens is True; it must be an integer"),
        ({"temperature": -0.1}, "temperature is -0.1; it must be between 0 and 100"),
        ({"temperature": float("nan")}, "temperature is nan; it must be between 0 and 100"),
        ({"temperature": 10**400}, f"temperature is {10**400}; it must be between 0 and 100"),
        ({"temperature": "0"}, "temperature is '0'; it must be a number"),
        (
            {"top_k": -1},
            "top_k is -1; it must be between 0 and 2147483647; 0 keeps all tokens",
        ),
        ({"top_p": 0}, "top_p is 0; it must be above 0 (top_k=1 is greedy)"),
        ({"top_p": 1.01}, "top_p is 1.01; it must be between 0 and 1"),
        ({"min_p": -0.5}, "min_p is -0.5; it must be between 0 and 1"),
        ({"seed": 2**64}, f"seed is {2**64}; it must be between {-(2**63)} and {2**64 - 1}"),
        ({"seed": 1.5}, "seed is 1.5; it must be an integer"),
        (
            {"min_new_tokens": 9, "max_new_tokens": 8},
            "min_new_tokens is 9, more than max_new_tokens, 8",
        ),
        ({"stop": ""}, "a stop string is ''; it must be text of 1 to 1000 characters"),
        ({"stop": [5]}, "a stop string is 5; it must be text of 1 to 1000 characters"),
        ({"stop": 5}, "stop is 5; it must be a sequence of text"),
        ({"stop": ["a"] * 17}, "17 stop strings; at most 16 fit"),
        ({"logprobs": 21}, "logprobs is 21; it must be between 0 and 20"),
        ({"logit_bias": [1]}, "logit_bias is [1]; it must map token ids to numbers"),
        (
            {"logit_bias": {3: float("inf")}},
            "logit_bias[3] is inf; it must be between -10000 and 10000",
        ),
        ({"logit_bias": {"a": 1}}, "a logit_bias token id is 'a'; it must be an integer"),
        (
            {"logit_bias": dict.fromkeys(range(301), 1.0)},
            "logit_bias has 301 entries; at most 300 fit",
        ),
        ({"stop_token_ids": 5}, "stop_token_ids is 5; it must be a sequence of token ids"),
        ({"stop_token_ids": "ab"}, "stop_token_ids is 'ab'; it must be a sequence of token ids"),
        ({"stop_token_ids": ["a"]}, "a stop token id is 'a'; it must be an integer"),
        ({"ignore_eos": 1}, "ignore_eos is 1; it must be True or False"),
        (
            {"bean": 5},
            "unsupported sampling parameter 'bean'; this release knows max_new_tokens, "
            "temperature, top_k, top_p, min_p, seed, min_new_tokens, stop, stop_token_ids, "
            "ignore_eos, logprobs, logit_bias",
        ),
        ({"max_tokens": 5}, "unsupported sampling parameter 'max_tokens': use max_new_tokens"),
        (
            {"presence_penalty": 1.0, "n_predict": 4},
            "unsupported sampling parameter 'presence_penalty': penalties depend on the path at "
            "every node of a tree and are not in this release; 'n_predict': use max_new_tokens",
        ),
    ],
)
def test_sampling_parameters(values, message):
    refused(ParameterError, message, SamplingParams, **values)


def test_sampling_parameters_are_given_by_name():
    refused(
        ParameterError,
        "sampling parameters are given by name, as in SamplingParams(temperature=0.7)",
        SamplingParams, 0.7,
    )  # fmt: skip


def test_names_of_other_engines_lead_to_ours():
    ours = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(aliases._USE) <= ours
    assert not ours & set(aliases._HINTS)
    count = sum(len(names) for names in (*aliases._USE.values(), *aliases._WHY.values()))
    assert count == len(aliases._HINTS), "a name stands in two places"


def test_errors_have_one_base_and_a_built_in_one():
    for kind in (ModelError, ParameterError, PromptError):
        assert issubclass(kind, MegadecodeError) and issubclass(kind, ValueError)
    for kind in (DeviceError, DeviceHung, DeviceUnavailable, QueueFull):
        assert issubclass(kind, MegadecodeError) and issubclass(kind, RuntimeError)


def test_stop_ids_against_the_model(engine):
    refused(
        ParameterError, "stop token id 200 is outside the vocabulary of 200 tokens",
        engine.submit, [1], SamplingParams(stop_token_ids=(200,)),
    )  # fmt: skip
    refused(
        ParameterError, "logit_bias token id 200 is outside the vocabulary of 200 tokens",
        engine.submit, [1], SamplingParams(logit_bias={200: 1.0}),
    )  # fmt: skip
    refused(
        PromptError, "model 'tiny' has no tokenizer; give the prompt as token ids",
        engine.submit, [1], SamplingParams(stop="x"),
    )  # fmt: skip
    refused(
        ParameterError, "timeout is 'x'; it must be a number of seconds, or None",
        lambda: engine.submit([1], timeout="x"),
    )  # fmt: skip
    refused(
        ParameterError, "33 stop token ids, the model's own included; at most 32 fit",
        engine.submit, [1], SamplingParams(stop_token_ids=tuple(range(4, 36))),
    )  # fmt: skip
    params = SamplingParams(stop_token_ids=tuple(range(4, 36)), ignore_eos=True)
    assert engine.submit([1], params).result(10)
    refused(
        ParameterError, "params is {}; give a SamplingParams", engine.submit, [1], {}
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"ctx": 1}, ParameterError, "ctx is 1; it must be between 2 and 16777216"),
        ({"ctx": "8k"}, ParameterError, "ctx is '8k'; it must be an integer"),
        ({"ctx": True}, ParameterError, "ctx is True; it must be an integer"),
        ({"slots": 0}, ParameterError, "slots is 0; it must be between 1 and 16"),
        ({"slots": 17}, ParameterError, "slots is 17; it must be between 1 and 16"),
        ({"workers": 0}, ParameterError, "workers is 0; it must be between 1 and 16"),
        ({"weights": "int4"}, ParameterError, "weights is 'int4'; choose fp32 or bf16"),
        ({"chunk_rows": 100}, ParameterError, "chunk_rows is 100; it must be a multiple of 64"),
        ({"device": "tpu"}, ParameterError, "device is 'tpu'; choose auto, cpu or cuda"),
        ({"budget": 256}, ParameterError, "budget is 256; it must be between 0 and 255"),
        ({"budget": "all"}, ParameterError, "budget is 'all'; it must be an integer"),
        ({"shape": "bush"}, ParameterError, "shape is 'bush'; choose tree or chain"),
        ({"decode_rows": 0}, ParameterError, "decode_rows is 0; it must be between 1 and 256"),
        (
            {"deadline_s": 0},
            ParameterError,
            "deadline_s is 0; it must be a number of seconds above 0",
        ),
        (
            {"bogus": 1},
            ParameterError,
            "unknown engine option 'bogus'; besides the named ones: workers, decode_rows, "
            "max_inflight, completion_entries, request_entries, pool_bytes, first_sequence, "
            "deadline_s",
        ),
        (
            {"park_after_s": float("nan")},
            ParameterError,
            "park_after_s is nan; it must be a number of seconds",
        ),
        (
            {"park_after_s": "soon"},
            ParameterError,
            "park_after_s is 'soon'; it must be a number of seconds",
        ),
        (
            {"completion_entries": 16},
            ParameterError,
            "completion_entries is 16; 4 slots need at least 58: two steps' worst case. Use a "
            "larger ring or fewer slots",
        ),
    ],
)
def test_engine_options(options, kind, message):
    refused(kind, message, tiny_engine, **options)


def test_shapes_the_cpu_device_cannot_run():
    config = ModelConfig("odd", 1, 40, 2, 1, 20, 64, 100, 512)
    with pytest.raises(ValueError, match=r"head_dim|hidden"):
        Engine(random_model(config, 0), ctx=64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.encode([1], chat=1), "chat is 1; it must be True or False"),
        (lambda e: e.ping(0), "timeout is 0; it must be a number of seconds above 0"),
        (lambda e: e.trace(reset="x"), "reset is 'x'; it must be True or False"),
        (lambda e: tiny_engine(model=5), "model is 5; it must be a name or a path"),
        (lambda e: tiny_engine(draft=None), "draft is None; it must be a name or a path"),
        (
            lambda e: tiny_engine(weights=5),
            "weights is 5; choose fp32 or bf16",
        ),
        (
            lambda e: tiny_engine(pool_bytes=256),
            "pool_bytes is 256; one prompt of ctx=512 tokens needs 4960",
        ),
        (
            lambda e: tiny_engine(max_inflight=3),
            "max_inflight is 3; it must be a power of two",
        ),
    ],
)
def test_other_arguments(engine, call, message):
    refused(ParameterError, message, call, engine)


def test_results_time_out_without_ending(engine):
    with engine.parked():
        request = engine.submit(prompt(5), SamplingParams(max_new_tokens=3))
        with pytest.raises(TimeoutError, match=r"the request has not ended within 0\.01 s"):
            request.result(0.01)
    assert request.result(10)


def test_never_parking_may_be_said_in_any_way():
    for never in (float("inf"), -1, 1e12):
        with tiny_engine(park_after_s=never) as engine:
            assert greedy(engine, prompt(3), 2)[0]


def test_more_memory_than_there_is():
    with pytest.raises(ParameterError, match=r"no memory for \d+ KV pages \(.* GiB\)"):
        tiny_engine(ctx=512, kv_tokens=2**31)
