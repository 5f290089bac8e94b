"""Speculation on a GPU, with SmolLM2's real weights and the shipped drafter.

MEGADECODE_KERNELS: folder of built kernels; MEGADECODE_MODEL: the GGUF file; MEGADECODE_TAU: what
the CPU device commits a step (tests/gpu/tau_golden.py); MEGADECODE_TRACES: what it answers
(tests/gpu/traces.py).

Small conditions have their own file, test_speculation_cases.py. Here: equality with plain decoding
(B07, B24, B37, B61, B63, B71, B85, B86), what is committed a step (B01, B02), what stands in the
pages after many rounds (B02, B13, B22, B26, B57, B70, B86, D4), long runs, and requests of every
kind against the CPU device (B29, B35, B39, B41, B48, B95, B96).
"""

import json
import os
import pathlib
import time

import pytest

from tests.gpu.needs import need

need("MEGADECODE_KERNELS", "MEGADECODE_MODEL", "MEGADECODE_TAU")

import torch  # noqa: E402

from megadecode import DeviceUnavailable  # noqa: E402
from megadecode.acceptance import propose  # noqa: E402
from megadecode.models.load import load_model  # noqa: E402
from tests.gpu import tau_golden, traces  # noqa: E402
from tests.gpu.speculating import (  # noqa: E402
    close_all,
    errors,
    exact,
    first_difference,
    keys_values,
    make,
    one,
    params,
    play,
    reference_keys_values,
    run,
    set_policy,
    tau,
    turn,
)
from tests.gpu.table import note  # noqa: E402

KERNELS = os.environ["MEGADECODE_KERNELS"]
GOLDEN = json.loads(pathlib.Path(os.environ["MEGADECODE_TAU"]).read_text())
PROMPTS = GOLDEN["prompts"]
POLICIES = {  # name: (nodes, chain); rows are nodes + 1
    "chain": (7, True), "N2": (1, False), "N4": (3, False), "N8": (7, False),
    "N16": (15, False), "N17": (16, False), "N32": (31, False), "N64": (63, False),
    "N128": (127, False),
}  # fmt: skip
MODES = {"greedy": {}, "warm": dict(temperature=0.8, top_p=0.95)}


@pytest.fixture(scope="module", autouse=True)
def closed():
    yield
    close_all()


@pytest.fixture(scope="module")
def model():
    return load_model(os.environ["MEGADECODE_MODEL"])


@pytest.fixture(scope="module")
def plain(model):
    """Without a drafter."""
    return make(model, draft="off", kernels=KERNELS)


@pytest.fixture(scope="module")
def engine(model):
    """With the shipped one; its budget changes from test to test."""
    found = make(model, draft="auto", budget=127, kernels=KERNELS)
    assert found.drafter is not None
    return found


def jobs_of(mode, count, new, **changes):
    how = MODES[mode] | {"max_new_tokens": new} | changes
    return [(ids, params(seed=1000 + i, **how)) for i, ids in enumerate(PROMPTS[:count])]


@pytest.fixture(scope="module")
def texts(plain):
    """What plain decoding says, by mode: 48 prompts, 256 tokens."""
    found = {}
    for mode in MODES:
        found[mode] = run(plain, jobs_of(mode, 48, 256))
        seconds = sum((r.stats.tokens - 1) / r.stats.tok_s for r in found[mode])
        step = seconds / sum(r.stats.tokens - 1 for r in found[mode]) * 1e6
        note(f"plain, {mode}", f"step {step:.1f} us", step_us=step)
    return found


