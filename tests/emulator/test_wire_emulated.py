"""The wire: tests/gpu/test_wire.py on the emulated kernel."""

import pytest

from tests.gpu.test_wire import *  # noqa: F403

pytestmark = pytest.mark.slow
