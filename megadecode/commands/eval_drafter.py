"""`megadecode eval-drafter`: what a drafter is worth on texts its target has written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megadecode.commands._common import Model


def eval_drafter(
    drafter: Annotated[str, typer.Argument(help="A drafter's path, or auto: the model's own.")],
    texts: Annotated[Path, typer.Option(help="Texts of the target, one JSON object a line.")],
    model: Model = "smollm2-135m",
    device: Annotated[str, typer.Option(help="A torch device: cpu or cuda.")] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for tau.json and plots.")] = Path("."),
    limit: Annotated[int, typer.Option(help="Only the first so many texts; 0: all.")] = 0,
) -> None:
    """Tau along the engine's own walk: chain and trees, by domain, context and temperature."""
    import json
    import time

    import torch

    from megadecode.drafter.find import choose_drafter
    from megadecode.drafter.module import DrafterModule
    from megadecode.errors import ModelError
    from megadecode.models.load import load_model
    from megadecode.training.evaluate import evaluate, read_texts
    from megadecode.training.plots import draw
    from megadecode.training.target import TorchTarget

    weights = load_model(model)
    chosen = choose_drafter(drafter, weights)
    if chosen is None:
        raise ModelError(f"no drafter belongs to {weights.config.name}; give one's path")
    some = read_texts(texts)[: limit or None]
    target = TorchTarget(weights, device)
    taps = chosen.config.taps
    module = DrafterModule(chosen.config, target.embed, target.head).load(chosen.tensors())
    module = module.to(device)

    def features(ids: object) -> torch.Tensor:
        return target.forward(torch.tensor([ids], device=device), taps)[1][0]

    notes, start = Console(stderr=True), time.monotonic()
    with notes.status("drafting") as status:
        found = evaluate(
            module, some, features,
            progress=lambda done: status.update(f"drafting: {done} of {len(some)} texts"),
        )  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    result = {
        "drafter": chosen.config.to_dict(),
        "target": weights.config.name,
        "texts": str(texts),
        "seconds": round(time.monotonic() - start, 2),
        "tables": found,
    }
    (out / "tau.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for line in table(found):
        print(line)
    for path in draw(found, out):
        notes.print(f"[dim]{path}[/dim]")


def table(found: list[dict[str, object]]) -> list[str]:
    """The tables' tau as aligned text."""
    names: list[str] = next((list(t["tau"]) for t in found if t["texts"]), [])  # type: ignore[call-overload]
    lines = [f"{'domain':10s} {'context':>7s} {'T':>4s} {'texts':>5s} "
             + " ".join(f"{name:>6s}" for name in names)]  # fmt: skip
    for t in found:
        if t["texts"]:
            tau: dict[str, float] = t["tau"]  # type: ignore[assignment]
            values = " ".join(f"{tau[name]:6.2f}" for name in names)
            lines.append(
                f"{t['domain'] or 'all':10s} {t['context'] or 'all':>7} {t['temperature']:4g} "
                f"{t['texts']:5d} {values}"
            )
    return lines


def register(app: typer.Typer) -> None:
    """Add `eval-drafter`."""
    app.command()(eval_drafter)
