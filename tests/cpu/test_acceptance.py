"""Scripted candidates: as right as planned, and harmless to the text."""

import numpy as np
import pytest

from cute_kernels.cpu.speculate import make_script
from megadecode import Engine, SamplingParams
from megadecode.acceptance import expected_tau, propose
from megadecode.presets import Preset


def test_candidates_are_right_as_often_as_planned():
    tokens = np.random.default_rng(0).integers(0, 500, 20000)
    for vocab, width in ((500, 16), (500, 499), (70, 2)):
        some = tokens % vocab
        found = propose(some, 7, vocab=vocab, acceptance=0.6, second=0.25, width=width, seed=3)
        assert found.ids.shape == found.logprobs.shape == (20007, width)
        assert found.widths[:7].max() == 0 and found.widths[7:].min() == width
        ids = found.ids[7:]
        assert abs((ids[:, 0] == some).mean() - 0.6) < 0.02
        assert abs((ids[:, 1] == some).mean() - 0.1) < 0.02
        assert not (ids[:, 2:] == some[:, None]).any()
        assert (np.diff(found.logprobs[0]) <= 0).all()
        assert (ids >= 0).all() and (ids < vocab).all()
        assert (np.diff(np.sort(ids, axis=1), axis=1) > 0).all()  # no id twice
    with pytest.raises(ValueError, match="acceptance 2 and"):
        propose([1], 0, vocab=9, acceptance=2)


@pytest.mark.slow
def test_a_chain_commits_what_the_plan_says():
    """On the CPU device: the text is plain decoding's, tau the geometric sum."""
    pytest.importorskip("torch")
    model, prompt = Preset("odd-768"), [5, 6, 7]
    params = SamplingParams(max_new_tokens=400, ignore_eos=True)
    with Engine(model, 512, slots=1, device="cpu", draft="off") as engine:
        plain = engine.submit(prompt, params).result()
    script = propose(plain.token_ids, 3, vocab=5003, acceptance=0.7)
    with Engine(
        model, 512, slots=1, device="cpu", draft=model.drafter(), budget=15, shape="chain",
        script=make_script(*script),
    ) as engine:  # fmt: skip
        found = engine.submit(prompt, params).result()
    assert found.token_ids == plain.token_ids
    tau = (found.stats.tokens - 1) / (found.stats.steps - 1)
    assert abs(tau / expected_tau(0.7, 15) - 1) < 0.12
