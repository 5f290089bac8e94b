"""What several tests of the engine share."""

import os
import time
from pathlib import Path

CHILD = {
    "cwd": os.path.dirname(__file__),
    "env": os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    "text": True,
}
"""Where another Python process runs so that it finds this checkout and the tests' modules."""


def check_all_returned(engine):
    """Nothing is left behind: pages, slots, pool, places in flight."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        stats = engine.stats()
        if stats.free_slots == engine.slots and stats.inflight == 0:
            break
        time.sleep(0.001)
    assert stats.free_pages == stats.pages
    assert stats.free_slots == engine.slots
    assert stats.inflight == stats.pending == 0
    assert engine._link.free_blocks == len(engine._parts.wire.params)
    assert len(engine._link._inflight.handles) == engine._link._inflight.most
