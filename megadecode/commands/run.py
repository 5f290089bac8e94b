"""`megadecode run`: answer one prompt."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from megadecode.commands import _common as common


def run(
    prompt: Annotated[str, typer.Argument(help="What to answer; '-' reads standard input.")],
    model: common.Model = "smollm2-135m",
    ctx: common.Ctx = 65536,
    device: common.Device = "auto",
    weights: common.WeightType = None,
    max_new_tokens: common.MaxNewTokens = 256,
    temperature: common.Temperature = 0.0,
    top_k: common.TopK = 0,
    top_p: common.TopP = 1.0,
    min_p: common.MinP = 0.0,
    seed: common.Seed = None,
    stop: common.Stop = None,
    logprobs: Annotated[int, typer.Option(help="Alternatives per token, in the JSON.")] = 0,
    draft: common.Draft = "auto",
    budget: common.Budget = "auto",
    shape: common.Shape = "tree",
    raw: Annotated[bool, typer.Option("--raw", help="No chat template around the prompt.")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Time per phase, afterwards.")] = False,
    as_json: common.Json = False,
    stream: common.JsonStream = False,
) -> None:
    """Answer one prompt, streaming."""
    from megadecode.errors import EMPTY, PromptError
    from megadecode.sampling import SamplingParams
    from megadecode.trace import table

    text = (sys.stdin.read() if sys.stdin else "") if prompt == "-" else prompt
    if not text:
        raise PromptError(EMPTY)
    params = SamplingParams(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        min_p=min_p, seed=seed, stop=stop or (), logprobs=logprobs,
    )  # fmt: skip
    options = {
        "device": device, "weights": weights, "draft": draft, "shape": shape,
        "budget": common.budget_of(budget),
    }  # fmt: skip
    console = common.notes()
    with common.opened(model, ctx, **options) as engine:
        request = engine.submit(text, params, chat=not raw)
        result = common.show(engine, request, as_json=as_json, stream=stream)
        if trace:
            engine.park()  # a device that counts has counted all of it then
            split = engine.stats().split
            figures = table(engine.trace()) if split is None else split.table()
    if not as_json:
        console.print(f"[dim]{common.summary(result)}[/dim]")
    if trace:
        console.print(figures)
    if result.error:
        raise typer.Exit(common.fail(result.error))
    if result.finish_reason == "abort":  # an interrupt
        raise typer.Exit(130)


def register(app: typer.Typer) -> None:
    """Add `run`."""
    app.command()(run)
