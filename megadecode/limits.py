"""Sizes that hold for every device and that a user can run into."""

from __future__ import annotations

PAGE = 64
"""Positions in a page of keys and values."""

MAX_CTX = 2**24
MAX_SLOTS = 16
"""Requests decoded at the same time; a device may have fewer."""

MAX_NODES = 255
"""Nodes of one tree, the root not counted."""

MAX_CHUNK_ROWS = 4096
MAX_KV_TOKENS = 2**31
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1000
