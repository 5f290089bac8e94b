"""What several commands share: options, and the ways of saying things."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from megadecode.engine import Engine
    from megadecode.request import Generation, Request

Model = Annotated[str, typer.Option(help="A known model's name or the path of a model.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
JsonStream = Annotated[
    bool, typer.Option("--stream", help="With --json: a line for every chunk of text, too.")
]
Ctx = Annotated[int, typer.Option(help="Positions a request may use.")]
WeightType = Annotated[str | None, typer.Option(help="fp32 or bf16.")]
Draft = Annotated[str, typer.Option(help="auto, off or a drafter's path.")]
Budget = Annotated[str, typer.Option(help="Nodes to verify a step, or auto.")]
Shape = Annotated[str, typer.Option(help="tree or chain.")]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens to generate at most.")]
Temperature = Annotated[float, typer.Option(help="0: greedy.")]
TopK = Annotated[int, typer.Option(help="Only the k likeliest tokens; 0: all.")]
TopP = Annotated[float, typer.Option(help="Only the likeliest, up to this mass.")]
MinP = Annotated[float, typer.Option(help="Only those this likely beside the best.")]
Seed = Annotated[int | None, typer.Option(help="The same seed, the same tokens.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text to stop at; repeatable.")]

CHUNK_ROWS = 256
LONG_PROMPT = 4 * CHUNK_ROWS
"""From here on a prompt is worth a progress bar."""


def print_json(value: Any) -> None:
    """One JSON value on a line of its own, at once: whoever reads a stream need not wait."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def notes() -> Console:
    """Where everything goes that is not the answer itself."""
    return Console(stderr=True, highlight=False)


def say(message: str) -> None:
    """One red line on standard error."""
    console = Console(stderr=True, soft_wrap=True)
    console.print(f"megadecode: {message}", style="red", markup=False, highlight=False)


def fail(message: str) -> int:
    """`say`, and the exit code that belongs to it."""
    say(message)
    return 1


def words(error: Exception) -> str:
    """An error in words. One about a file: its name, then what the system says."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def budget_of(text: str) -> str | int:
    """`--budget` as the engine takes it."""
    return int(text) if text.isdecimal() else text


@contextmanager
def opened(model: str, ctx: int, **options: Any) -> Iterator[Engine]:
    """An engine for one request at a time, with a word while it loads."""
    from host.jit import cache_folder
    from megadecode.engine import Engine

    cold = options.get("device") != "cuda" and not any(cache_folder().rglob("loop.run-*.nbc"))
    with notes().status("compiling for this machine, once: a minute or two" if cold else "loading"):
        engine = Engine(model, ctx, slots=1, chunk_rows=CHUNK_ROWS, **options)
    with engine:
        yield engine


def show(engine: Engine, request: Request, *, as_json: bool, stream: bool) -> Generation:
    """Print an answer as it comes, with a progress bar while a long prompt is read; an interrupt
    ends it early, with what has come by then."""
    try:
        _show_prefill(engine, request)
        for chunk in request:
            if not as_json:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
            elif stream:
                print_json({"event": "chunk"} | asdict(chunk))
    except KeyboardInterrupt:
        request.abort()
    result = request.result()
    if as_json:
        print_json(({"event": "end"} if stream else {}) | asdict(result))
    else:
        sys.stdout.write("\n")
        sys.stdout.flush()
    return result


def _show_prefill(engine: Engine, request: Request) -> None:
    """A bar on the terminal until the first token: the only request reads a chunk a step."""
    console = notes()
    if request.prompt_tokens < LONG_PROMPT or not console.is_terminal:
        return
    first = engine.stats().steps
    columns = (TextColumn("reading the prompt"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=request.prompt_tokens)
        while not request.wait(0.1):
            read = (engine.stats().steps - first) * CHUNK_ROWS
            bar.update(task, completed=min(read, request.prompt_tokens))


def summary(result: Generation) -> str:
    """An answer's figures in a line."""
    s = result.stats
    tau = f", {s.tau:.2f} a step" if s.tau > 1 else ""
    return (
        f"{s.tokens} tokens, {s.tok_s:.1f} tok/s{tau}, first after {s.ttft_s * 1e3:.0f} ms, "
        f"{s.host_round_trips} host round trip{'s' * (s.host_round_trips != 1)}, "
        f"finish: {result.finish_reason}"
    )
