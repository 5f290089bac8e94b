"""How long the loop takes to hear the host: a no-op request through the rings and back.

    python -m experiments.ping [--rounds 20000] [--json PATH]

The compiled host code pushes a `ping` and spins for its answer; the loop of the CPU device is idle
and spins too. Then again after a second of idleness, when the loop sleeps between looks. No Python
runs between push and answer. Needs two free cores; a busy machine shows in the maximum.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from experiments.provenance import provenance
from host.ring import ping_rounds
from megadecode import Engine, ModelConfig, SamplingParams
from megadecode.models.random_model import random_model

MODEL = ModelConfig("tiny", 2, 64, 4, 2, 32, 96, 200, 4096, tied_embeddings=False)


def measure(engine: Engine, rounds: int, pause_us: int) -> np.ndarray:
    """Nanoseconds of `rounds` pings, `[rounds]` int64, each after `pause_us` of idleness.

    The engine must be idle: its poller then leaves the completion ring alone.
    """
    link = engine._link
    elapsed = np.zeros(rounds, np.int64)
    engine.ping()
    answered = ping_rounds(
        link.wire, link._request_tail, link._head, rounds, pause_us, 1_000_000, elapsed
    )
    link._request_tail += answered
    link._head += answered
    if answered < rounds:
        raise RuntimeError(f"ping {answered} was not answered within a second")
    return elapsed


def run(rounds: int, idle_rounds: int) -> dict[str, float]:
    """Figures in microseconds."""
    with Engine(random_model(MODEL, 1), ctx=512, slots=2, workers=2, park_after_s=-1) as engine:
        engine.submit([1, 2, 3], SamplingParams(max_new_tokens=3)).result(60)
        measure(engine, 1000, 0)
        spinning = measure(engine, rounds, 0) / 1e3
        idle = measure(engine, idle_rounds, 1_000_000) / 1e3
    return {
        "spinning_median_us": float(np.median(spinning)),
        "spinning_p99_us": float(np.percentile(spinning, 99)),
        "after_1s_idle_median_us": float(np.median(idle)),
        "after_1s_idle_max_us": float(idle.max()),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--idle-rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    figures = run(args.rounds, args.idle_rounds)
    for name, value in figures.items():
        print(f"{name:26s} {value:10.2f}")
    if args.json:
        args.json.write_text(json.dumps({"figures": figures, **provenance()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
