"""The persistent kernel beside its rivals: the engine as users have it, by the device's clock.

Used by context_sweep, dram_trace, host_stall and pdl_steps. Needs a GPU and a folder of kernels
built elsewhere (`megadecode build --folder`).
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

import numpy as np

from experiments.host_stop import Stamps
from megadecode import Engine, SamplingParams
from megadecode.acceptance import propose
from megadecode.presets import NAMES
from megadecode.request import Generation


def random_ids(count: int, vocab: int, seed: int = 5) -> list[int]:
    """A prompt that means nothing; low ids, which may be special tokens, left out."""
    return [int(i) for i in np.random.default_rng(seed).integers(1000, vocab - 1000, count)]


class Steps(Stamps):
    """A request's reader that keeps, for each step, its tokens, the device's time stamp, and when
    the host has read it; ns."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []
        self.arrivals: list[int] = []

    def on_pairs(self, ids: list[int], logprobs: Any, accepted: int, step: int, stamp: int) -> None:
        super().on_pairs(ids, logprobs, accepted, step, stamp)
        self.counts.append(len(ids))
        self.arrivals.append(time.monotonic_ns())


class Megakernel:
    """An engine for one stream, N = budget + 1 rows a step.

    scripted: what is drafted comes from a script that is right so often, made from the text as it
    is decoded plainly, so that steps commit as many tokens as a trained drafter's; the drafter runs
    all the same. One engine serves any number of prompts, each with a script of its own.
    """

    def __init__(
        self, model: str, ctx: int, kernels: str | None, budget: int = 15, scripted: bool = False,
        **options: Any,
    ) -> None:  # fmt: skip
        self.budget, self.scripted = budget, scripted
        more: dict[str, Any] = {"kernels": kernels} if kernels else {}
        if scripted:
            more["script"] = propose([0], 0, vocab=4096)  # until a prompt has its own
        self.engine = Engine(
            model, ctx, slots=1, device="cuda", park_after_s=60.0, budget=budget,
            draft="random" if model in NAMES else "auto", **more, **options,
        )  # fmt: skip
        self.vocab = self.engine.config.vocab

    def __enter__(self) -> Megakernel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.engine.close()

    def _set_budget(self, budget: int) -> None:
        with self.engine.parked():
            self.engine._parts.set_policy(budget)  # type: ignore[attr-defined]

    def prepare(self, prompt: list[int], new_tokens: int, acceptance: float) -> list[int]:
        """Write the script of a prompt: its text, decoded plainly, which is returned."""
        assert self.scripted
        self._set_budget(0)
        text = self.answer(prompt, new_tokens).token_ids
        script = propose(text, len(prompt), vocab=self.vocab, acceptance=acceptance)
        with self.engine.parked():
            self.engine._parts.play(script)  # type: ignore[attr-defined]
        self._set_budget(self.budget)
        return list(text)

    def answer(self, prompt: list[int], new_tokens: int) -> Generation:
        """So many new tokens."""
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        result = self.engine.submit(prompt, params).result()
        if result.error is not None:
            raise RuntimeError(result.error)
        return result

    def run(self, prompt: list[int], new_tokens: int) -> dict[str, Any]:
        """One request: step time, tokens a step, the split, seconds to the first token."""
        before = self.engine.stats().split
        result = self.answer(prompt, new_tokens)
        after = self.engine.stats().split
        assert before is not None and after is not None
        split = after - before
        return {
            "us": split.step_us, "tau": split.tau, "rows": split.rows_per_step,
            "split_us": split.us(), "tok_s": split.tau / split.step_us * 1e6,
            "tok_s_as_users_see_it": result.stats.tok_s, "ttft_s": result.stats.ttft_s,
        }  # fmt: skip

    def begin(self, prompt: list[int], new_tokens: int) -> Steps:
        """Begin a request whose steps are noted one by one."""
        sink = Steps()
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True).record(())
        self.engine._link.submit(np.array(prompt, np.int32), new_tokens, params, sink)
        return sink
