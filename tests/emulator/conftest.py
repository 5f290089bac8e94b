"""The wire's tests without a GPU: the same tests, the echo kernel translated to C.

What they find is what the protocol does, under many interleavings, but with a memory stronger than
a GPU's: what only its weaker order breaks is seen on a device alone.
"""

import os
import pathlib

import pytest

from tests.emulator.device import COMPILER, Emulated

HERE = pathlib.Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Tests of a GPU's speed, or with a kernel in a process of its own, have no place here."""
    items[:] = [
        item
        for item in items
        if not (item.path.is_relative_to(HERE) and item.get_closest_marker("gpu"))
    ]


@pytest.fixture(scope="session")
def echo():
    if COMPILER is None:
        pytest.skip("no C compiler")
    pytest.importorskip("cutlass")
    home = os.environ.get("MEGADECODE_CACHE", pathlib.Path.home() / ".cache" / "megadecode")
    return Emulated(3, pathlib.Path(home) / "emulated")
