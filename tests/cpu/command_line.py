"""Runs a `megadecode` command inside this process, so that compiled code is loaded once."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace
from unittest import mock

from megadecode.cli import main


def command(*words, input="", columns=160):
    """Return code and what was written, as of a process with a pipe for its standard input, on a
    terminal that is `columns` wide."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with (
        mock.patch.object(sys, "argv", ["megadecode", *words]),
        mock.patch.object(sys, "stdin", io.StringIO(input)),
        mock.patch.dict("os.environ", {"COLUMNS": str(columns), "NO_COLOR": "1"}),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())
