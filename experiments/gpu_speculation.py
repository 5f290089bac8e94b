"""What a speculative step costs on a GPU, part by part, and what it gives.

    python -m experiments.gpu_speculation RESULT.json [--models smollm2-135m ...] [--rows 1 4 ...]
        [--contexts 1024 ...] [--new 192] [--rounds 3] [--kernels DIR]

Per model and context one request, decoded plainly and with every number of rows N (budget N - 1),
in rounds that take turns; all must give the same tokens, log-probabilities included, or the
figures are void. A part's time is the kernel's own count (`megadecode.split`), medians over rounds.

The candidates are *scripted*: right with probability 0.7, of the rest half the time second, so tau
and tokens a second are those of a drafter of that acceptance; the drafter, whose time is in the
step, is the shipped one or has random weights (2 layers, block of 16). With --chats, SmolLM2 also
answers 32 chats with its shipped drafter's own candidates. MEGADECODE_MODEL: SmolLM2's file, where
it is not in the cache.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from experiments.provenance import provenance
from megadecode.acceptance import expected_tau, propose
from megadecode.split import StepSplit
from tests.gpu.speculating import close_all, exact, make, one, params, play, run, set_policy, tau

ROWS = (1, 4, 8, 16, 32, 64, 128)
CHAIN = "chain"
ACCEPTANCE, SECOND = 0.7, 0.5
SMOLLM2 = "smollm2-135m"


def file_of(name: str) -> str:
    """A model's name, or where SmolLM2's file is."""
    return os.environ.get("MEGADECODE_MODEL", name) if name == SMOLLM2 else name


def draw(model: str, length: int, vocab: int) -> list[int]:
    """A prompt of random ids, the same every time."""
    rng = np.random.default_rng([length, *model.encode()])
    return [int(t) for t in rng.integers(3, vocab - 1, length)]


def measured(engine: Any, job: Any) -> tuple[Any, StepSplit, float]:
    """A result, the split of its steps and its tokens a second."""
    engine.park()
    before = engine.stats().split
    result = job()
    engine.park()
    return result, engine.stats().split - before, result.stats.tok_s


def line(name: str, r: dict[str, Any]) -> str:
    parts = " ".join(f"{stage} {us:6.1f}" for stage, us in r["us"].items())
    return (
        f"{name:10s} tau {r['tau']:5.2f} {r['tok_s']:7.0f} tok/s {r['speedup']:5.2f}x  "
        f"step {r['step_us']:7.1f} us: {parts}"
    )


def scripted(name: str, engine: Any, context: int, args: Any) -> dict[str, Any]:
    """One context: plain decoding and every number of rows."""
    c = engine.config
    prompt = draw(name, context - args.new, c.vocab)
    policies: dict[str, tuple[int, bool]] = {str(n): (n - 1, False) for n in args.rows}
    policies[CHAIN] = (engine.drafter.config.drafted, True)
    set_policy(engine, 0)
    text = one(engine, prompt, max_new_tokens=args.new)
    play(engine, propose(text.token_ids, len(prompt), vocab=c.vocab, acceptance=ACCEPTANCE,
                         second=SECOND, seed=context))  # fmt: skip
    found: dict[str, list[tuple[StepSplit, float, float]]] = {p: [] for p in policies}
    for number in range(args.rounds + 1):
        for policy in list(policies)[:: 1 if number % 2 else -1]:
            set_policy(engine, *policies[policy])
            result, split, tok_s = measured(
                engine, lambda: one(engine, prompt, max_new_tokens=args.new)
            )
            if exact(result) != exact(text):
                raise SystemExit(f"{name}, {policy} rows: other tokens; the figures are void")
            if number:
                found[policy].append((split, tok_s, tau([result])))
    out: dict[str, Any] = {}
    for policy, rounds in found.items():
        stages = [split.us() for split, _, _ in rounds]
        out[policy] = {
            "step_us": median(split.step_us for split, _, _ in rounds),
            "us": {stage: median(s[stage] for s in stages) for stage in stages[0]},
            "tok_s": median(tok_s for _, tok_s, _ in rounds),
            "tau": median(t for _, _, t in rounds),
            "rounds": [asdict(split) | {"tok_s": tok_s} for split, tok_s, _ in rounds],
        }
    plain = out.get("1") or next(iter(out.values()))
    print(f"{name}, context {context}, scripted acceptance {ACCEPTANCE}")
    for policy, r in out.items():
        r["speedup"] = r["tok_s"] / plain["tok_s"]
        r["break_even_tau"] = r["step_us"] / plain["step_us"]
        print(line(policy, r), flush=True)
    return out


def chats(args: Any) -> dict[str, Any]:
    """SmolLM2 and its shipped drafter on 32 chats, by number of rows."""
    prompts = json.loads(Path(args.chats).read_text())["prompts"][:32]
    engine = make(file_of(SMOLLM2), draft="auto", budget=max(args.rows) - 1, kernels=args.kernels)
    jobs = [(ids, params(max_new_tokens=128)) for ids in prompts]
    policies: dict[str, tuple[int, bool]] = {str(n): (n - 1, False) for n in args.rows}
    policies[CHAIN] = (engine.drafter.config.drafted, True)
    out: dict[str, Any] = {}
    texts = None
    for policy, how in policies.items():
        set_policy(engine, *how)
        run(engine, jobs[:2])
        engine.park()
        before = engine.stats().split
        results = run(engine, jobs)
        engine.park()
        split = engine.stats().split - before
        same = [exact(r) for r in results]
        if texts is not None and same != texts:
            raise SystemExit(f"chats, {policy} rows: other tokens; the figures are void")
        texts = same
        seconds = sum((r.stats.tokens - 1) / r.stats.tok_s for r in results)
        out[policy] = {
            "step_us": split.step_us, "us": split.us(), "tau": tau(results),
            "tok_s": sum(r.stats.tokens - 1 for r in results) / seconds,
        }  # fmt: skip
        out[policy]["speedup"] = out[policy]["tok_s"] / out[next(iter(out))]["tok_s"]
        print(line(policy, out[policy]), flush=True)
    close_all()
    return out


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--models", nargs="+", default=[SMOLLM2, "llama-3.2-1b"])
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024])
    parser.add_argument("--new", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kernels", help="a folder of kernels that another machine has built")
    parser.add_argument("--chats", help="a file with the ids of chats: tests/gpu/tau_golden.py")
    args = parser.parse_args()
    report: dict[str, Any] = {
        "about": "python -m experiments.gpu_speculation; its docstring has the fields",
        **provenance(), "acceptance": f"scripted: {ACCEPTANCE}, second {SECOND} of the rest",
        "expected_chain_tau": {n: expected_tau(ACCEPTANCE, n) for n in (7, 15)},
        "new_tokens": args.new, "models": {},
    }  # fmt: skip

    def save() -> None:
        args.result.parent.mkdir(parents=True, exist_ok=True)
        args.result.write_text(json.dumps(report, indent=1) + "\n")

    if args.chats:
        report["chats_with_the_shipped_drafter"] = chats(args)
        save()
    for name in args.models:
        blank = propose([0], 0, vocab=4096)
        engine = make(
            file_of(name), max(args.contexts) + 256, budget=max(args.rows) - 1, script=blank,
            draft="auto" if name == SMOLLM2 else "random", kernels=args.kernels,
        )  # fmt: skip
        assert engine.stats().acceptance == "scripted"
        report["models"][name] = {
            "drafter": {k: getattr(engine.drafter.config, k) for k in ("name", "layers", "taps",
                                                                       "block_size")},
            "contexts": {n: scripted(name, engine, n, args) for n in args.contexts},
        }  # fmt: skip
        close_all()
        save()
    print(f"written to {args.result}")


if __name__ == "__main__":
    main()
