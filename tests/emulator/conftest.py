"""Tests of device code without a GPU: kernels translated to C.

What they find is what the code does, under many interleavings, but with a memory stronger than a
GPU's: what only its weaker order breaks, and what ptxas makes of the code, is seen on a device
alone.
"""

import pathlib

import pytest

from host.cache import cache_home
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
def folder():
    """Where translations are kept."""
    if COMPILER is None:
        pytest.skip("no C compiler")
    pytest.importorskip("cutlass")
    return cache_home() / "emulated"


@pytest.fixture(scope="session")
def echo(folder):
    return Emulated(3, folder)
