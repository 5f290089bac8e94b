"""`megadecode train-drafter`: a drafter for any model, from text the model writes itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megadecode.commands._common import notes


def train_drafter(
    model: Annotated[str, typer.Argument(help="A known model's name or the path of a GGUF file.")],
    out: Annotated[Path, typer.Option(help="Folder for the drafter and all that leads to it.")],
    device: Annotated[str, typer.Option(help="A torch device: auto, cpu or cuda.")] = "auto",
    answers: Annotated[int, typer.Option(help="Short answers to write.")] = 60_000,
    rewrites: Annotated[int, typer.Option(help="Answers that treat a given text.")] = 12_000,
    long: Annotated[int, typer.Option(help="Answers in contexts of 2k, 4k and 8k.")] = 1_800,
    answer_tokens: Annotated[int, typer.Option(help="The longest answer.")] = 320,
    rows: Annotated[int, typer.Option(help="Sequences written at once, at most.")] = 2048,
    layers: Annotated[int, typer.Option(help="Layers of the drafter.")] = 3,
    block_size: Annotated[int, typer.Option(help="Positions of a block, the anchor's too.")] = 8,
    window: Annotated[int, typer.Option(help="Positions a layer sees; 0: all.")] = 1024,
    start: Annotated[str, typer.Option(help="random, or target: its last layers.")] = "random",
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 20_000,
    minutes: Annotated[float, typer.Option(help="End by the clock instead; 0: by steps.")] = 0.0,
    tokens: Annotated[int, typer.Option(help="Tokens of a step.")] = 16_384,
    blocks: Annotated[int, typer.Option(help="Blocks of a step.")] = 2048,
    rate: Annotated[float, typer.Option(help="The highest learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Of the corpus and of training.")] = 0,
    mask_token: Annotated[int, typer.Option(help="Id that stands for a drafted position.")] = 0,
    texts: Annotated[int, typer.Option(help="Held-out texts of a domain and context.")] = 24,
    fused: Annotated[bool, typer.Option(help="Compile elementwise code; pays on a GPU.")] = True,
) -> None:
    """Train a drafter on text the model writes itself; goes on where it was stopped."""
    import torch

    from megadecode.models.gguf_file import load
    from megadecode.models.store import resolve
    from megadecode.training.author import Plan
    from megadecode.training.recipe import Recipe
    from megadecode.training.run import Settings
    from megadecode.training.run import train_drafter as train

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    target = load(resolve(model))
    most = target.config.context_tokens
    contexts = [context for context in (2048, 4096, 8192) if context <= most]
    plan = Plan(
        answers=answers, rewrites=rewrites, answer_tokens=answer_tokens,
        long={context: long // len(contexts) for context in contexts},
    )  # fmt: skip
    steps = 10**9 if minutes else steps
    recipe = Recipe(
        layers=layers, block_size=block_size, start=start, steps=steps, rate=rate, seed=seed,
        warm_up=max(1, min(400, steps // 10)), tokens=tokens, blocks=blocks,
        sliding=layers if window else 0, window=window or 1, is_causal=False,
        weight_decay=0.05, long_weight=0.5,
    )  # fmt: skip
    settings = Settings(
        plan=plan, recipe=recipe, device=device, rows=rows, per_cell=texts,
        fused=fused and device != "cpu", mask_token_id=mask_token,
        seconds=minutes * 60 or None,
    )  # fmt: skip
    columns = (
        TextColumn("{task.description:9s}"), BarColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(), TextColumn("{task.fields[figures]}"),
    )  # fmt: skip
    console = notes()
    with Progress(*columns, console=console) as bar:
        tasks: dict[str, int] = {}

        def said(what: str, done: float, total: float, figures: str) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total, figures="")
            bar.update(tasks[what], completed=done, total=total, figures=figures)  # type: ignore[arg-type]

        made = train(target, out, settings, said)
    print(made)


def register(app: typer.Typer) -> None:
    """Add `train-drafter`."""
    app.command()(train_drafter)
