"""Attention's share of shared memory and how its work is cut. Free of cutlass.

Everything is fixed by the configuration, never by the step: a row's order of sums depends on it.
"""

from dataclasses import dataclass

import numpy as np

ROWS = 16  # most rows of a step
TAIL_GROUPS = 3  # of 32 keys: those at c(p) .. p of a row, at most 15 + 64


def halves(c) -> int:
    """Warps that share the keys of a block for one query head."""
    return 2 if c.warps >= 2 * c.group_heads else 1


def merged_rows(c) -> int:
    """Rows of a step that one CTA merges, at most."""
    return -(-ROWS // c.splits)


def tail_slots(c) -> int:
    """Rows whose tails are in shared memory at once: one is written while another is read."""
    return min(merged_rows(c), 2)


def exchange_bytes(c) -> int:
    """What the phase needs of the scratch for partial sums: sums that a warp gives its partner."""
    return c.group_heads * ROWS * c.shape.head_dim * 4 if halves(c) == 2 else 0


def stages_per_block(c) -> int:
    """K and V of a block in one stage of the ring, or a stage each."""
    return c.shape.head_dim // 64


def tree_stages(c) -> int:
    """Of the ring, held together by the tails of a tree of 128 rows: from 15 positions before its
    root, and up to 63 more to the start of a page, to its last row's."""
    return -(-(15 + 63 + 128) // 64) * stages_per_block(c)


def check(c) -> None:
    """Raises ValueError for what the phase is not written for."""
    s = c.shape
    if s.head_dim not in (64, 128):
        raise ValueError(f"{s.name}: head_dim is {s.head_dim}; it must be 64 or 128")
    if s.heads % s.kv_heads or not 1 <= c.group_heads <= 8:
        raise ValueError(
            f"{s.name}: {s.heads} query and {s.kv_heads} key heads; a key head must serve 1 to 8"
            " query heads, all the same number"
        )
    if c.warps < max(c.group_heads, 4):
        raise ValueError(
            f"{s.name}: warps is {c.warps}; attention needs at least 4, and one per query head of"
            f" a key head ({c.group_heads})"
        )
    if c.splits not in (4, 8, 16, 32):
        raise ValueError(f"{s.name}: splits is {c.splits}; it must be 4, 8, 16 or 32")
    if s.kv_heads * c.splits > c.ctas:
        raise ValueError(
            f"{s.name}: splits is {c.splits}; it must be at most {c.ctas // s.kv_heads}"
        )
    least = 2 * stages_per_block(c) + 1  # a row's tail can lie in two blocks, held together
    if c.stages < least:
        raise ValueError(f"{s.name}: stages is {c.stages}; attention needs at least {least}")


@dataclass(frozen=True)
class AttentionSmem:
    """Byte offsets in attention's part of shared memory, whose start is aligned to 1,024.

    new: this step's K and V rows of the CTA's kv head, as in a page. rope: rotary factors of the
    rows, `rope_stride` bytes a row. queries: of the rows that the CTA merges, by slot: Q of all its
    heads, as MMA operands. tails: per slot, group of keys and query head, `tail_stride` bytes: a
    tail's sums, maximum and denominator. stats: maxima and denominators that a warp gives its
    partner. places: per row, where its K and V go: page * 64 + offset. step: numbers of the step.
    """

    rope_stride: int
    tail_stride: int
    new: int
    rope: int
    queries: int
    tails: int
    stats: int
    places: int
    step: int
    bytes: int

    @classmethod
    def of(cls, c) -> "AttentionSmem":
        d, heads = c.shape.head_dim, c.group_heads
        rope_stride = 4 * d + 64  # two rows of a quarter warp meet in different banks
        tail_stride = 4 * (d + 4)
        sizes = (
            2 * ROWS * 2 * d,
            ROWS * rope_stride,
            merged_rows(c) * heads * 2 * d,
            tail_slots(c) * TAIL_GROUPS * heads * tail_stride,
            heads * 2 * 8 * 16,
            ROWS * 4,
            16,
        )
        ends: list[int] = np.cumsum(sizes).tolist()
        return cls(rope_stride, tail_stride, 0, *ends)
