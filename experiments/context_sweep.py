"""Step time and tokens per second over the length of the context, all rivals and the megakernel.

    python -m experiments.context_sweep [--kernels DIR] [--pdl DIR] [--model smollm2-135m]

N rows, one sequence. As far as the model was trained, all continue the same texts (stretches of
LONG, our own documentation) with the drafter's own acceptance: `acceptance` is
`drafter`, and tok/s is what each commits over what its steps take; where two bf16 sums differ the
texts part, so that tau is a sample of few texts. Beyond, acceptance is `scripted`: rivals accept
COMMITTED - 1 drafted tokens a step behind random keys, the megakernel drafts from a script that is
right so often; tok/s is COMMITTED over the step's time for all, so that nobody gains by a luckier
script (`tau` is what was committed). `with_prefill_tok_s`: of a request of so many new tokens with
its prompt's time in the denominator: the longer the context, the more it hides of the steps. The
rivals' prompts all run the same code (torch, chunks of 1,024 rows, flash attention), so that it is
timed once a context.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from experiments.baseline_steps import (
    COMMITTED,
    FORMS,
    PDL,
    forget,
    open_rival,
    replay_us,
    setup_of,
    timed,
)
from experiments.baselines.models import OnDevice, open_model
from experiments.common import default_device, figure, need_gpu, parser, quiet, save
from experiments.cubins import PDL as PDL_KERNELS
from experiments.cubins import engine_runs, find
from megadecode.acceptance import SCRIPTED
from megadecode.presets import NAMES

LONG = Path(__file__).parent / "baselines" / "long_ids.json"
CONTEXTS = (1024, 4096, 7936, 16384, 46000, 64000)
SHOWN = (
    "graph_host_tree", "graph_host_tree, split-KV, fused", "graph_whole_step, split-KV, fused",
    "graph_pdl",
)  # fmt: skip
ACCEPTANCE = 0.8  # of the script's first candidates; about COMMITTED tokens a step
TRAINED = 8192  # positions of smollm2-135m; the only model here with weights of its own
LONG_CONTEXT = 16384  # beyond it fewer rounds
TEXTS = 2  # of a round's, where the model continues texts
DRAFTER = "drafter"
BEGUN = time.perf_counter()


def is_real(context: int, args: Any) -> bool:
    """Whether a context is a text that the model was trained for."""
    return args.model not in NAMES and context + args.new_tokens <= TRAINED


def texts_of(context: int, count: int) -> list[list[int]]:
    """Stretches of the long text."""
    ids: list[int] = json.loads(LONG.read_text())
    apart = (len(ids) - context) // max(count, 2)
    return [ids[i * apart : i * apart + context] for i in range(count)]


def mean_tau(taus: list[float]) -> float:
    """Of answers of the same length: tokens over steps."""
    return statistics.harmonic_mean(taus)


def rates(row: dict[str, Any], tokens: float, prefill: float | None, args: Any) -> dict[str, Any]:
    """tok/s of steps that commit so many tokens, without and with the prompt."""
    rate = tokens / row["us"] * 1e6
    row |= {"tok_s": rate}
    if prefill is not None:
        whole = prefill + args.new_tokens / rate
        row |= {"prefill_s": prefill, "with_prefill_tok_s": args.new_tokens / whole}
    return row


def spread(us: list[float]) -> dict[str, Any]:
    """Median, least and largest, and the rounds."""
    return {"us": statistics.median(us), "us_min": min(us), "us_max": max(us), "rounds": us}


# -- rivals ----------------------------------------------------------------------------------------
def prefill_s(rival: Any, context: int) -> float:
    """Seconds to take a prompt."""
    prompt = [1000 + i % 40000 for i in range(context)]
    rival.core.prefill(prompt[:1100])  # a chunk, and one behind it
    rival.finish()
    begun = time.perf_counter()
    rival.core.prefill(prompt)
    return time.perf_counter() - begun


def only_this(rival: Any) -> None:
    """Graphs of other contexts away, where they are for so many keys: they would be timed too."""
    if rival.dynamic:
        rival.force(rival.setup.forced)


def continued(rival: Any, context: int, args: Any, rounds: int) -> dict[str, Any]:
    """A rival that continues the texts: us a step, tau, where the host's time goes."""
    texts = texts_of(context, rounds)
    made = [rival.generate(text, args.new_tokens) for text in texts]
    row: dict[str, Any] = spread([m.seconds / m.steps * 1e6 for m in made])
    row["tau"] = mean_tau([sum(m.step_tokens) / m.steps for m in made])
    rival.clock.on, rival.clock.seconds = True, {}
    short = rival.generate(texts[0], min(64, args.new_tokens))
    rival.clock.on = False
    row["host_us"] = {k: v / short.steps * 1e6 for k, v in rival.clock.seconds.items()}
    if rival.core.device.type == "cuda":
        row["graphs_us"] = replay_us(rival, 5)
    return row


