"""Speculative steps: tests/gpu/test_wire_speculation.py on the emulated kernel."""

import pytest

from tests.gpu.test_wire_speculation import *  # noqa: F403

pytestmark = pytest.mark.slow
