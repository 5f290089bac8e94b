"""Speculation on the shapes of 8B models, on a GPU: random weights, and in the place of a drafter
of random weights a script that is right as often as it is told to be.

MEGADECODE_KERNELS: folder of built kernels.
"""

import os

import numpy as np
import pytest

from tests.gpu.needs import need

need("MEGADECODE_KERNELS")

import torch  # noqa: E402

from megadecode import DeviceUnavailable  # noqa: E402
from megadecode.acceptance import propose  # noqa: E402
from tests.gpu.speculating import close_all, exact, make, one, play, set_policy, tau  # noqa: E402
from tests.gpu.table import note  # noqa: E402

CTX, PROMPT, NEW = 1024, 123, 70  # the answer crosses two ends of pages
POLICIES = {"chain": (15, True), "N16": (15, False), "N32": (31, False)}
MODES = {"greedy": {}, "warm": dict(temperature=0.8, top_p=0.95, seed=9)}


@pytest.fixture(scope="module", params=["llama-3.1-8b", "qwen3-8b"])
def engine(request):
    try:
        found = make(
            request.param, CTX, draft="random", budget=31, script=propose([0], 0, vocab=4096),
            kernels=os.environ["MEGADECODE_KERNELS"],
        )  # fmt: skip
    except DeviceUnavailable as error:
        pytest.skip(str(error))
    assert found.stats().acceptance == "scripted"
    yield found
    close_all()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("mode", MODES)
def test_speculation_changes_nothing(engine, mode):
    """Token ids and log-probabilities, bit for bit those of plain decoding."""
    vocab, name = engine.config.vocab, engine.config.name
    prompt = np.random.default_rng(8).integers(0, vocab, PROMPT).tolist()
    set_policy(engine, 0)
    text = one(engine, prompt, max_new_tokens=NEW, **MODES[mode])
    assert text.stats.accepted == (0, NEW)
    play(engine, propose(text.token_ids, PROMPT, vocab=vocab, acceptance=0.75, width=31))
    for policy, shape in POLICIES.items():
        set_policy(engine, *shape)
        result = one(engine, prompt, max_new_tokens=NEW, **MODES[mode])
        note(f"{name}, {policy}, {mode}", f"scripted: tau {tau([result]):.2f}", tau=tau([result]))
        assert exact(result) == exact(text), policy
        assert tau([result]) > 1.5, "hardly anything was accepted: equality says nothing"
