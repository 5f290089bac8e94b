"""The persistent kernel beside its rivals: the engine as users have it, by the device's clock.

Used by context_sweep, dram_trace and host_stall. Needs a GPU and a folder of kernels built
elsewhere (`megadecode build --folder`).
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy as np

from experiments.host_stop import Stamps
from megadecode import Engine, SamplingParams
from megadecode.acceptance import propose
from megadecode.presets import NAMES


def random_ids(count: int, vocab: int, seed: int = 5) -> list[int]:
    """A prompt that means nothing; low ids, which may be special tokens, left out."""
    return [int(i) for i in np.random.default_rng(seed).integers(1000, vocab - 1000, count)]


class Megakernel:
    """An engine for one stream, N = budget + 1 rows a step.

    scripted: what is drafted comes from a script that is right with probability `acceptance`, made
    from the text as it is decoded plainly, so that steps commit as many tokens as a trained
    drafter's; the drafter runs all the same.
    """

    def __init__(
        self, model: str, ctx: int, kernels: str | None, budget: int = 15, chain: bool = False
    ) -> None:
        self.model, self.ctx, self.vocab = model, ctx, 0
        self.draft = "random" if model in NAMES else "auto"
        self.options: dict[str, Any] = dict(ctx=ctx, slots=1, device="cuda", park_after_s=60.0)
        self.options |= {"kernels": kernels} if kernels else {}
        self.policy: dict[str, Any] = dict(budget=budget, shape="chain" if chain else "tree")
        self.engine: Engine | None = None

    def __enter__(self) -> Megakernel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if self.engine is not None:
            self.engine.close()

    def open(self, context: int, new_tokens: int, acceptance: float | None) -> None:
        """Open the engine; with acceptance, scripted for a prompt of `context` tokens."""
        script = None
        if acceptance is not None:
            with Engine(self.model, draft="off", **self.options) as plain:
                self.prompt = random_ids(context, plain.config.vocab)
                text = plain.submit(self.prompt, self._params(new_tokens)).result().token_ids
                script = propose(text, context, vocab=plain.config.vocab, acceptance=acceptance)
        more = {"script": script} if script is not None else {}
        self.engine = Engine(self.model, draft=self.draft, **self.options, **self.policy, **more)
        self.prompt = random_ids(context, self.engine.config.vocab)

    @staticmethod
    def _params(new_tokens: int) -> SamplingParams:
        return SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)

    def run(self, new_tokens: int) -> dict[str, Any]:
        """One request: step time, tokens a step, rates with and without the prompt, the split."""
        assert self.engine is not None
        before = self.engine.stats().split
        result = self.engine.submit(self.prompt, self._params(new_tokens)).result()
        if result.error is not None:
            raise result.error
        after = self.engine.stats().split
        assert before is not None and after is not None
        split = after - before
        return {
            "us": split.step_us, "tau": split.tau, "rows": split.rows_per_step,
            "split_us": split.us(), "tok_s": split.tau / split.step_us * 1e6,
            "tok_s_as_users_see_it": result.stats.tok_s, "ttft_s": result.stats.ttft_s,
        }  # fmt: skip

    def stamps(self, new_tokens: int) -> Stamps:
        """Begin a request whose device time stamps are kept; see `host_stop`."""
        assert self.engine is not None
        sink = Stamps()
        params = self._params(new_tokens).record(())
        self.engine._link.submit(np.array(self.prompt, np.int32), new_tokens, params, sink)
        return sink