def rival_cases(
    form: str, weights: Any, drafter: Any, args: Any, prompts_s: dict[int, float],
    keep: Callable[[dict[str, Any]], None],
) -> None:  # fmt: skip
    """A rival over the contexts: first those with a text. prompts_s: seconds of prompts, filled by
    the first rival."""
    ctx = max(args.contexts) + max(args.new_tokens, (args.steps + 8) * COMMITTED) + 64
    rival = open_rival(form, setup_of(form, weights, drafter, ctx, args), args)
    real = [context for context in args.contexts if is_real(context, args)]
    for context in args.contexts:
        if context not in prompts_s:
            prompts_s[context] = prefill_s(rival, context)
            print(f"a prompt of {context}: {prompts_s[context]:.2f} s", flush=True)
    for context in real:
        only_this(rival)
        row = continued(rival, context, args, TEXTS * args.rounds)
        row |= {"form": form, "context": context, "acceptance": DRAFTER}
        keep(rates(row, row["tau"], prompts_s[context], args))
    rest = [context for context in args.contexts if context not in real]
    if rest:
        rival.force(COMMITTED - 1)
    for context in rest:
        only_this(rival)
        slow = FORMS[form][1]["attention"] == "sdpa" and context > 4096
        rounds = args.rounds if context <= LONG_CONTEXT else 1
        row = timed(rival, context, 8 if slow else args.steps, rounds)
        row |= {"form": form, "context": context, "acceptance": SCRIPTED}
        keep(rates(row, COMMITTED, prompts_s[context], args))


# -- the megakernel --------------------------------------------------------------------------------
def ours(args: Any, keep: Callable[[dict[str, Any]], None]) -> None:
    """The megakernel over the contexts: one engine with the drafter's own candidates, one with a
    script."""
    from experiments.megakernel import Megakernel, random_ids

    for scripted in (False, True):
        contexts = [n for n in args.contexts if is_real(n, args) != scripted]
        if not contexts:
            continue
        ctx = max(contexts) + args.new_tokens
        with Megakernel(args.model, ctx, args.kernels, args.rows - 1, scripted) as kernel:
            for context in contexts:
                rounds = args.rounds if context <= LONG_CONTEXT else 1
                if scripted:
                    prompts = [random_ids(context, kernel.vocab)] * rounds
                    kernel.prepare(prompts[0], args.new_tokens, ACCEPTANCE)
                else:
                    prompts = texts_of(context, TEXTS * rounds)
                    kernel.run(prompts[0], args.new_tokens)
                runs = [kernel.run(prompt, args.new_tokens) for prompt in prompts]
                row = runs[0] | spread([run["us"] for run in runs])
                row["tau"] = mean_tau([run["tau"] for run in runs])
                prompt_s = statistics.median(run["ttft_s"] for run in runs)
                row |= {
                    "form": "megakernel", "context": context,
                    "acceptance": SCRIPTED if scripted else DRAFTER,
                }  # fmt: skip
                del row["ttft_s"]
                keep(rates(row, COMMITTED if scripted else row["tau"], prompt_s, args))
        forget()


def say(row: dict[str, Any]) -> None:
    print(
        f"{row['form']:36s} {row['context']:6d}: {row['us']:9.1f} us, tau {row['tau']:.2f} "
        f"({row['acceptance']}), {row['tok_s']:7.0f} tok/s, with the prompt "
        f"({row['prefill_s']:.2f} s) {row['with_prefill_tok_s']:7.0f}"
        f" [{time.perf_counter() - BEGUN:.0f} s]",
        flush=True,
    )


def main() -> None:
    """Command line."""
    made = parser(__doc__, "context_sweep")
    made.add_argument("--model", default="smollm2-135m")
    made.add_argument("--contexts", nargs="+", type=int, default=list(CONTEXTS))
    made.add_argument("--forms", nargs="*", default=list(SHOWN), choices=list(FORMS))
    made.add_argument("--rows", type=int, default=16)
    made.add_argument("--steps", type=int, default=24)
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--new-tokens", type=int, default=256)
    made.add_argument("--pdl", type=Path, help="kernels of graph_pdl, built beforehand")
    made.add_argument(
        "--kernels", help="the engine's kernels, built beforehand; without, built here"
    )
    args = made.parse_args()
    need_gpu("context_sweep")
    quiet()
    args.device = default_device()
    if args.quick:
        args.rounds = 1
    if PDL in args.forms:
        args.pdl = find(args.pdl, *PDL_KERNELS)
    if args.pdl is None:
        args.forms = [form for form in args.forms if FORMS[form][0] != PDL]
    fields: dict[str, Any] = {
        "model": args.model, "rows": args.rows, "committed": COMMITTED,
        "scripted_acceptance": ACCEPTANCE, "new_tokens": args.new_tokens, "cases": [],
        "failed": {}, "figures": {},
    }  # fmt: skip

    def keep(row: dict[str, Any]) -> None:
        fields["cases"].append(row)
        name = f"{args.model}, {row['form']} at {row['context']}, us"
        kind = "device" if row["form"] == "megakernel" else "host"
        fields["figures"][name] = figure(row["rounds"], kind)
        say(row)

    def attempt(form: str, work: Callable[[], None]) -> None:
        """One that fails does not stop the others."""
        try:
            work()
        except Exception as error:
            fields["failed"][form] = f"{type(error).__name__}: {error}"[:400]
            print(f"{form}: {fields['failed'][form]}", flush=True)
        forget()
        save("context_sweep", args.json, args.device, fields, args.quick)

    # The engine first: whatever a rival does to the process, its figures are written.
    if engine_runs(args.kernels):
        attempt("megakernel", lambda: ours(args, keep))
    if args.forms:
        weights, drafter = open_model(args.model, args.device)
        dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        rounded = OnDevice(weights, args.device, dtype)
        prompts_s: dict[int, float] = {}
        for form in args.forms:
            attempt(
                form,
                lambda: rival_cases(form, rounded, drafter, args, prompts_s, keep),  # noqa: B023
            )


if __name__ == "__main__":
    main()
