"""Arguments of the wrong type fail at the call, whichever public function they are given to."""

import dataclasses
import inspect

import pytest
from tiny_model import CONFIG, model, prompt, tiny_engine

import megadecode
from megadecode import (
    Engine,
    ModelConfig,
    ParameterError,
    PromptError,
    Request,
    SamplingParams,
)
from megadecode.async_request import AsyncRequest
from megadecode.run import close_kept

WRONG = object()

# (function, parameter) -> values that must be refused. Every parameter of every public function
# has an entry: `test_every_parameter_is_in_the_table` sees to it.
PROMPTS = [5, None, WRONG, b"text", {"role": "user"}, [1.5], [True], [[1]], ["a", "b"]]
PARAMS = [5, {}, "greedy", WRONG]
FLAGS = [1, 0, None, "yes", WRONG]
WAITS = ["soon", True, float("nan"), [1], WRONG]
INTEGERS = ["8", 1.5, True, [1], WRONG]
NAMES = [5, None, True, ["a"], b"x", WRONG]
ENGINE = {
    "model": NAMES,
    "ctx": [*INTEGERS, None],
    "slots": INTEGERS,
    "device": NAMES,
    "draft": NAMES,
    "budget": [*INTEGERS, None],
    "shape": NAMES,
    "weights": [5, True, ["fp32"], b"fp32", WRONG],
    "kv_tokens": INTEGERS,
    "chunk_rows": INTEGERS,
    "park_after_s": [*WAITS, None],
    "device_options": None,  # below, one by one
}
OPTIONS = {
    "workers": INTEGERS,
    "decode_rows": INTEGERS,
    "max_inflight": INTEGERS,
    "completion_entries": INTEGERS,
    "request_entries": INTEGERS,
    "pool_bytes": INTEGERS,
    "first_sequence": INTEGERS,
    "deadline_s": [*WAITS, None],
}
REQUESTS = {"prompt": PROMPTS, "params": PARAMS, "chat": FLAGS}
METHODS = {
    "encode": {"prompt": PROMPTS, "chat": FLAGS},
    "submit": REQUESTS | {"timeout": WAITS},
    "stream": REQUESTS,
    "agenerate": REQUESTS,
    "generate": {
        "prompts": [5, None, "text", b"text", {}, WRONG, [5], [[1], "", 3]],
        "params": [5, "greedy", WRONG, [5], {}],
        "chat": FLAGS,
    },
    "trace": {"reset": FLAGS},
    "ping": {"timeout": [*WAITS, None, 0, -1]},
    "read_gb_per_s": {}, "stats": {}, "park": {}, "unpark": {}, "parked": {}, "close": {},
}  # fmt: skip
RUN = {
    "prompt": [*PROMPTS[:-1], "", []],
    "model": NAMES,
    "ctx": [*INTEGERS, None],
    "device": NAMES,
    "chat": FLAGS,
    "draft": NAMES,
    "budget": [*INTEGERS, None],
    "sampling": None,  # below: SamplingParams
}
NUMBERS = ["0.5", True, None, [1], WRONG]
SAMPLING = {
    "max_new_tokens": [*INTEGERS, None],
    "temperature": NUMBERS,
    "top_k": [*INTEGERS, None],
    "top_p": NUMBERS,
    "min_p": NUMBERS,
    "seed": INTEGERS,
    "min_new_tokens": [*INTEGERS, None],
    "stop": [5, True, None, [5], b"stop", WRONG],
    "stop_token_ids": [5, True, None, "ab", ["a"], [1.5], [True], WRONG],
    "ignore_eos": FLAGS,
    "logprobs": [*INTEGERS, None],
    "logit_bias": [5, None, [1], {"a": 1}, {1: "b"}, {1: None}, {1.5: 1}, WRONG],
}
POSITIVE = [0, -1, "8", 1.5, True, None, [1], WRONG]
MODEL = {
    "name": [5, None, b"x", WRONG],
    **dict.fromkeys(
        ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context_tokens"),
        POSITIVE,
    ),
    "rope_theta": ["1", True, None, 0, float("nan"), WRONG],
    "rms_eps": ["1", True, None, -1.0, float("inf"), WRONG],
    **dict.fromkeys(("tied_embeddings", "qkv_bias", "qk_norm"), FLAGS),
    "rope_scaling": [5, "yarn", {}, WRONG],
    "bos_id": ["1", 1.5, True, -1, 10**6, WRONG],
    "stop_ids": [5, None, [1], ("1",), (1.5,), (True,), (10**6,), WRONG],
}
REFUSED = (ParameterError, PromptError)


