"""The default model on the CPU device against transformers fp32 on the same file."""

import json

import numpy as np
import pytest
from golden import GOLDEN

from megadecode import Engine, SamplingParams

GAP = 1e-3
"""Logits: below this distance between best and second best, two right answers may differ."""


@pytest.fixture(scope="module")
def golden():
    return json.loads(GOLDEN.read_text())


@pytest.fixture(scope="module")
def engine(model):
    with Engine(model, ctx=8192, slots=16) as engine:
        yield engine


def test_greedy_tokens_equal_transformers(engine, golden):
    """All prompts at once over 16 slots; a first difference only where the gap is under GAP."""
    params = SamplingParams(max_new_tokens=golden["max_new"], ignore_eos=True)
    asked = [(p, engine.submit(p["ids"], params)) for p in golden["prompts"]]
    assert len(asked) >= 24
    ties = []
    for p, request in asked:
        got = request.result(280).token_ids
        want = p["tokens"]
        first = next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), None)
        if first is None:
            assert len(got) == len(want), p["name"]
        else:
            assert p["gaps"][first] < GAP, (p["name"], first, p["gaps"][first])
            ties.append((p["name"], first, p["gaps"][first]))
    print("first differences at near-ties:", ties)
    assert len(ties) <= 2


def test_a_stop_token_ends_what_goes_on_without_it(engine, golden):
    asked = [p for p in golden["prompts"] if p["stop_at"] is not None and len(p["ids"]) < 200]
    assert len(asked) >= 5
    params = SamplingParams(max_new_tokens=golden["max_new"])
    for p, request in [(p, engine.submit(p["ids"], params)) for p in asked]:
        result = request.result(280)
        assert result.token_ids == p["tokens"][: p["stop_at"] + 1], p["name"]
        assert result.finish_reason == "stop"


def test_text_streams_in_whole_characters(engine, golden):
    """Emoji and CJK prompts: the pieces are valid text and add up to the decoded tokens."""
    for p in golden["prompts"]:
        if p["name"] in ("emoji", "cjk", "japanese"):
            request = engine.submit(p["ids"], SamplingParams(max_new_tokens=64))
            pieces = [chunk.text for chunk in request]
            result = request.result(0)
            assert "".join(pieces) == result.text == engine.tokenizer.decode(result.token_ids)


def test_bf16_weights_against_a_reference_rounded_the_same_way(model, golden):
    import torch

    from megadecode.reference import Reference

    rounded = {
        name: values
        if values.ndim == 1
        else torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
        for name, values in model.tensors()
    }
    reference = Reference(model.config, rounded)
    with Engine(model, ctx=1024, slots=4, weights="bf16") as engine:
        for p in golden["prompts"][:4]:
            got = engine.submit(p["ids"], SamplingParams(max_new_tokens=32)).result(120)
            want, gaps = reference.greedy(p["ids"], 32, engine.config.stop_ids)
            first = next((i for i, (a, b) in enumerate(zip(got.token_ids, want)) if a != b), None)
            assert first is None or gaps[first] < GAP, (p["name"], first, gaps[first])
            logits, _ = reference.forward([*p["ids"], *got.token_ids[:-1]])
            rows = logits[len(p["ids"]) - 1 :].log_softmax(-1).numpy()
            picked = rows[np.arange(len(got.token_ids)), got.token_ids]
            np.testing.assert_allclose(got.logprobs, picked, atol=1e-3)
