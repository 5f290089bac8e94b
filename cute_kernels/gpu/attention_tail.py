"""The tail of a row: its keys c(p) .. p, along its own path, in groups of 32 by position.

A group is multiplied like 32 keys of a block (attention_blocks.py), but its rows are gathered:
committed keys lie in ring stages, the step's own in shared memory or in stages too, and ldmatrix
takes any rows. What the rows of a tile are to a block, the query heads of the kv head are here: the
tail of one row for all of them is one product. A group's sums depend on the row's position and on
the keys of its path alone.

The address of a key's row carries the row's swizzle in its low bits: piece i lies at `at ^ 16 i`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.gpu import sync
from cute_kernels.gpu.attention_blocks import (
    NEG_INF,
    add_values,
    filled,
    key_part,
    ldmatrix,
    quad_max,
    quad_sum,
    query_part,
    score_scale,
    sums_seen,
    total,
)
from cute_kernels.gpu.attention_plan import ROWS, TAIL_GROUPS, stages_per_block
from cute_kernels.gpu.attention_stream import desc_int, path_row, row_position
from cute_kernels.gpu.board import Desc
from cute_kernels.gpu.fragments import constant, exp2, mma
from cute_kernels.gpu.kv_layout import PAGE
from cute_kernels.gpu.ring import advance


def row_address(base, row, row_bytes):
    return base + row * row_bytes + ((row & 7) << 4)


def tail_at(k, p, slot, group, head):
    """Shared address of a group's sums of a head, maximum and denominator."""
    index = (slot * TAIL_GROUPS + group) * k.c.group_heads + head
    return p.tails + index * p.smem.tail_stride


