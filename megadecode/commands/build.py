"""`megadecode build`: compile the kernel of a model, on any machine."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from megadecode.commands._common import Json, print_json

Target = Annotated[str, typer.Option(help="sm_90a, sm_100a or sm_120a.")]


def build(
    model: Annotated[
        str, typer.Option(help="A shape's name (llama-3.1-8b) or the path of a GGUF file.")
    ],
    target: Target = "sm_90a",
    folder: Annotated[
        Path | None, typer.Option(help="Where to put it; by default the cache.")
    ] = None,
    multiprocessors: Annotated[
        int | None,
        typer.Option(min=16, help="Of the GPU, where it has fewer than most of its kind."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compile the kernel of a model without a GPU, and show what it uses."""
    from cute_kernels.gpu.build import build_kernel
    from megadecode.cuda_kernel import describe, kernel_folder, kernel_of

    c = kernel_of(model, target, multiprocessors)
    start = time.monotonic()
    artefact = build_kernel(c, "wire", kernel_folder() if folder is None else folder)
    found = describe(artefact, c) | {"seconds": round(time.monotonic() - start, 1)}
    if as_json:
        print_json(found)
    else:
        sys.stdout.write(_text(found) + "\n")


def _text(found: dict[str, Any]) -> str:
    lines = [f"{name.replace('_', ' '):15} {value}" for name, value in found.items()
             if not isinstance(value, dict)]  # fmt: skip
    for title, parts in found.items():
        if isinstance(parts, dict):
            lines.append(title.replace("_", " "))
            lines += [f"  {name:17} {value:>7}" for name, value in parts.items()]
    return "\n".join(lines)


def register(app: typer.Typer) -> None:
    """Add `build`."""
    app.command()(build)
