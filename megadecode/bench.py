"""What one stream costs, with speculation and without, in alternating rounds.

A round decodes every prompt alone, one after the other, on one engine while the other is parked.
Before each round the device's read bandwidth is measured, with the loop parked. The first round of
each engine warms up and is not counted. Both engines must give the same tokens in every round, or
the figures are void.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from statistics import median
from typing import Any

from cute_kernels.plan import PHASES, Shape, Work, program
from megadecode.doctor import machine_name
from megadecode.engine import Engine
from megadecode.errors import MegadecodeError, ParameterError
from megadecode.options import size
from megadecode.prompt import Prompt
from megadecode.request import Generation
from megadecode.sampling import SamplingParams
from megadecode.trace import bytes_per_step, decode_steps_of, stage_us

PROMPTS = (
    "A lighthouse keeper writes down what she sees each night. Tell her story, slowly, from the "
    "first evening of autumn to the last morning of winter.",
    "Explain, step by step and with many examples, how to add and subtract fractions.",
    "Write a Python module with functions that sort a list in five different ways, with comments.",
)


class Void(MegadecodeError, RuntimeError):
    """The two sides do not agree, so their times cannot be compared."""


@dataclass(frozen=True, slots=True)
class Round:
    """One engine over all prompts.

    `steps` and `tokens` in all; the others of decode-only steps: `tau` tokens a step, `step_us`
    from the first token to the last by the device's clock, `stages` in us a step from the loop's
    own trace or count, the rest of `step_us` as `between steps`; `rows` verified a step (0 where
    the device does not count them); `read_bytes` of weights, keys and values that a step must read
    at least once (without a trace, of weights alone); `read_gb_s` what the device reads at best.
    `ttft_ms`: from submit to the first token.
    """

    tokens: int
    steps: int
    tau: float
    rows: float
    tok_s: float
    ttft_ms: float
    step_us: float
    stages: dict[str, float]
    read_bytes: float
    read_gb_s: float


def bench(
    model: Any,
    *,
    prompts: Sequence[Prompt] = PROMPTS,
    tokens: int = 128,
    rounds: int = 3,
    say: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> dict[str, Any]:
    """Measure `model`; `options` are those of `Engine`, and `draft` says whether to compare.

    Gives plain data: `plain` and, with a drafter, `speculation`, each with medians over `rounds`
    and the rounds themselves; `speedup` as the median of the ratios of neighbouring rounds.
    Raises ParameterError, what `Engine` raises, and Void when the sides' tokens differ.
    """
    size("tokens", tokens, 2, 2**20)
    size("rounds", rounds, 1, 1000)
    if not prompts:
        raise ParameterError("prompts is empty; give at least one")
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    sides: dict[str, Engine] = {}
    try:
        say("loading")
        speculating = Engine(model, slots=1, **options)
        sides["speculation" if speculating.drafter else "plain"] = speculating
        if speculating.drafter:
            sides["plain"] = Engine(model, slots=1, **options | {"draft": "off"})
        return _report(sides, _measure(sides, list(prompts), params, rounds, say))
    finally:
        for engine in sides.values():
            engine.close()


def _measure(
    sides: dict[str, Engine],
    prompts: list[Prompt],
    params: SamplingParams,
    rounds: int,
    say: Callable[[str], None],
) -> dict[str, list[Round]]:
    texts: list[list[int]] | None = None
    measured: dict[str, list[Round]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            say(f"round {number} of {rounds}, {name}" if number else f"warming up, {name}")
            results, one = _round(sides[name], prompts, params)
            found = [result.token_ids for result in results]
            if texts is not None and found != texts:
                raise Void(f"round {number}, {name}, gave other tokens: the figures are void")
            texts = found
            if number:
                measured[name].append(one)
    return measured


def _round(
    engine: Engine, prompts: list[Prompt], params: SamplingParams
) -> tuple[list[Generation], Round]:
    engine.park()
    bandwidth = engine.read_gb_per_s()
    engine.trace(reset=True)
    before = engine.stats().split
    results = []
    for prompt in prompts:
        results.append(engine.submit(prompt, params).result())
        if results[-1].error:
            raise Void(f"a request ended with an error: {results[-1].error}")
    figures = [f for f in engine.trace() if f.kind == "decode"]
    engine.park()
    steps = sum(r.stats.steps for r in results)
    tokens = sum(r.stats.tokens for r in results)
    # The first token comes with the last of the prompt; all others, and their time, from steps that
    # decode only.
    seconds = sum((r.stats.tokens - 1) / r.stats.tok_s for r in results)
    decode_steps = steps - len(results)
    traced = decode_steps_of(figures)
    if figures and traced != decode_steps:
        raise Void(f"the trace holds {traced} decode steps, the requests had {decode_steps}")
    after = engine.stats().split
    split = after - before if after and before else None
    stages = split.us() if split else stage_us(figures)
    step_us = seconds / decode_steps * 1e6
    if stages:
        stages["between steps"] = step_us - sum(stages.values())
    return results, Round(
        tokens=tokens,
        steps=steps,
        tau=(tokens - len(results)) / decode_steps,
        rows=split.rows_per_step if split else 0.0,
        tok_s=(tokens - len(results)) / seconds,
        ttft_ms=median(r.stats.ttft_s for r in results) * 1e3,
        step_us=step_us,
        stages=stages,
        read_bytes=bytes_per_step(figures) or weight_bytes(engine),
        read_gb_s=bandwidth,
    )


def weight_bytes(engine: Engine) -> float:
    """Weights that a step of plain decoding reads, for a device without a trace."""
    c = engine.config
    shape = Shape(c.layers, c.hidden, c.heads, c.kv_heads, c.head_dim, c.ffn, c.vocab)
    elements = sum(
        PHASES[number].cost(shape, Work(1, 1, 0, 0)).weights for number, _ in program(c.layers)
    )
    return elements * (2 if engine.weights == "bf16" else 4)


def _report(sides: dict[str, Engine], measured: dict[str, list[Round]]) -> dict[str, Any]:
    any_side = next(iter(sides.values()))
    report: dict[str, Any] = {
        "model": any_side.config.name,
        "weights": any_side.weights,
        "machine": machine_name(),
        "cpus": os.cpu_count(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "acceptance": sides["speculation"].stats().acceptance if len(sides) == 2 else None,
    }
    for name in sorted(sides):
        rounds = measured[name]
        median_of = {
            f.name: median(getattr(r, f.name) for r in rounds)
            for f in fields(Round)
            if f.name != "stages"
        }
        stages = {stage: median(r.stages[stage] for r in rounds) for stage in rounds[0].stages}
        achieved = median_of["read_bytes"] / median_of["step_us"] / 1e3
        report[name] = median_of | {
            "stages": stages,
            "achieved_gb_s": achieved,
            "of_bandwidth": achieved / median_of["read_gb_s"],
            "rounds": [asdict(r) for r in rounds],
        }
    if len(sides) == 2:
        report["speedups"] = [
            a.tok_s / b.tok_s for a, b in zip(measured["speculation"], measured["plain"])
        ]
        report["speedup"] = median(report["speedups"])
    return report
