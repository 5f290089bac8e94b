"""`megadecode bench`: what a step costs here, by stage, with speculation and without."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from megadecode.commands import _common as common


def bench(
    model: common.Model = "smollm2-135m",
    ctx: common.Ctx = 2048,
    device: common.Device = "auto",
    weights: common.WeightType = None,
    draft: common.Draft = "auto",
    budget: common.Budget = "auto",
    shape: common.Shape = "tree",
    prompt: Annotated[
        list[str] | None, typer.Option(help="What to decode; repeatable. Default: three of ours.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 128,
    rounds: Annotated[int, typer.Option(help="Rounds that count, after one that warms up.")] = 3,
    as_json: common.Json = False,
) -> None:
    """Time one stream: tokens a second, tokens a step, and a step by stage.

    With a drafter, rounds with and without speculation take turns, and both must give the same
    tokens. Only decoding is timed, by the device's clock: the prompt is not in it.
    """
    from megadecode.bench import PROMPTS, bench

    with common.notes().status("") as status:
        report = bench(
            model, prompts=prompt or PROMPTS, tokens=tokens, rounds=rounds, say=status.update,
            ctx=ctx, device=device, weights=weights, draft=draft, shape=shape,
            budget=common.budget_of(budget),
        )  # fmt: skip
    if as_json:
        common.print_json(report)
    else:
        _print(report)


def _print(report: dict[str, Any]) -> None:
    sides = [name for name in ("plain", "speculation") if name in report]
    console = Console(highlight=False)
    console.print(f"{report['model']}, {report['weights']}, {report['machine']}")
    table = Table(box=None, pad_edge=False)
    table.add_column("median of rounds")
    for side in sides:
        table.add_column(side, justify="right")
    rows = [("tokens a second", "tok_s", ".1f"), ("tokens a step (tau)", "tau", ".2f"),
            ("first token, ms", "ttft_ms", ".0f"), ("step, us", "step_us", ".0f")]  # fmt: skip
    for title, key, form in rows:
        table.add_row(title, *(format(report[side][key], form) for side in sides))
    if report[sides[0]]["rows"]:
        table.add_row("rows a step", *(f"{report[side]['rows']:.1f}" for side in sides))
    for stage in report[sides[0]]["stages"]:
        table.add_row(f"  {stage}", *(f"{report[side]['stages'][stage]:.1f}" for side in sides))
    if not report[sides[0]]["stages"]:
        console.print("this device keeps no trace: a step by stage is not known")
    for title, of in (
        ("read a step, MB", lambda r: f"{r['read_bytes'] / 1e6:.0f}"),
        ("read, GB/s", lambda r: f"{r['achieved_gb_s']:.1f}"),
        ("device reads, GB/s", lambda r: f"{r['read_gb_s']:.1f}"),
        ("of what it reads", lambda r: f"{r['of_bandwidth']:.0%}"),
    ):
        table.add_row(title, *(of(report[side]) for side in sides))
    console.print(table)
    if "speedup" in report:
        turns = " ".join(f"{ratio:.2f}" for ratio in report["speedups"])
        console.print(f"speculation / plain: {report['speedup']:.2f} (rounds: {turns})")
    else:
        console.print("no drafter: only plain decoding was measured")


def register(app: typer.Typer) -> None:
    """Add `bench`."""
    app.command()(bench)
