"""Does a tree pay against a chain, and what must a step commit to pay at all?

    python -m experiments.chain_or_tree [--device cpu] [--kernels DIR]

The engine with the shipped drafter answers chat prompts under every policy in turn, each with the
same tokens. tau: tokens a step commits; step: mean time by the device's own clock; gain: the
policy's rate over plain decoding, over the same prompts. `rejected`: the same policy with a script
that is never right in the drafter's place, which gives the break-even: the tau at which a step of
this policy is worth its time; on a GPU at several lengths of the context too. Policies: plain, the
chain of all drafted positions, trees of N rows. `against_best`: a policy's time over the best
one's, with the interval that 95 of 100 draws of as many prompts (with replacement) fall into.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from cute_kernels.cpu.speculate import make_script
from experiments.chat_prompts import CHAT_PROMPTS
from experiments.common import default_device, figure, parser, save
from megadecode import Engine, SamplingParams
from megadecode.acceptance import propose
from megadecode.models.store import DEFAULT_MODEL

ROWS = (4, 8, 16, 32)
CHAIN = 7  # drafted positions of the shipped drafter
POLICIES: dict[str, tuple[int, bool]] = {"plain": (0, False), "chain": (CHAIN, True)} | {
    f"tree, N = {rows}": (rows - 1, False) for rows in ROWS
}  # budget, whether a chain
CONTEXTS = (1024, 8192)  # of the break-even; random tokens
DRAWS = 2000

Answer = tuple[list[int], int, float]
"""Token ids, verify steps, seconds; steps and seconds behind the first token."""


class Policies:
    """The engine under one policy after another: on a GPU one engine that changes it, which takes
    microseconds, on a CPU an engine for each. rejecting: with a script that is never right."""

    def __init__(self, args: Any, ctx: int, rejecting: bool = False) -> None:
        self.args, self.ctx, self.rejecting = args, ctx, rejecting
        self.engine = self._open(budget=max(ROWS) - 1) if args.device == "cuda" else None

    def _open(self, **options: Any) -> Engine:
        args, common = self.args, dict(ctx=self.ctx, slots=1, device=self.args.device)
        common |= {"kernels": args.kernels} if args.kernels else {}
        if self.rejecting and options.get("draft") != "off":
            # Scripted candidates are distinct from token 0, which no answer holds.
            never = propose([0] * (self.ctx - 1), 1, vocab=args.vocab, acceptance=0.0, second=0.0)
            common["script"] = make_script(*never) if args.device == "cpu" else never
        return Engine(args.model, **common, **options)

    @contextmanager
    def under(self, name: str) -> Iterator[Engine]:
        budget, chain = POLICIES[name]
        if self.engine is not None:
            with self.engine.parked():
                self.engine._parts.set_policy(budget, chain)
            yield self.engine
            return
        how: dict[str, Any] = dict(budget=budget) if budget else dict(draft="off")
        with self._open(**how, **(dict(shape="chain") if chain else {})) as engine:
            yield engine

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


def decode(engine: Engine, prompts: Sequence[Any], tokens: int) -> list[Answer]:
    """Answers to the prompts, one after the other; a short one first warms up."""
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    engine.submit(prompts[0], SamplingParams(max_new_tokens=8, ignore_eos=True)).result()
    out = []
    for prompt in prompts:
        result = engine.submit(prompt, params).result()
        if result.error is not None:
            raise result.error
        s = result.stats
        out.append((list(result.token_ids), s.steps - 1, (s.tokens - 1) / s.tok_s))
    engine.park()
    return out


def rounds_of(policies: Policies, prompts: Sequence[Any], tokens: int, rounds: int) -> dict:
    """{policy: [a round's answers]}; the order of policies alternates. SystemExit if a policy
    changes the tokens."""
    out: dict[str, list[list[Answer]]] = {name: [] for name in POLICIES}
    texts: list[list[int]] = []
    for turn in range(rounds):
        for name in list(POLICIES)[:: 1 if turn % 2 == 0 else -1]:
            with policies.under(name) as engine:
                answers = decode(engine, prompts, tokens)
            texts = texts or [ids for ids, _, _ in answers]
            if [ids for ids, _, _ in answers] != texts:
                raise SystemExit(f"{name} changed the tokens: the figures are void")
            out[name].append(answers)
    return out


def step_us(answers: Sequence[Answer]) -> float:
    return sum(a[2] for a in answers) / sum(a[1] for a in answers) * 1e6


def tau_of(answers: Sequence[Answer]) -> float:
    return sum(len(a[0]) - 1 for a in answers) / sum(a[1] for a in answers)


def intervals(seconds: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Each policy's time over the best one's. seconds: of every prompt, median over rounds."""
    best = min(seconds, key=lambda name: seconds[name].sum())
    n = len(seconds[best])
    drawn = np.random.default_rng(5).integers(0, n, (DRAWS, n))
    base, out = seconds[best][drawn].sum(1), {}
    for name, times in seconds.items():
        low, high = np.quantile(times[drawn].sum(1) / base, (0.025, 0.975))
        ratio = float(times.sum() / seconds[best].sum())
        out[name] = {"ratio": ratio, "low": float(low), "high": float(high)}
    return out


def summary(answered: dict[str, list], rejected: dict[str, list]) -> list[dict[str, Any]]:
    """A row a policy, medians over rounds; break-even from rejected steps over plain ones."""
    seconds = {
        name: np.median([[a[2] for a in answers] for answers in rounds], 0)
        for name, rounds in answered.items()
    }
    against = intervals(seconds)
    tokens = sum(len(a[0]) - 1 for a in answered["plain"][0])
    lost = statistics.median(step_us(r) for r in rejected["plain"])
    out = []
    for name, rounds in answered.items():
        steps = [step_us(r) for r in rejected[name]]
        out.append(
            {
                "policy": name, "tau": tau_of(rounds[0]),
                "step_us": statistics.median(step_us(r) for r in rounds),
                "tok_s": tokens / float(seconds[name].sum()),
                "rejected_step_us": statistics.median(steps),
                "gain": float(seconds["plain"].sum() / seconds[name].sum()),
                "break_even": statistics.median(steps) / lost,
                "against_best": against[name],
            }
        )  # fmt: skip
    return out


def figures_of(answered: dict[str, list], rejected: dict[str, list]) -> dict[str, Any]:
    out = {}
    for name, rounds in answered.items():
        times = [sum(a[2] for a in answers) for answers in rounds]
        tokens = sum(len(a[0]) - 1 for a in rounds[0])
        out[f"{name}: tok/s"] = figure([tokens / t for t in times])
        out[f"{name}: step, us"] = figure([step_us(r) for r in rounds])
        out[f"{name}: rejected step, us"] = figure([step_us(r) for r in rejected[name]])
        out[f"{name}: tau"] = figure([tau_of(r) for r in rounds])
    return out


def by_context(rejecting: Policies, args: Any, rounds: int) -> list[dict[str, Any]]:
    """Break-even behind prompts of random tokens."""
    out = []
    for context in args.contexts:
        ids = np.random.default_rng(context).integers(3, args.vocab - 1, context).tolist()
        found = rounds_of(rejecting, [ids], 32, rounds)
        us = {name: statistics.median(map(step_us, r)) for name, r in found.items()}
        row = {name: v / us["plain"] for name, v in us.items()}
        out.append({"context": context, "plain_us": us["plain"], "break_even": row})
        print(f"break-even at {context}:", {k: round(v, 2) for k, v in row.items()}, flush=True)
    return out


def main() -> None:
    """Command line."""
    made = parser(__doc__, "chain_or_tree")
    made.add_argument("--device", default=default_device())
    made.add_argument("--model", default=DEFAULT_MODEL)
    made.add_argument("--prompts", type=int, default=40, help="on a CPU 8")
    made.add_argument("--tokens", type=int, default=96, help="on a CPU 48")
    made.add_argument("--rounds", type=int, default=2)
    made.add_argument("--contexts", nargs="*", type=int, default=list(CONTEXTS))
    made.add_argument("--kernels", help="of a GPU, built beforehand")
    args = made.parse_args()
    if args.device == "cpu":
        args.prompts, args.tokens, args.contexts = min(args.prompts, 8), min(args.tokens, 48), []
    if args.quick:
        few = (4, 32, 1) if args.device == "cpu" else (8, 48, 2)
        args.prompts, args.tokens, args.rounds = few
        args.contexts = []
    prompts = list(CHAT_PROMPTS[: args.prompts])
    drafting = Policies(args, 1024)
    answered = rounds_of(drafting, prompts, args.tokens, args.rounds)
    drafting.close()
    with_vocab(args)
    rejecting = Policies(args, max([1024, *(n + 256 for n in args.contexts)]), rejecting=True)
    rejected = rounds_of(rejecting, prompts[:4], args.tokens, args.rounds)
    for name, rounds in rejected.items():
        if name != "plain" and tau_of(rounds[0]) > 1.1:
            raise SystemExit(f"{name}: the script was right, tau {tau_of(rounds[0]):.2f}")
    lengths = by_context(rejecting, args, args.rounds)
    rejecting.close()
    table = summary(answered, rejected)
    for row in table:
        a = row["against_best"]
        print(
            f"{row['policy']:12s} tau {row['tau']:.2f}  step {row['step_us']:9.0f} us  "
            f"{row['tok_s']:7.1f} tok/s  gain {row['gain']:.2f}  break-even "
            f"{row['break_even']:.2f}  time over the best {a['low']:.3f} .. {a['high']:.3f}"
        )
    fields = {
        "model": args.model, "prompts": args.prompts, "tokens": args.tokens,
        "rounds": args.rounds, "policies": table, "by_context": lengths,
        "figures": figures_of(answered, rejected),
    }  # fmt: skip
    save("chain_or_tree", args.json, args.device, fields, args.quick)


def with_vocab(args: Any) -> None:
    """What a script needs to know of the model."""
    from megadecode.models.load import load_model

    args.vocab = load_model(args.model).config.vocab


if __name__ == "__main__":
    main()
