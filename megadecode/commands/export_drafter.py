"""`megadecode export-drafter`: a drafter in another program's format."""

from __future__ import annotations

from typing import Annotated

import typer


def export_drafter(
    drafter: Annotated[str, typer.Argument(help="A drafter's path, or auto: the model's own.")],
    gguf: Annotated[str, typer.Option(help="Write a llama.cpp DFlash draft here.")],
    model: Annotated[
        str, typer.Option(help="A known model's name or the path of a GGUF file.")
    ] = "smollm2-135m",
) -> None:
    """Write a drafter as a llama.cpp draft model (GGUF, architecture `dflash`)."""
    from megadecode.drafter.find import choose_drafter
    from megadecode.drafter.gguf_export import export_gguf
    from megadecode.errors import ModelError
    from megadecode.models.gguf_file import load
    from megadecode.models.store import resolve

    path = resolve(model)
    if path.is_dir():
        raise ModelError(f"{path}: is a folder; the draft takes its tokenizer from a GGUF file")
    target = load(path)
    chosen = choose_drafter(drafter, target)
    if chosen is None:
        raise ModelError(f"no drafter belongs to {target.config.name}; give one's path")
    export_gguf(chosen, target.path, gguf, target.config.context_tokens)
    typer.echo(f"wrote {gguf}")


def register(app: typer.Typer) -> None:
    """Add `export-drafter`."""
    app.command()(export_drafter)
