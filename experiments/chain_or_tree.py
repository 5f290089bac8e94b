"""Does a tree pay against a chain, and what must a step commit to pay at all?

    python -m experiments.chain_or_tree [--device cpu] [--kernels DIR]

The engine with the shipped drafter answers chat prompts under every policy in turn, each with the
same tokens. tau: tokens a step commits; step: mean time by the device's own clock; gain: the
policy's rate over plain decoding. `rejected`: the same policy with a script that is never right in
the drafter's place, which gives the break-even: the tau at which a step of this policy is worth its
time. Policies: plain, the chain of all drafted positions, trees of N rows.
"""

from __future__ import annotations

import statistics
from typing import Any

from cute_kernels.cpu.speculate import make_script
from experiments.chat_prompts import CHAT_PROMPTS
from experiments.common import default_device, parser, save
from megadecode import Engine, SamplingParams
from megadecode.acceptance import propose
from megadecode.models.store import DEFAULT_MODEL

ROWS = (4, 8, 16, 32)
POLICIES: dict[str, dict[str, Any]] = {
    "plain": dict(draft="off"),
    "chain": dict(shape="chain", budget=7),
} | {f"tree, N = {rows}": dict(budget=rows - 1) for rows in ROWS}


def decode(engine: Engine, prompts: list[str], tokens: int) -> tuple[dict[str, float], list]:
    """tau and us a step over the prompts, and the texts. The first prompt warms up."""
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    engine.submit(prompts[0], SamplingParams(max_new_tokens=8)).result()
    steps, made, seconds, texts = 0, 0, 0.0, []
    for prompt in prompts:
        result = engine.submit(prompt, params).result()
        if result.error is not None:
            raise result.error
        s = result.stats
        steps, made = steps + s.steps - 1, made + s.tokens - 1
        seconds += (s.tokens - 1) / s.tok_s
        texts.append(result.token_ids)
    engine.park()
    return {"tau": made / steps, "step_us": seconds / steps * 1e6, "tok_s": made / seconds}, texts


def main() -> None:
    """Command line."""
    made = parser(__doc__, "chain_or_tree")
    made.add_argument("--device", default=default_device())
    made.add_argument("--model", default=DEFAULT_MODEL)
    made.add_argument("--prompts", type=int, default=8)
    made.add_argument("--tokens", type=int, default=64)
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--kernels", help="of a GPU, built beforehand")
    args = made.parse_args()
    if args.quick:
        args.prompts, args.tokens, args.rounds = 3, 32, 1
    options: dict[str, Any] = dict(ctx=1024, slots=1, device=args.device)
    options |= {"kernels": args.kernels} if args.kernels else {}
    prompts = list(CHAT_PROMPTS[: args.prompts])
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in POLICIES}
    rejected: dict[str, list[float]] = {name: [] for name in POLICIES}
    plain: list = []
    for turn in range(args.rounds):
        names = list(POLICIES) if turn % 2 == 0 else list(POLICIES)[::-1]
        for name in names:
            with Engine(args.model, **options, **POLICIES[name]) as engine:
                figures, texts = decode(engine, prompts, args.tokens)
                vocab = engine.config.vocab
            plain = plain or texts
            if texts != plain:
                raise SystemExit(f"{name} changed the tokens: the figures are void")
            rows[name].append(figures)
            if name != "plain":
                never = propose([0] * 1023, 1, vocab=vocab, acceptance=0.0, second=0.0)
                # Scripted candidates are distinct from token 0, which no answer holds.
                script = make_script(*never) if args.device == "cpu" else never
                with Engine(args.model, **options, **POLICIES[name], script=script) as engine:
                    forced, again = decode(engine, prompts[:2], args.tokens)
                if again != plain[:2]:
                    raise SystemExit(f"{name}, rejected, changed the tokens: the figures are void")
                rejected[name].append(forced["step_us"])
                if forced["tau"] > 1.1:
                    raise SystemExit(f"{name}: the script was right, tau {forced['tau']:.2f}")
    table = summary(rows, rejected)
    for row in table:
        print(
            f"{row['policy']:12s} tau {row['tau']:.2f}  step {row['step_us']:9.0f} us  "
            f"{row['tok_s']:7.1f} tok/s  gain {row['gain']:.2f}  break-even {row['break_even']:.2f}"
        )
    fields = {
        "model": args.model, "prompts": args.prompts, "tokens": args.tokens,
        "rounds": args.rounds, "policies": table,
    }  # fmt: skip
    save("chain_or_tree", args.json, args.device, fields, args.quick)


def summary(
    rows: dict[str, list[dict[str, float]]], rejected: dict[str, list[float]]
) -> list[dict[str, Any]]:
    """Medians of rounds; break-even from the rejected steps over plain ones."""

    def middle(name: str, key: str) -> float:
        return statistics.median(row[key] for row in rows[name])

    base = middle("plain", "step_us")
    out = []
    for name in rows:
        step = statistics.median(rejected[name]) if rejected[name] else base
        out.append(
            {
                "policy": name, "tau": middle(name, "tau"), "step_us": middle(name, "step_us"),
                "tok_s": middle(name, "tok_s"), "rejected_step_us": step,
                "gain": middle(name, "tok_s") / middle("plain", "tok_s"),
                "break_even": step / base,
            }
        )  # fmt: skip
    return out


if __name__ == "__main__":
    main()
