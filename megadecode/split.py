"""How the time of a speculative step splits, as a device that has no trace counts it itself."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np

from host.ring import read_word
from host.wire import Word

_WORDS = (
    Word.SPLIT_STEPS, Word.SPLIT_DRAFTED, Word.SPLIT_ROWS, Word.SPLIT_TOKENS, Word.SPLIT_COMPACT,
    Word.SPLIT_DRAFT, Word.SPLIT_TREE, Word.SPLIT_VERIFY, Word.SPLIT_DECIDE, Word.SPLIT_TOTAL,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepSplit:
    """Totals over all steps that gave tokens since the first launch; differences of two looks are
    those of what lies between.

    `steps`; of these `drafted` drafted; `rows` verified, the roots counted; `tokens` given. Times
    in ns: `compact`, accepted keys and values to their places; `draft`, the drafter's context,
    block and head; `tree`, ranks and tree; `verify`, the target; `decide`, from its head's last sum
    to the next step's descriptor; `total`, from a step's first descriptor to the next step's.
    """

    steps: int
    drafted: int
    rows: int
    tokens: int
    compact: int
    draft: int
    tree: int
    verify: int
    decide: int
    total: int

    @classmethod
    def read(cls, control: np.ndarray) -> StepSplit:
        """From a wire's control block."""
        return cls(*(int(read_word(control, word)) for word in _WORDS))

    def __sub__(self, before: StepSplit) -> StepSplit:
        return StepSplit(*(a - b for a, b in zip(astuple(self), astuple(before), strict=True)))

    def us(self) -> dict[str, float]:
        """Mean microseconds of a step by stage, in the order of `trace.STAGES`; empty without
        steps. What they leave of the total goes to hand-overs between the parts."""
        if not self.steps:
            return {}
        stages = {
            "draft": self.draft, "tree": self.tree, "verify": self.verify, "decide": self.decide,
            "compact": self.compact,
        }  # fmt: skip
        return {name: ns / self.steps / 1e3 for name, ns in stages.items()}

    @property
    def step_us(self) -> float:
        """Mean microseconds of a step."""
        return self.total / self.steps / 1e3 if self.steps else 0.0

    @property
    def tau(self) -> float:
        """Tokens a step."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def rows_per_step(self) -> float:
        """Rows verified a step, the root counted."""
        return self.rows / self.steps if self.steps else 0.0

    def table(self) -> str:
        """The split as aligned text, one line a part."""
        parts = self.us()
        lines = [f"{self.steps} steps of {self.step_us:.1f} us, {self.rows_per_step:.1f} rows each"]
        lines += [f"{name:9s} {us:9.1f} us {us / self.step_us:6.1%}" for name, us in parts.items()]
        return "\n".join(lines)
