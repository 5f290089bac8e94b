"""The `megadecode` command: its entry point. The commands themselves are in `commands`."""

from __future__ import annotations

import os
import sys

import typer

from megadecode.commands import register_all
from megadecode.commands._common import fail, words

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Low-latency decoding of language models without a host in the loop.",
)
register_all(app)


def main() -> None:
    """Entry point: errors raised on purpose become one line and exit code 1."""
    from megadecode.errors import MegadecodeError

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that cannot show a character shows a mark
            stream.reconfigure(errors="replace")
    try:
        app()
    except BrokenPipeError:  # whoever read has gone: the usual end of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
    except (MegadecodeError, OSError) as error:
        sys.exit(fail(words(error)))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
