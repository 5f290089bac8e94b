"""The host's book of the request pool: which blocks are free, and what a request puts in them."""

from __future__ import annotations

import numpy as np

from host.wire import BLOCK_BYTES, Wire


def blocks_needed(prompt_tokens: int, biases: int) -> int:
    """Blocks of a request: its parameters, then prompt and biases."""
    return 1 + -(-4 * (prompt_tokens + 2 * biases) // BLOCK_BYTES)


def write_blocks(
    wire: Wire,
    first: int,
    params: np.void,
    prompt: np.ndarray,
    bias: tuple[np.ndarray, np.ndarray] | None,
) -> None:
    """Fill a request's blocks, from `first` on; see `wire.PARAMS`."""
    wire.params[first] = params
    word = (first + 1) * BLOCK_BYTES // 4
    wire.pool[word : word + len(prompt)] = prompt
    if bias is not None:
        word, biases = word + len(prompt), len(bias[0])
        wire.pool[word : word + biases] = bias[0]
        wire.pool_floats[word + biases : word + 2 * biases] = bias[1]


class BlockPool:
    """First-fit allocator over `blocks` pool blocks. Not thread-safe; the caller holds a lock."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._holes: list[tuple[int, int]] = [(0, blocks)]  # (first, length), by address, coalesced

    @property
    def free(self) -> int:
        """Free blocks in all."""
        return sum(length for _, length in self._holes)

    def allocate(self, blocks: int) -> int | None:
        """First block of a run of `blocks`, or None when no hole is large enough."""
        for i, (first, length) in enumerate(self._holes):
            if length >= blocks:
                self._holes[i : i + 1] = [(first + blocks, length - blocks)] * (length > blocks)
                return first
        return None

    def release(self, first: int, blocks: int) -> None:
        """Give a run back; it must have been allocated."""
        at = next((i for i, (f, _) in enumerate(self._holes) if f > first), len(self._holes))
        before = self._holes[at - 1] if at else (0, 0)
        after = self._holes[at] if at < len(self._holes) else (self.blocks, 0)
        end = first + blocks
        if before[0] + before[1] > first or end > after[0]:
            raise ValueError(f"blocks {first}..{end - 1} are not all in use")
        if at and before[0] + before[1] == first:
            at, first = at - 1, before[0]
            self._holes.pop(at)
        if at < len(self._holes) and self._holes[at][0] == end:
            end += self._holes.pop(at)[1]
        self._holes.insert(at, (first, end - first))
