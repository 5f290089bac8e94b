"""Tokens per second with the shipped drafter against plain decoding, default settings, on the CPU.

    python -m experiments.drafter_speed [--prompts 32] [--tokens 128] [--weights fp32] [--json PATH]

Two engines in one process, one with `draft="off"`, take turns on each prompt, in alternating order;
the one that waits is parked. Only one request runs at a time. A turn's speed is the engine's own
figure: tokens behind the first over the time between the first and the last. The texts must be
identical. A step counts as speculating if it verified at least one node.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from statistics import median
from typing import Any

from experiments.chat_prompts import CHAT_PROMPTS
from experiments.cpu_kernels import cpu_model
from experiments.provenance import provenance
from megadecode import Engine, SamplingParams
from megadecode.models.store import DEFAULT_MODEL

BAR, GOAL, SHARE = 1.4, 1.8, 0.8


def runs(engine: Engine, phase: str) -> int:
    """How often a phase has run in steps without prefill."""
    return sum(f.runs for f in engine.trace() if f.kind == "decode" and f.phase == phase)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--weights", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--json", type=Path, help="default: experiments/results/drafter_speed.json")
    args = parser.parse_args()
    engines = {
        "plain": Engine(DEFAULT_MODEL, draft="off", weights=args.weights),
        "drafting": Engine(DEFAULT_MODEL, draft=args.drafter, weights=args.weights),
    }
    if engines["drafting"].drafter is None:
        raise SystemExit(f"no drafter belongs to {DEFAULT_MODEL}")
    params = SamplingParams(max_new_tokens=args.tokens)

    def turn(name: str, prompt: str) -> dict[str, Any]:
        result = engines[name].submit(prompt, params).result()
        engines[name].park()
        s = result.stats
        return {
            "ids": result.token_ids, "tokens": s.tokens, "steps": s.steps,
            "ns": (s.tokens - 1) / s.tok_s if s.tok_s else 0.0,
        }  # fmt: skip

    for name in engines:
        turn(name, "Say hello.")
    before = {phase: runs(engines["drafting"], phase) for phase in ("decide", "compact")}
    rows = []
    for i, prompt in enumerate(CHAT_PROMPTS[: args.prompts]):
        order = list(engines) if i % 2 == 0 else list(engines)[::-1]
        both = {name: turn(name, prompt) for name in order}
        assert both["plain"]["ids"] == both["drafting"]["ids"], f"the texts differ: {prompt!r}"
        speeds = {n: (t["tokens"] - 1) / t["ns"] for n, t in both.items() if t["ns"]}
        if len(speeds) == 2:
            tau = (both["drafting"]["tokens"] - 1) / max(both["drafting"]["steps"] - 1, 1)
            rows.append({"prompt": prompt, "tokens": both["plain"]["tokens"], "tau": tau} | speeds)
            print(f"{speeds['drafting'] / speeds['plain']:.2f}x tau {tau:.2f} {prompt}")
    steps = runs(engines["drafting"], "decide") - before["decide"]
    share = (runs(engines["drafting"], "compact") - before["compact"]) / steps
    seconds = {n: sum((r["tokens"] - 1) / r[n] for r in rows) for n in engines}
    ratio = seconds["plain"] / seconds["drafting"]
    result = {
        "experiment": "drafter_speed", **provenance(), "cpu": cpu_model(),
        "threads": os.cpu_count(), "model": DEFAULT_MODEL, "weights": args.weights,
        "drafter": engines["drafting"].drafter.config.name, "new_tokens": args.tokens,
        "ratio": ratio, "median_ratio": median(r["drafting"] / r["plain"] for r in rows),
        "tok_s": {n: sum(r["tokens"] - 1 for r in rows) / s for n, s in seconds.items()},
        "share_of_steps_that_speculate": share, "texts_identical": True, "bar": BAR, "goal": GOAL,
        "met": ratio >= BAR and share >= SHARE, "turns": rows,
    }  # fmt: skip
    for engine in engines.values():
        engine.close()
    path = args.json or Path(__file__).parent / "results" / "drafter_speed.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"{ratio:.2f}x over all tokens, median {result['median_ratio']:.2f}x; speculating in "
        f"{share:.0%} of steps; {'met' if result['met'] else 'MISSED'}; written to {path}"
    )


if __name__ == "__main__":
    main()