# -- equality ------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", POLICIES)
def test_speculation_changes_nothing(engine, texts, policy, mode):
    """Token ids and log-probabilities, bit for bit: 48 prompts, 256 tokens each."""
    set_policy(engine, *POLICIES[policy])
    before = engine.stats().split
    results = run(engine, jobs_of(mode, 48, 256))
    engine.park()
    split = engine.stats().split - before
    stages = " ".join(f"{name} {us:.1f}" for name, us in split.us().items())
    seconds = sum((r.stats.tokens - 1) / r.stats.tok_s for r in results)
    speed = sum(r.stats.tokens - 1 for r in results) / seconds
    note(
        f"{policy}, {mode}",
        f"tau {tau(results):.3f}, {speed:.0f} tok/s, step {split.step_us:.1f} us ({stages}), "
        f"{split.rows_per_step:.1f} rows",
        tau=tau(results), tok_s=speed, step_us=split.step_us, stages=split.us(),
        rows=split.rows_per_step,
    )  # fmt: skip
    assert first_difference(results, texts[mode]) == ""
    assert tau(results) > 1.05, "nothing was ever accepted: equality says nothing"


def test_alternatives_and_biases_are_plain_decodings(plain, engine):
    how = dict(logprobs=20, logit_bias={28: 3.0, 198: -4.0, 0: -100.0}, temperature=0.7, min_p=0.01)
    jobs = jobs_of("greedy", 12, 60, **how)
    want = run(plain, jobs)
    for policy in ("chain", "N16", "N64"):
        set_policy(engine, *POLICIES[policy])
        assert first_difference(run(engine, jobs), want) == ""


def test_20000_steps_at_temperature_one(plain, engine):
    """B67's kind of fault: slow leaks show after many rounds. All of it is plain decoding's."""
    start, steps, tokens, policy = time.monotonic(), 0, 0, 0
    names = ["N16", "chain", "N64"]
    while steps < 20_000 and time.monotonic() - start < 150:
        how = dict(temperature=1.0, max_new_tokens=1900)
        jobs = [(PROMPTS[i], params(seed=7 * policy + i, **how)) for i in range(4)]
        set_policy(engine, *POLICIES[names[policy % 3]])
        results = run(engine, jobs)
        assert first_difference(results, run(plain, jobs)) == ""
        steps += sum(r.stats.steps for r in results)
        tokens += sum(r.stats.tokens for r in results)
        policy += 1
    note("T=1", f"{steps} steps, {tokens} tokens, equal to plain decoding", steps=steps)
    assert steps >= 20_000
    stats = engine.stats()
    assert (stats.free_slots, stats.free_pages) == (1, stats.pages)


# -- what is committed ---------------------------------------------------------------------------
@pytest.mark.parametrize("policy", tau_golden.POLICIES)
def test_tau_is_the_cpu_devices(engine, policy):
    """Within 3 %: the same prompts, drafter and policy; weights and texts differ by bf16."""
    shape = tau_golden.POLICIES[policy]
    set_policy(engine, shape["budget"], shape.get("shape") == "chain")
    found = tau_golden.tau_of(tau_golden.measure(turn(engine), PROMPTS))
    want = GOLDEN["policies"][policy]["tau"]
    note(f"tau, {policy}", f"{found:.4f}, CPU {want:.4f}: {found / want - 1:+.2%}",
         gpu=found, cpu=want)  # fmt: skip
    assert abs(found / want - 1) < 0.03