def query_at(k, p, slot, head, t):
    """Shared address of what lane t of a quad holds of a head's row of Q: d / 8 words."""
    return p.queries + ((slot * k.c.group_heads + head) * 4 + t) * (k.c.shape.head_dim // 2)


@cute.jit
def key_row(k: cutlass.Constexpr, p: cutlass.Constexpr, row: Int32, pos: Int32, committed: Int32,
            tail: Int32, tail_first: Int32):  # fmt: skip
    """(shared address of the K row, of the V row) of the key at a position of a row's path. tail:
    the stage of the first tail block."""
    per_block, row_bytes = stages_per_block(k.c), 2 * k.c.shape.head_dim
    if cutlass.const_expr(p.new is None):
        if pos >= committed:
            pos = committed + path_row(p, row, pos - committed)
    stage = tail + ((pos >> 6) - tail_first) * per_block
    if stage >= k.ring.n:
        stage = stage - k.ring.n
    values = stage
    if cutlass.const_expr(per_block == 2):
        values = stage + 1
        if values == k.ring.n:
            values = Int32(0)
    place = pos & 63
    key_base = k.ring.base + stage * k.ring.stage_bytes
    value_base = k.ring.base + values * k.ring.stage_bytes
    if cutlass.const_expr(per_block == 1):
        value_base = value_base + PAGE * row_bytes
    if cutlass.const_expr(p.new is not None):
        if pos >= committed:
            place = path_row(p, row, pos - committed)
            key_base, value_base = p.new, p.new + ROWS * row_bytes
    return row_address(key_base, place, row_bytes), row_address(value_base, place, row_bytes)


@cute.jit
def stage_query(k: cutlass.Constexpr, p: cutlass.Constexpr, q: cute.Tensor, head: Int32,
                row: Int32, slot: Int32):  # fmt: skip
    """The warp that has rows of this head: one row of Q, for `run_tail` behind a barrier."""
    half = k.c.shape.head_dim // 8  # words of a block of rows
    if (k.lane >> 2) == (row & 7):
        to = query_at(k, p, slot, head, k.lane & 3)
        for i in cutlass.range_constexpr(0, half, 4):
            sync.sts_words(
                to + i * 4,
                [sync.select(row >= 8, q[half + i + e], q[i + e]) for e in range(4)],
            )


@cute.jit
def wait_for_tail(k: cutlass.Constexpr, tail_count: Int32, stage: Int32, parity: Int32):
    for _ in cutlass.range(tail_count * stages_per_block(k.c), unroll=1):
        sync.wait_parity(k.ring.full + stage * 8, parity)
        stage, parity = advance(k.ring, stage, parity)


def load_query(k, p, slot):
    """A row of Q of all heads as an A operand whose rows 8 to 15 are zero; heads that the kv head
    does not have repeat its last."""
    d = k.c.shape.head_dim
    head = cutlass.min(k.lane >> 2, k.c.group_heads - 1)
    at, words = query_at(k, p, slot, head, k.lane & 3), []
    for i in range(0, d // 8, 4):
        words += sync.lds_words(at + i * 4)
    return words + [constant(0)] * (d // 8)


def short_scores(k, q, at):
    """S of rows g (heads) and 8 keys, in four chains of sums: ptxas takes tile after tile here, and
    one chain would wait for itself."""
    steps = k.c.shape.head_dim // 16
    chains = [[Float32(0.0)] * 4 for _ in range(4)]
    for step in range(steps):
        if step % 2 == 0:
            words = ldmatrix(at ^ (step // 2 * 64), False)
        part = query_part(k, q, step), key_part(words, step)
        chains[step % 4] = mma(chains[step % 4], *part)
    return [total([chain[e] for chain in chains]) for e in range(2)]


def multiply_group(k, q, rows, left, m, den, o):
    """rows: shared address of the group's (address of the K row, of the V row). left: keys of it
    that count."""
    i = k.lane
    keys = [sync.lds_int(rows + (8 * j + (i & 7)) * 8) ^ ((i >> 3) << 4) for j in range(4)]
    values = [sync.lds_int(rows + (16 * u + (i & 15)) * 8 + 4) ^ ((i >> 4) << 4) for u in range(2)]
    tiles, first = [short_scores(k, q, at) for at in keys], 2 * (i & 3)
    s = [
        sync.choose(8 * j + first + e < left, tile[e], NEG_INF)
        for j, tile in enumerate(tiles)
        for e in range(2)
    ]
    m[0] = quad_max(sync.maximum(s)) * score_scale(k)
    s = [exp2(v * score_scale(k) - m[0]) for v in s]
    prob = [s[2 * j + e] if half == 0 else Float32(0.0)
            for j in range(4) for half in range(2) for e in range(2)]  # fmt: skip
    den[0] = quad_sum(total(s))
    add_values(k, o, prob, lambda u, n: values[u] ^ (n << 4))


@cute.jit
def run_tail(k: cutlass.Constexpr, p: cutlass.Constexpr, row: Int32, slot: Int32, group: Int32,
             to: Int32, stage: Int32, tail_first: Int32):  # fmt: skip
    """One warp: a group of the tail of a row whose stages have arrived and whose Q is in `slot`.

    Leaves every head's head_dim sums, maximum and denominator at `to` (tail_at of head 0); zeros,
    -inf and zero where the row has no such keys. Returns a word that depends on everything read
    from the ring."""
    d = k.c.shape.head_dim
    pos = row_position(k, p, row)
    first = (cutlass.max(pos - 15, 0) >> 6) << 6
    left = pos + 1 - (first + 32 * group)
    m, den, o = filled(1, NEG_INF), filled(1, 0.0), filled(d // 2, 0.0)
    if left > 0:
        # beyond the last key this one again: its row can be read, and it counts for nothing
        at = first + 32 * group + cutlass.min(k.lane, left - 1)
        key, value = key_row(k, p, row, at, desc_int(k, Desc.COMMITTED), stage, tail_first)
        # by way of the place of the sums: ptxas schedules nothing across a shuffle
        sync.sts_pair(to + k.lane * 8, sync.as_float(key), sync.as_float(value))
        cute.arch.sync_warp()
        multiply_group(k, load_query(k, p, slot), to, left, m, den, o)
    cute.arch.sync_warp()
    head, t = k.lane >> 2, k.lane & 3
    if head < k.c.group_heads:
        to = to + head * p.smem.tail_stride
        for n in cutlass.range_constexpr(d // 8):
            sync.sts_pair(to + (8 * n + 2 * t) * 4, o[4 * n], o[4 * n + 1])
        if t == 0:
            sync.sts_pair(to + d * 4, m[0], den[0])
    return sums_seen(k, o)
