"""A random model small enough that thousands of requests run in seconds, and its oracle."""

from functools import cache

import numpy as np

from megadecode import Engine, ModelConfig, SamplingParams
from megadecode.models.chat import check_messages
from megadecode.models.random_model import random_model
from megadecode.reference import Reference

STOP_ID = 3
CONFIG = ModelConfig(
    name="tiny",
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=32,
    ffn=96,
    vocab=200,
    context_tokens=1 << 20,
    tied_embeddings=False,  # a tied random model repeats one token for ever
    stop_ids=(STOP_ID,),
)


@cache
def model():
    """The tiny model; the same object every time."""
    return random_model(CONFIG, seed=7)


@cache
def reference():
    """The torch oracle of the tiny model, fp32."""
    return Reference(CONFIG, model().tensors())


class Spelled:
    """A model with a tokenizer: token i is written as three bytes.

    Ids below 100 are two letters and the first byte of 'é', the others the second byte of 'é' and
    two letters, so that characters are cut by tokens, whole or broken, as the text has it. Text
    becomes a token a byte.
    """

    def __init__(self, weights):
        self.config, self.tensor = weights.config, weights.tensor
        self.vocab_size = weights.config.vocab

    def tokenizer(self):
        return self

    def token_bytes(self, token):
        letters = bytes((97 + token % 26, 97 + token // 26))
        return letters + b"\xc3" if token < 100 else b"\xa9" + letters

    def prompt(self, text):
        return [byte % self.vocab_size for byte in text.encode(errors="replace")]

    def chat(self, messages):
        check_messages(messages)
        return [i for message in messages for i in self.prompt(message["content"])] or [1]


def prompt(length, seed=0):
    """Random token ids, the stop id left out so that nothing depends on it."""
    rng = np.random.default_rng([length, seed])
    ids = rng.integers(0, CONFIG.vocab - 1, length)
    return np.where(ids >= STOP_ID, ids + 1, ids).tolist()


def tiny_engine(**options):
    """An engine on the tiny model with two workers and small rings."""
    settings = {"ctx": 512, "slots": 4, "workers": 2, "park_after_s": 2.0, "draft": "off"} | options
    return Engine(settings.pop("model", None) or model(), **settings)


def greedy(engine, ids, new_tokens, **params):
    """Tokens and log-probabilities of one request."""
    result = engine.submit(
        ids, SamplingParams(max_new_tokens=new_tokens, **{"ignore_eos": True} | params)
    ).result(60)
    assert result.error is None, result.error
    return result.token_ids, np.array(result.logprobs, np.float32)
