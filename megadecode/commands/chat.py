"""`megadecode chat`: a conversation, turn by turn."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress

import typer

from megadecode.commands import _common as common


def chat(
    model: common.Model = "smollm2-135m",
    ctx: common.Ctx = 65536,
    device: common.Device = "auto",
    weights: common.WeightType = None,
    system: str = typer.Option("", help="A system message to begin with."),
    max_new_tokens: common.MaxNewTokens = 1024,
    temperature: common.Temperature = 0.0,
    top_k: common.TopK = 0,
    top_p: common.TopP = 1.0,
    min_p: common.MinP = 0.0,
    seed: common.Seed = None,
    stop: common.Stop = None,
    draft: common.Draft = "auto",
    budget: common.Budget = "auto",
    as_json: common.Json = False,
    stream: common.JsonStream = False,
) -> None:
    """Talk to a model. Lines are turns; /help lists the commands. Reads a pipe as well."""
    from megadecode.commands._conversation import Conversation, Left
    from megadecode.errors import ParameterError, PromptError
    from megadecode.sampling import SamplingParams

    params = SamplingParams(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        min_p=min_p, seed=seed, stop=stop or (),
    )  # fmt: skip
    conversation = Conversation(params, system)
    options = {
        "device": device, "weights": weights, "draft": draft, "budget": common.budget_of(budget),
    }  # fmt: skip
    console, failed = common.notes(), False
    with common.opened(model, ctx, **options) as engine, suppress(Left):
        for line in _lines():
            try:
                if (said := conversation.command(line)) is not None:
                    console.print(said, markup=False)
                    continue
                request = engine.submit(conversation.ask(line), conversation.params)
                result = common.show(engine, request, as_json=as_json, stream=stream)
                conversation.note(result)
                if result.error:
                    failed = True
                    common.say(result.error)
            except (PromptError, ParameterError, OSError) as error:
                conversation.take_back()
                failed = True
                common.say(common.words(error))
    if failed and not sys.stdin.isatty():
        raise typer.Exit(1)


def _lines() -> Iterator[str]:
    """Turns and commands, without blank ones, until the end of the input."""
    if sys.stdin is None:
        return
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    with suppress(ImportError):
        import readline  # noqa: F401  (gives `input` its editing and history)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            sys.stdout.write("\n")
            return
        except KeyboardInterrupt:
            sys.stdout.write("\n(/exit or ctrl-D leaves)\n")
            continue
        if line:
            yield line


def register(app: typer.Typer) -> None:
    """Add `chat`."""
    app.command()(chat)
