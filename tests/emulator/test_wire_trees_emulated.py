"""Drafters of many kinds: tests/gpu/test_wire_trees.py on the emulated kernel."""

import pytest

from tests.gpu.test_wire_trees import *  # noqa: F403

pytestmark = pytest.mark.slow
