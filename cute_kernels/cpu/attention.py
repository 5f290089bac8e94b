"""Attention of one layer over paged keys and values, in one order for every row.

For a row at position p let c = 64 * floor(max(p - 15, 0) / 64). Keys below c are summed in blocks
of one page with a running softmax, k ascending; `SPLIT_BLOCKS` blocks make a *part*, and a row's
parts are merged in ascending order. Keys c..p, 15 to 79 of them (fewer at the start), form the
*tail*, which is merged last. So what a row computes depends on its position and its keys alone: not
on the rows beside it, nor on how the work was divided. The 15 is the deepest a draft tree goes:
keys below c are committed whatever branch the row belongs to, and the tail is the only part where
a row looks for keys along its path through the tree.

`attend` does the block part from a list of work items that all layers share, `merge` the rest. The
query heads of one key/value head are extra rows of the same product.
"""

from __future__ import annotations

import numpy as np

from cute_kernels.cpu.simd import LANES, PAIR, advance, pair_gemm, pointer
from cute_kernels.cpu.state import MAX_DEPTH, PAGE, root_position
from cute_kernels.cpu.vecmath import merge_parts, softmax_page, softmax_step
from host.atomics import fetch_add
from host.jit import jit

SPLIT_BLOCKS = 4
"""Pages in a part."""

TAIL = MAX_DEPTH
"""Newest positions that never belong to a block: the deepest a draft tree may go."""

FEW_ROWS = 16
"""Segments of up to this many rows are divided by parts, longer ones by rows."""

_TILE_PRODUCT_ROWS = 96
_NO_MAXIMUM = np.float32(-np.inf)


