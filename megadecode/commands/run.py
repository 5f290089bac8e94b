"""`megadecode run`: answer one prompt."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from megadecode.commands._common import (
    Budget,
    Ctx,
    Device,
    Draft,
    Json,
    Model,
    Shape,
    WeightType,
    budget_of,
    fail,
    notes,
    print_json,
)


def run(
    prompt: Annotated[str, typer.Argument(help="What to answer; '-' reads standard input.")],
    model: Model = "smollm2-135m",
    ctx: Ctx = 65536,
    device: Device = "auto",
    weights: WeightType = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Only the k likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Only the likeliest, up to this mass.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Only those this likely beside the best.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="The same seed, the same tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text to stop at; repeatable.")] = None,
    draft: Draft = "auto",
    budget: Budget = "auto",
    shape: Shape = "tree",
    raw: Annotated[bool, typer.Option("--raw", help="No chat template around the prompt.")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Time per phase, afterwards.")] = False,
    as_json: Json = False,
) -> None:
    """Answer one prompt, streaming."""
    from megadecode.engine import Engine
    from megadecode.errors import EMPTY, PromptError
    from megadecode.sampling import SamplingParams
    from megadecode.trace import table

    text = (sys.stdin.read() if sys.stdin else "") if prompt == "-" else prompt
    if not text:
        raise PromptError(EMPTY)
    console = notes()
    params = SamplingParams(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        min_p=min_p, seed=seed, stop=stop or (),
    )  # fmt: skip
    with console.status("loading"):
        engine = Engine(
            model, ctx, slots=1, device=device, weights=weights, draft=draft,
            budget=budget_of(budget), shape=shape,
        )  # fmt: skip
    with engine:
        request = engine.submit(text, params, chat=not raw)
        if not as_json:
            for chunk in request:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
            sys.stdout.write("\n")
        result = request.result()
        figures = engine.trace()
    if as_json:
        print_json(asdict(result))
    else:
        s = result.stats
        console.print(
            f"[dim]{s.tokens} tokens, {s.tok_s:.1f} tok/s, first after {s.ttft_s * 1e3:.0f} ms, "
            f"{s.host_round_trips} host round trip{'s' * (s.host_round_trips != 1)}, "
            f"finish: {result.finish_reason}[/dim]"
        )
    if trace:
        console.print(table(figures))
    if result.error:
        raise typer.Exit(fail(result.error))


def register(app: typer.Typer) -> None:
    """Add `run`."""
    app.command()(run)
