"""What megadecode is compared with: the same step run by torch, by graphs, by a host's loop.

All of them decode the same weights with the same drafter, greedily, one sequence; `make(name,
setup)` opens one, `generate(prompt, n)` answers.
"""

from experiments.baselines.core import Core, Setup
from experiments.baselines.loops import KINDS, TURN, Baseline, Eager, Generated, HostTree

__all__ = [
    "KINDS",
    "TURN",
    "Baseline",
    "Core",
    "Eager",
    "Generated",
    "HostTree",
    "Setup",
    "make",
]


def make(name: str, setup: Setup) -> Baseline:
    """A rival by name. ValueError for an unknown one."""
    if name not in KINDS:
        raise ValueError(f"baseline {name!r} is not known; known: {', '.join(KINDS)}")
    return KINDS[name](setup)