# -- what stands in the pages --------------------------------------------------------------------
@pytest.mark.parametrize("policy", ["chain", "N16", "N64"])
def test_keys_and_values_after_200_rounds(model, policy):
    """The target's are plain decoding's, bit for bit; of target and drafter they are as near to
    fp32 as twice torch's bf16, and so a fresh prefill's; no position is another's. Paths skip rows:
    of the truths, some are second candidates."""
    prompt, new = PROMPTS[0], 1500
    blank = propose([0], 0, vocab=model.config.vocab)
    engine = make(model, draft="auto", budget=127, script=blank, kernels=KERNELS)
    try:
        set_policy(engine, 0)
        text = one(engine, prompt, max_new_tokens=new)
        ids = prompt + text.token_ids[:-1]
        kept = len(ids) - engine.drafter.config.block_size  # the last step's are not moved yet
        plainly = keys_values(engine, kept)
        said = propose(text.token_ids, len(prompt), vocab=model.config.vocab, acceptance=0.75)
        play(engine, said)
        set_policy(engine, *POLICIES[policy])
        result = one(engine, prompt, max_new_tokens=new)
        assert exact(result) == exact(text)
        assert result.stats.steps > 200
        assert min(result.stats.accepted[1:]) > 0, "some count was never accepted"
        after = [*keys_values(engine, kept), *keys_values(engine, kept, drafter=True)]
        assert all(torch.equal(a, b) for a, b in zip(after, plainly))
        one(engine, ids, max_new_tokens=4)
        fresh = [*keys_values(engine, kept), *keys_values(engine, kept, drafter=True)]
        args = model, engine.drafter, ids[:kept]
    finally:
        engine.close()
    reference = reference_keys_values(*args, torch.float32)
    half = reference_keys_values(*args, torch.bfloat16)
    names = ("keys", "values", "draft keys", "draft values")
    for name, mine, new_ones, ref, bf16 in zip(names, after, fresh, reference, half, strict=True):
        bound, worst = errors(bf16, ref)
        ours, largest = errors(mine, ref)
        other, apart = errors(mine, new_ones)
        note(f"{name}, {policy}", f"{ours:.2e} from fp32 (torch bf16 {bound:.2e}), {other:.2e} from"
             f" a fresh prefill's; a position at most {largest:.2e} ({worst:.2e}), {apart:.2e}",
             from_fp32=ours, torch_bf16=bound, from_prefill=other, worst=largest,
             worst_bf16=worst, worst_from_prefill=apart)  # fmt: skip
        assert bool(torch.isfinite(mine).all())
        assert ours < 2 * bound and other < 2 * bound
        assert largest < 4 * worst and apart < 4 * worst


# -- every kind of request -----------------------------------------------------------------------
@pytest.mark.parametrize("policy", ["plain", "chain", "N16", "N64"])
def test_requests_are_answered_as_on_the_cpu(policy):
    """500 mixed requests on a model whose answers rounding does not change."""
    if "MEGADECODE_TRACES" not in os.environ:
        pytest.skip("MEGADECODE_TRACES is not set")
    wanted = traces.load(os.environ["MEGADECODE_TRACES"])
    counting = traces.Counting()
    try:
        engine = make(
            counting, ctx=traces.CTX, draft="off" if policy == "plain" else counting.drafter(),
            budget=127, script=traces.script(), kernels=KERNELS, max_inflight=1024,
        )  # fmt: skip
    except DeviceUnavailable as error:
        pytest.skip(str(error))
    try:
        if policy != "plain":
            set_policy(engine, *((15, True) if policy == "chain" else POLICIES[policy]))
        turn(engine)
        found = traces.answers(engine, [(w["prompt"], w["params"]) for w in wanted])
        engine.park()
        split = engine.stats().split
    finally:
        engine.close()
    wrong = [i for i, (a, w) in enumerate(zip(found, wanted)) if not traces.same(a, w["answer"])]
    apart = max(
        (abs(p - q) for i, (a, w) in enumerate(zip(found, wanted)) if i not in wrong
         for p, q in zip(a["logprobs"], w["answer"]["logprobs"], strict=True)),
        default=0.0,
    )  # fmt: skip
    note(
        f"requests, {policy}",
        f"{len(wanted)}, {len(wrong)} differ; tau {split.tau:.2f}; log-probabilities apart by "
        f"{apart:.3f} at most",
        wrong=len(wrong), apart=apart,
    )  # fmt: skip
    assert [wanted[i] | {"got": found[i]} for i in wrong[:1]] == []
    assert len(wanted) == traces.KEPT
    assert apart < 0.15
    if policy != "plain":
        assert split.tau > 1.5
