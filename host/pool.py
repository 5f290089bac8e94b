"""The host's book of the request pool: which blocks are free."""

from __future__ import annotations


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
