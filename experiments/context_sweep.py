"""Step time and tokens per second over the length of the context, all rivals and the megakernel.

    python -m experiments.context_sweep [--kernels DIR] [--model smollm2-135m]

N rows, one sequence, a context of random keys (the megakernel: of random tokens). Acceptance is
scripted: the rivals commit a fixed number of tokens a step, the megakernel drafts from a script
that is right so often. `tok_s` is committed tokens over step time for the rivals, and what the
engine's own clock counted for the megakernel: compare the step times first. `with_prefill`: tokens
per second of a request of so many new tokens with its prompt's time in the denominator: the longer
the context, the more it hides of the steps.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from experiments.baseline_steps import (
    COMMITTED,
    FORMS,
    MOST_SDPA,
    PDL,
    forget,
    open_rival,
    setup_of,
    timed,
)
from experiments.baselines.models import OnDevice, open_model
from experiments.common import need_gpu, parser, quiet, save

CONTEXTS = (1024, 4096, 8192, 16384, 46000, 64000)
SHOWN = (
    "graph_host_tree", "graph_host_tree, split-KV, fused", "graph_whole_step, split-KV, fused",
    "graph_pdl",
)  # fmt: skip
ACCEPTANCE = 0.8  # of the script's first candidates; about COMMITTED tokens a step


def prefill_s(rival: Any, context: int) -> float:
    """Seconds to take a prompt."""
    prompt = list(range(1000, 1000 + context))
    prompt = [i % 40000 for i in prompt]
    rival.core.prefill(prompt[:64])
    rival.finish()
    begun = time.perf_counter()
    rival.core.prefill(prompt)
    return time.perf_counter() - begun


def rival_cases(form: str, weights: Any, drafter: Any, args: Any) -> list[dict[str, Any]]:
    """A rival over the contexts."""
    ctx, out = max(args.contexts) + (args.steps + 8) * COMMITTED, []
    sdpa = FORMS[form][1]["attention"] == "sdpa"
    setup = setup_of(form, weights, drafter, ctx, args, forced=COMMITTED - 1)
    rival = open_rival(form, setup, args)
    for context in args.contexts:
        if sdpa and context > MOST_SDPA and args.quick:
            continue
        row = timed(rival, context, args.steps if not sdpa else 8, 1 if args.quick else 3)
        row |= {"form": form, "context": context, "tok_s": COMMITTED / row["us"] * 1e6}
        if context <= MOST_SDPA or not args.quick:  # torch takes long prompts slowly
            seconds = prefill_s(rival, context)
            whole = seconds + args.new_tokens / COMMITTED * row["us"] / 1e6
            row |= {"prefill_s": seconds, "with_prefill_tok_s": args.new_tokens / whole}
        out.append(row)
        say(row)
    return out


def ours(name: str, contexts: list[int], args: Any) -> list[dict[str, Any]]:
    from experiments.megakernel import Megakernel

    out = []
    for context in contexts:
        with Megakernel(name, context + 2 * args.new_tokens + 64, args.kernels) as kernel:
            kernel.open(context, args.new_tokens, ACCEPTANCE)
            kernel.run(args.new_tokens)
            row = kernel.run(args.new_tokens)
            whole = row["ttft_s"] + args.new_tokens / row["tok_s"]
            row |= {
                "form": "megakernel", "context": context, "prefill_s": row.pop("ttft_s"),
                "with_prefill_tok_s": args.new_tokens / whole,
            }  # fmt: skip
        out.append(row)
        say(row)
        forget()
    return out


def say(row: dict[str, Any]) -> None:
    line = f"{row['form']:36s} {row['context']:6d}: {row['us']:9.1f} us, {row['tok_s']:7.0f} tok/s"
    if "prefill_s" in row:
        line += f", with the prompt ({row['prefill_s']:.2f} s) {row['with_prefill_tok_s']:7.0f}"
    print(line, flush=True)


def main() -> None:
    """Command line."""
    made = parser(__doc__, "context_sweep")
    made.add_argument("--model", default="smollm2-135m")
    made.add_argument("--contexts", nargs="+", type=int, default=list(CONTEXTS))
    made.add_argument("--forms", nargs="+", default=list(SHOWN), choices=list(FORMS))
    made.add_argument("--rows", type=int, default=16)
    made.add_argument("--steps", type=int, default=24)
    made.add_argument("--new-tokens", type=int, default=256)
    made.add_argument("--pdl", type=Path, help="kernels of graph_pdl, built beforehand")
    made.add_argument("--kernels", help="kernels built beforehand; without, the rivals alone")
    args = made.parse_args()
    need_gpu("context_sweep")
    quiet()
    args.device = "cuda"
    if args.pdl is None:
        args.forms = [form for form in args.forms if FORMS[form][0] != PDL]
    # The engine first: whatever a rival does to the process, its figures are written.
    fields: dict[str, Any] = {
        "model": args.model, "rows": args.rows, "committed": COMMITTED, "acceptance": "scripted",
        "new_tokens": args.new_tokens, "cases": [], "failed": {},
    }  # fmt: skip
    if args.kernels:
        fields["cases"] += ours(args.model, args.contexts, args)
        save("context_sweep", args.json, "cuda", fields, args.quick)
    weights, drafter = open_model(args.model, "cuda")
    rounded = OnDevice(weights, "cuda", torch.bfloat16)
    for form in args.forms:
        try:
            fields["cases"] += rival_cases(form, rounded, drafter, args)
        except Exception as error:  # one that fails does not stop the others
            fields["failed"][form] = f"{type(error).__name__}: {error}"[:400]
            print(f"{form}: {fields['failed'][form]}", flush=True)
        forget()
        save("context_sweep", args.json, "cuda", fields, args.quick)


if __name__ == "__main__":
    main()