def cases(table):
    return [(name, value) for name, values in table.items() for value in values or ()]


@pytest.fixture(scope="module")
def engine():
    with tiny_engine() as engine:
        yield engine
        assert engine.stats().launches == 0, "nothing that was refused has reached the device"


@pytest.mark.parametrize(("name", "value"), cases(ENGINE | OPTIONS))
def test_engine(name, value):
    options = {"model": model(), "ctx": 512} | {name: value}
    with pytest.raises(ParameterError, match=f"^{name} is "):
        Engine(**options)


METHOD_CASES = [
    (method, name, value) for method, table in METHODS.items() for name, value in cases(table)
]


@pytest.mark.parametrize(("method", "name", "value"), METHOD_CASES)
def test_methods_of_an_engine(engine, method, name, value):
    arguments = {"prompts": [prompt(3)]} if method == "generate" else {"prompt": prompt(3)}
    if method in ("trace", "ping"):
        arguments = {}
    with pytest.raises(REFUSED):
        getattr(engine, method)(**arguments | {name: value})


@pytest.mark.parametrize("value", WAITS)
def test_a_requests_result(value):
    with pytest.raises(ParameterError, match=r"^timeout is .*; it must be a number of sec"):
        Request(3, None).result(value)
    with pytest.raises(ParameterError, match=r"^timeout is "):
        Request(3, None).wait(value)


@pytest.mark.parametrize(("name", "value"), cases(SAMPLING))
def test_sampling_parameters(name, value):
    with pytest.raises(ParameterError) as error:
        SamplingParams(**{name: value})
    assert name.removesuffix("s").replace("_", " ") in str(error.value).replace("_", " ")
    with pytest.raises(ParameterError):
        megadecode.run("hi", **{name: value})


@pytest.mark.parametrize(("name", "value"), cases(MODEL))
def test_model_configuration(name, value):
    with pytest.raises(ValueError, match="token id" if name.endswith(("_id", "_ids")) else name):
        dataclasses.replace(CONFIG, **{name: value})


@pytest.mark.parametrize(("name", "value"), cases(RUN))
def test_run(name, value, monkeypatch):
    monkeypatch.setattr("megadecode.engine._load", lambda *_: (model(), None))
    with pytest.raises(REFUSED):
        megadecode.run(**{"prompt": [1, 2], "ctx": 512, "draft": "off"} | {name: value})
    close_kept()


def parameters(function):
    return {name for name in inspect.signature(function).parameters if name != "self"}


def test_every_parameter_is_in_the_table():
    assert parameters(Engine) == set(ENGINE)
    assert parameters(megadecode.run) == set(RUN)
    assert {field.name for field in dataclasses.fields(SamplingParams)} == set(SAMPLING)
    assert {field.name for field in dataclasses.fields(ModelConfig)} == set(MODEL)
    methods = {
        name: parameters(function)
        for name, function in inspect.getmembers(Engine, inspect.isfunction)
        if not name.startswith("_")
    }
    assert methods == {name: set(table) for name, table in METHODS.items()}
    public = {name for name in vars(AsyncRequest) if not name.startswith("_")}
    assert public == {"abort"}


def test_every_public_thing_is_documented():
    for name in megadecode.__all__:
        thing = getattr(megadecode, name)
        assert thing.__doc__, name
        for method, function in inspect.getmembers(thing, inspect.isfunction):
            if not method.startswith("_") and function.__module__.startswith("megadecode"):
                assert function.__doc__ or "on_" in method, f"{name}.{method}"
