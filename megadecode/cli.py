"""The `megadecode` command."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Low-latency decoding of language models without a host in the loop.",
)

Model = Annotated[str, typer.Option(help="A known model's name or the path of a GGUF file.")]
Device = Annotated[str, typer.Option(help="auto or cpu.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@app.command()
def run(
    prompt: Annotated[str, typer.Argument(help="What to answer; '-' reads standard input.")],
    model: Model = "smollm2-135m",
    ctx: Annotated[int, typer.Option(help="Positions a request may use.")] = 65536,
    device: Device = "auto",
    weights: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Only the k likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Only the likeliest, up to this mass.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Only those this likely beside the best.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="The same seed, the same tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text to stop at; repeatable.")] = None,
    draft: Annotated[str, typer.Option(help="auto, off or a drafter's path.")] = "auto",
    budget: Annotated[str, typer.Option(help="Nodes to verify a step, or auto.")] = "auto",
    shape: Annotated[str, typer.Option(help="tree or chain.")] = "tree",
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
    notes = Console(stderr=True)
    params = SamplingParams(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        min_p=min_p, seed=seed, stop=stop or (),
    )  # fmt: skip
    with notes.status("loading"):
        engine = Engine(
            model, ctx, slots=1, device=device, weights=weights, draft=draft,
            budget=budget if budget == "auto" or not budget.isdigit() else int(budget), shape=shape,
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
        sys.stdout.write(json.dumps(asdict(result), ensure_ascii=False) + "\n")
    else:
        s = result.stats
        notes.print(
            f"[dim]{s.tokens} tokens, {s.tok_s:.1f} tok/s, first after {s.ttft_s * 1e3:.0f} ms, "
            f"{s.host_round_trips} host round trip{'s' * (s.host_round_trips != 1)}, "
            f"finish: {result.finish_reason}[/dim]"
        )
    if trace:
        notes.print(table(figures), highlight=False)
    if result.error:
        raise typer.Exit(_fail(result.error))


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what works here, what is missing, and how to get it."""
    from megadecode.doctor import checks

    found = checks()
    if as_json:
        sys.stdout.write(json.dumps([asdict(check) for check in found]) + "\n")
    else:
        table = Table(box=None, pad_edge=False)
        for heading in ("", "what", "found", "to do"):
            table.add_column(heading, overflow="fold")
        for check in found:
            table.add_row("ok" if check.ok else "--", check.what, check.found, check.advice)
        Console().print(table)
    if not all(check.ok for check in found if check.needed):
        raise typer.Exit(1)


def _fail(message: str) -> int:
    notes = Console(stderr=True, soft_wrap=True)
    notes.print(f"megadecode: {message}", style="red", markup=False, highlight=False)
    return 1


def main() -> None:
    """Entry point: errors raised on purpose become one line and exit code 1."""
    from host.errors import DeviceError, QueueFull
    from megadecode.errors import MegadecodeError

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that cannot show a character shows a mark
            stream.reconfigure(errors="replace")
    try:
        app()
    except BrokenPipeError:  # whoever read has gone: the usual end of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
    except OSError as error:
        sys.exit(_fail(str(error)))
    except (MegadecodeError, DeviceError, QueueFull) as error:
        sys.exit(_fail(str(error)))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