@jit
def tile_rows(group):
    """Rows of a long segment that one work item takes."""
    return max(_TILE_PRODUCT_ROWS // group, 4)


@jit
def first_tail_key(position):
    """The position at which the row's tail begins: a multiple of 64."""
    return max(position - TAIL, 0) // PAGE * PAGE


@jit
def build_attention_work(dims, batch):
    """Fill `batch.item` and `batch.part`, and `batch.count[3:5]`, from the step's segments.

    An item is (slot, first row, rows, kv head, first split, end split); it writes part `first
    split` of each row's parts. One thread calls this, before the first layer.
    """
    items, parts = 0, 0
    tile = tile_rows(dims.heads // dims.kv_heads)
    for s in range(batch.count[2]):
        slot, first, rows = batch.segment[s, 0], batch.segment[s, 1], batch.segment[s, 2]
        few = rows <= FEW_ROWS
        for r in range(first, first + rows):
            blocks = first_tail_key(batch.position[r]) // PAGE
            splits = (blocks + SPLIT_BLOCKS - 1) // SPLIT_BLOCKS
            batch.part[r, 0] = parts
            batch.part[r, 1] = splits if few else min(splits, 1)
            parts += batch.part[r, 1]
        step = rows if few else tile
        # The last rows of a prompt chunk have the most keys: they go first.
        for start in range((rows - 1) // step * step, -1, -step):
            here = min(step, rows - start)
            blocks = 0
            for r in range(first + start, first + start + here):
                blocks = max(blocks, first_tail_key(batch.position[r]) // PAGE)
            splits = (blocks + SPLIT_BLOCKS - 1) // SPLIT_BLOCKS
            for split in range(0, splits, 1 if few else max(splits, 1)):
                for head in range(dims.kv_heads):
                    batch.item[items, 0] = slot
                    batch.item[items, 1] = first + start
                    batch.item[items, 2] = here
                    batch.item[items, 3] = head
                    batch.item[items, 4] = split
                    batch.item[items, 5] = split + 1 if few else splits
                    items += 1
    batch.count[3] = items
    batch.count[4] = parts


@jit
def attend(dims, weights, kv, batch, acts, layer, worker, counters, op):
    """The parts of all rows: reads acts.q and the KV pages, writes acts.part_ml and acts.part_o."""
    workers = acts.scratch.shape[0]
    item = worker
    while item < batch.count[3]:
        for split in range(batch.item[item, 4], batch.item[item, 5]):
            _attend_split(dims, kv, batch, acts, layer, worker, item, split)
        item = workers + fetch_add(counters, op * 8, 1)


@jit
def _attend_split(dims, kv, batch, acts, layer, worker, item, split):
    """One part (or one more split of it) for the rows of a work item."""
    slot, first, rows = batch.item[item, 0], batch.item[item, 1], batch.item[item, 2]
    head = batch.item[item, 3]
    group, size = dims.heads // dims.kv_heads, dims.head_dim
    scores = pointer(acts.scratch, worker * acts.scratch.shape[1])
    sums = advance(scores, rows * group * PAGE)
    states = advance(sums, rows * group * size)
    scratch = acts.scratch[worker]
    sums_at = rows * group * PAGE
    states_at = sums_at + rows * group * size
    scratch[sums_at:states_at] = np.float32(0.0)
    for i in range(rows * group):
        scratch[states_at + 2 * i] = _NO_MAXIMUM
        scratch[states_at + 2 * i + 1] = np.float32(0.0)

    last = 0
    for r in range(first, first + rows):
        last = max(last, first_tail_key(batch.position[r]) // PAGE)
    stop = min((split + 1) * SPLIT_BLOCKS, last)
    for block in range(split * SPLIT_BLOCKS, stop):
        page, after = batch.pages[slot, block], batch.pages[slot, min(block + 1, last - 1)]
        row = 0
        while row < rows:
            # A run of rows whose blocks include this one. Rows of a prompt chunk form one run.
            if first_tail_key(batch.position[first + row]) <= block * PAGE:
                row += 1
                continue
            end = row + 1
            while end < rows and first_tail_key(batch.position[first + end]) > block * PAGE:
                end += 1
            _attend_block(
                dims, kv, layer, head, page, after,
                pointer(acts.q, (head * acts.q.shape[1] + (first + row) * group) * size),
                advance(scores, row * group * PAGE), advance(sums, row * group * size),
                advance(states, row * group * 2), (end - row) * group,
            )  # fmt: skip
            row = end

    for row in range(rows):
        if first_tail_key(batch.position[first + row]) <= split * SPLIT_BLOCKS * PAGE:
            continue
        part = (batch.part[first + row, 0] + batch.item[item, 4]) * group
        place = head * acts.part_o.shape[1] + part
        merge_parts(
            pointer(acts.part_ml, place * 2), pointer(acts.part_o, place * size),
            advance(states, row * group * 2), advance(sums, row * group * size), group, size,
            split == batch.item[item, 4],
        )  # fmt: skip


@jit
def _attend_block(dims, kv, layer, head, page, after, q, scores, sums, states, rows):
    """One page for `rows` product rows: scores, running softmax, weighted values."""
    size = dims.head_dim
    where = (layer * kv.k.shape[1] + page) * dims.kv_heads + head
    ahead = (layer * kv.k.shape[1] + after) * dims.kv_heads + head
    for pair in range(PAGE // PAIR):
        keys = pointer(kv.k, (where * PAGE + pair * PAIR) * size)
        coming = pointer(kv.k, (ahead * PAGE + pair * PAIR) * size)
        pair_gemm(
            q, size, rows, keys, LANES, size * LANES, advance(scores, pair * PAIR), PAGE, size,
            False, coming, True,
        )  # fmt: skip
    softmax_page(scores, rows, states, sums, size)
    for pair in range(size // PAIR):
        values = pointer(kv.v, where * PAGE * size + pair * PAIR)
        coming = pointer(kv.v, (ahead * size + pair * PAIR) * PAGE)
        pair_gemm(
            scores, PAGE, rows, values, size, LANES, advance(sums, pair * PAIR), size, PAGE,
            True, coming, True,
        )  # fmt: skip


@jit
def merge(dims, weights, kv, batch, acts, layer, worker, counters, op):
    """Merge each row's parts with its tail and normalise, into acts.attn."""
    workers, rows = acts.scratch.shape[0], batch.count[0]
    step = max(rows * dims.kv_heads // 64, 1)
    chunks = (rows + step - 1) // step
    item = worker
    while item < chunks * dims.kv_heads:
        head, chunk = item % dims.kv_heads, item // dims.kv_heads
        for row in range(chunk * step, min((chunk + 1) * step, rows)):
            _finish_row(dims, kv, batch, acts, layer, worker, row, head)
        item = workers + fetch_add(counters, op * 8, 1)


@jit
def _scattered(batch, row):
    """Rows at the end of the row's path that do not follow the row before them in memory."""
    depth, joined = batch.depth[row], 0
    while joined <= depth and batch.path[row, joined] == joined:
        joined += 1
    return depth + 1 - joined


@jit
def _gather_scores(dims, kv, batch, layer, row, head, q, pair, pair_view, scores, width, count):
    """Scores of the last `count` keys of the row's path into `scores[g * width + 0..count - 1]`.

    A pair of tiles is multiplied whole and the path's columns are taken: each column is a dot
    product of its own, so what stands in the others does not matter.
    """
    group, size = dims.heads // dims.kv_heads, dims.head_dim
    root, first = root_position(batch, row), batch.depth[row] + 1 - count
    done = -1
    for i in range(count):
        at = root + batch.path[row, first + i]
        if at // PAIR != done:
            done = at // PAIR
            page = batch.pages[batch.slot[row], at // PAGE]
            where = (layer * kv.k.shape[1] + page) * dims.kv_heads + head
            k = pointer(kv.k, (where * PAGE + at % PAGE // PAIR * PAIR) * size)
            pair_gemm(
                q, size, group, k, LANES, size * LANES, pair, PAIR, size, False, k, False
            )  # fmt: skip
        for g in range(group):
            scores[g * width + i] = pair_view[g * PAIR + at % PAIR]


@jit
def _gather_values(dims, kv, batch, layer, row, head, out, out_at, count):
    """Values of the last `count` keys of the row's path, one after the other, to `out[out_at:]`."""
    size = dims.head_dim
    root, first = root_position(batch, row), batch.depth[row] + 1 - count
    for i in range(count):
        at = root + batch.path[row, first + i]
        values = kv.v[layer, batch.pages[batch.slot[row], at // PAGE], head, at % PAGE]
        for d in range(size):
            out[out_at + i * size + d] = values[d]


@jit
def _finish_row(dims, kv, batch, acts, layer, worker, row, head):
    group, size = dims.heads // dims.kv_heads, dims.head_dim
    scratch = acts.scratch[worker]
    # scores [group, 96], tail [group, size], total [group, size], their states [2, group, 2]; then
    # what scattered keys need: a pair of tiles of scores [group, 32], values [TAIL, size]
    width = PAGE + PAIR
    tail_at = group * width
    total_at = tail_at + group * size
    states_at = total_at + group * size
    pair_at = states_at + group * 4
    values_at = pair_at + group * PAIR
    for i in range(group):
        scratch[states_at + 2 * i] = _NO_MAXIMUM
        scratch[states_at + 2 * i + 1] = np.float32(0.0)

    position = batch.position[row]
    start = first_tail_key(position)
    keys = position - start + 1
    # The first `joined` keys lie in a row; those of the path after its first branch are scattered.
    scattered = _scattered(batch, row)
    joined = keys - scattered
    here = min(joined, PAGE)
    pages = batch.pages[batch.slot[row]]
    where = (layer * kv.k.shape[1] + pages[start // PAGE]) * dims.kv_heads + head
    beyond = where
    if joined > PAGE:
        beyond = (layer * kv.k.shape[1] + pages[start // PAGE + 1]) * dims.kv_heads + head
    base = worker * acts.scratch.shape[1]
    scores, tail = pointer(acts.scratch, base), pointer(acts.scratch, base + tail_at)
    q = pointer(acts.q, (head * acts.q.shape[1] + row * group) * size)
    for pair in range((joined + PAIR - 1) // PAIR):
        page = where if pair < PAGE // PAIR else beyond
        k = pointer(kv.k, (page * PAGE + pair % (PAGE // PAIR) * PAIR) * size)
        pair_gemm(
            q, size, group, k, LANES, size * LANES, advance(scores, pair * PAIR), width, size,
            False, k, False,
        )  # fmt: skip
    if scattered > 0:
        _gather_scores(
            dims, kv, batch, layer, row, head, q, pointer(acts.scratch, base + pair_at),
            scratch[pair_at : pair_at + group * PAIR], scratch[joined:tail_at], width, scattered,
        )  # fmt: skip
        _gather_values(dims, kv, batch, layer, row, head, scratch, values_at, scattered)
    for g in range(group):
        softmax_step(
            advance(scores, g * width), keys, pointer(acts.scratch, base + states_at + 2 * g)
        )
    for pair in range(size // PAIR):
        v = pointer(kv.v, where * PAGE * size + pair * PAIR)
        out = advance(tail, pair * PAIR)
        pair_gemm(scores, width, group, v, size, LANES, out, size, here, False, v, False)
        if joined > PAGE:
            v = pointer(kv.v, beyond * PAGE * size + pair * PAIR)
            rest = advance(scores, PAGE)
            pair_gemm(rest, width, group, v, size, LANES, out, size, joined - PAGE, True, v, False)
        if scattered > 0:
            v = pointer(acts.scratch, base + values_at + pair * PAIR)
            rest = advance(scores, joined)
            pair_gemm(rest, width, group, v, size, LANES, out, size, scattered, True, v, False)

    totals, total = pointer(acts.scratch, base + states_at + 2 * group), base + total_at
    count = batch.part[row, 1]
    for i in range(count):
        place = head * acts.part_o.shape[1] + (batch.part[row, 0] + i) * group
        merge_parts(
            totals, pointer(acts.scratch, total), pointer(acts.part_ml, place * 2),
            pointer(acts.part_o, place * size), group, size, i == 0,
        )  # fmt: skip
    states = pointer(acts.scratch, base + states_at)
    merge_parts(totals, pointer(acts.scratch, total), states, tail, group, size, count == 0)
    for g in range(group):
        out = (head * group + g) * size
        for d in range(size):
            value = scratch[total_at + g * size + d]
            acts.attn[row, out + d] = value / scratch[states_at + 2 * (group + g) + 1]
