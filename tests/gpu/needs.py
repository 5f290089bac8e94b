"""What a module of GPU tests needs, else it is skipped with a message that says what is missing."""

import os

import pytest


def need(*names: str) -> None:
    """At the top of a module: a GPU, and that these environment variables are set."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU", allow_module_level=True)
    if missing := [name for name in names if name not in os.environ]:
        pytest.skip(f"not set: {', '.join(missing)}", allow_module_level=True)
