"""The drafter's own phases on the CPU device; the rest of its forward is the target's phases.

A step drafts in this order, a barrier between lines. `batch` is of two kinds: the *context* rows,
positions whose features were committed last step, and the *block* rows of the slots that draft.

    draft_fuse      context   c = W_fc f, features gathered by the row's source
    draft_context   context   keys and values of norm(c), all layers, into the draft KV pages
    embed           block     the anchor's token, then MASK
    qkv, draft_attend, out_proj, gate_up, down    block, per layer
    head            block     the drafter's norm, the target's output matrix

In the target's layers `tap` follows `down` of a tapped layer; as nothing writes acts.x before
`out_proj` of the next layer, it needs no barrier after it but that one.

Draft keys and values of committed positions are a function of the target's features alone: they
are written once, by `draft_context`, and never rolled back. Those of a block at n are scratch at
positions n, n + 1, ...; the next step's context and block rows overwrite them before any row of
theirs sees those positions. So a block's pages must reach to position n + b - 1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cute_kernels.cpu.phases import (
    multiply_pairs,
    norm_heads,
    products,
    rms_norm,
    store_keys_values,
)
from cute_kernels.cpu.simd import LANES, PAIR, advance, pair_gemm, pointer
from cute_kernels.cpu.state import PAGE
from cute_kernels.cpu.vecmath import softmax_page
from host.atomics import fetch_add
from host.jit import jit

_NO_KEY = np.float32(-np.inf)
_LOWEST = np.finfo(np.float32).min
"""Maximum of no scores: finite, so that a page of which a row sees nothing leaves it unchanged."""

_ITEM_ROWS = 24
"""Product rows (row times query head of the group) of an attention item: fills the micro-kernels,
and divides one block over several workers."""


class Draft(NamedTuple):
    """What a drafter has beyond `Weights`. `*`: padded as in `Acts`; t taps, D layers.

    `features` is written by the target's step and read by the next step's `draft_fuse`. Context
    rows are a `Batch` whose `token` is the row of `features` a position's features stand in.
    """

    fc: np.ndarray  # [H/16, t * H, 16] packed like Weights
    context_norm: np.ndarray  # [H] float32
    taps: np.ndarray  # [t] int32: target layers, in the order of fc's columns
    window: np.ndarray  # [D] int32: positions a layer's row sees, its own included; 0: all
    causal: np.ndarray  # [D] int32: 1 where a block row does not see later ones
    tokens: np.ndarray  # [R] int32: what row of the head is which token, ascending; [0]: each is
    features: np.ndarray  # [target rows, (t * H)*] float32
    context: np.ndarray  # [context rows, H*] float32: W_fc f, before its norm


@jit
def tap(dims, weights, draft, kv, batch, acts, layer, worker, counters, op):
    """Copy the target's acts.x into the columns of `layer` of draft.features; all arguments but
    `draft` are the target's. Nothing happens after a layer that is not tapped."""
    workers = acts.scratch.shape[0]
    for t in range(draft.taps.size):
        if draft.taps[t] != layer:
            continue
        first = t * dims.hidden
        row = worker
        while row < batch.count[0]:
            for k in range(dims.hidden):
                draft.features[row, first + k] = acts.x[row, k]
            row = workers + fetch_add(counters, op * 8, 1)


@jit
def draft_fuse(dims, weights, draft, kv, batch, acts, layer, worker, counters, op):
    """draft.context of the context rows: their features times fc."""
    workers, rows = acts.scratch.shape[0], batch.count[0]
    depth, stride = draft.fc.shape[1], draft.features.shape[1]
    items, width = draft.fc.shape[0] // 2, draft.context.shape[1]
    item = worker if rows > 0 else items
    while item < items:
        following = workers + fetch_add(counters, op * 8, 1)
        w = pointer(draft.fc, item * PAIR * depth)
        ahead = pointer(draft.fc, min(following, items - 1) * PAIR * depth)
        first = 0
        while first < rows:
            # Features of an accepted path are scattered: each run of consecutive rows is a product.
            source = batch.token[first]
            run = 1
            while first + run < rows and batch.token[first + run] == source + run:
                run += 1
            x = pointer(draft.features, source * stride)
            out = pointer(draft.context, first * width + item * PAIR)
            pair_gemm(
                x, stride, run, w, LANES, depth * LANES, out, width, depth, False, ahead, first == 0
            )
            first += run
        item = following


@jit
def draft_context(dims, weights, draft, kv, batch, acts, layer, worker, counters, op):
    """Keys and values of the context rows in all layers, into the draft KV pages.

    The same projections as a block row's, of the normed context vector: no layer's input norm.
    """
    workers, rows = acts.scratch.shape[0], batch.count[0]
    hidden, stride, size = dims.hidden, draft.context.shape[1], dims.head_dim
    for r in range(rows):
        rms_norm(
            draft.context[r], draft.context_norm, weights.eps[0], acts.scratch[worker], r * stride
        )  # fmt: skip
    x = pointer(acts.scratch, worker * acts.scratch.shape[1])
    buffer = products(acts, worker, size)
    heads = dims.heads + 2 * dims.kv_heads
    items = dims.layers * 2 * dims.kv_heads if rows > 0 else 0
    item = worker
    while item < items:
        at, head = item // (2 * dims.kv_heads), item % (2 * dims.kv_heads)
        item = workers + fetch_add(counters, op * 8, 1)
        following = min(item, items - 1)
        ahead = following // (2 * dims.kv_heads) * heads
        ahead += dims.heads + following % (2 * dims.kv_heads)
        w = pointer(weights.qkv, (at * heads + dims.heads + head) * size * hidden)
        multiply_pairs(
            x, stride, rows, w, hidden, buffer, pointer(weights.qkv, ahead * size * hidden)
        )
        if head < dims.kv_heads:
            norm_heads(buffer, rows, weights.k_norm[at], weights.eps[0])
        for first in range(0, size, PAIR):
            store_keys_values(
                dims, weights, kv, batch, at, buffer, first, rows, head, first // 2
            )  # fmt: skip


@jit
def draft_attend(dims, weights, draft, kv, batch, acts, layer, worker, counters, op):
    """Attention of the block rows over committed positions and their own block, into acts.attn.

    A segment of the batch is one block: consecutive rows at consecutive positions. Keys are taken
    in absolute pages, ascending, with a running softmax: a row's result depends on the keys it sees
    and their positions alone.
    """
    workers = acts.scratch.shape[0]
    group = dims.heads // dims.kv_heads
    step = max(_ITEM_ROWS // group, 1)
    longest = 0
    for s in range(batch.count[2]):
        longest = max(longest, batch.segment[s, 2])
    chunks = (longest + step - 1) // step
    item = worker
    while item < batch.count[2] * dims.kv_heads * chunks:
        segment, rest = item // (dims.kv_heads * chunks), item % (dims.kv_heads * chunks)
        head, start = rest // chunks, rest % chunks * step
        rows = min(step, batch.segment[segment, 2] - start)
        if rows > 0:
            _attend_rows(dims, draft, kv, batch, acts, layer, worker, segment, head, start, rows)
        item = workers + fetch_add(counters, op * 8, 1)


@jit
def _visible(draft, batch, layer, segment, row):
    """First position the row sees and the one after the last."""
    first, rows = batch.segment[segment, 1], batch.segment[segment, 2]
    position, window = batch.position[row], draft.window[layer]
    end = batch.position[first] + rows
    if draft.causal[layer] != 0:
        end = position + 1
    elif window > 0:
        end = min(end, position + window)
    return max(position - window + 1, 0) if window > 0 else 0, end


@jit
def _attend_rows(dims, draft, kv, batch, acts, layer, worker, segment, head, start, rows):
    """One key/value head for some rows of a block.

    Scratch, i = row * group + query head: scores [i, 64], sums [i, D], running softmax [i, 2].
    """
    group, size = dims.heads // dims.kv_heads, dims.head_dim
    row0 = batch.segment[segment, 1] + start
    sums_at = rows * group * PAGE
    states_at = sums_at + rows * group * size
    scratch, base = acts.scratch[worker], worker * acts.scratch.shape[1]
    scratch[sums_at:states_at] = np.float32(0.0)
    for i in range(rows * group):
        scratch[states_at + 2 * i] = _LOWEST
        scratch[states_at + 2 * i + 1] = np.float32(0.0)
    low, high = _visible(draft, batch, layer, segment, row0)
    for r in range(1, rows):
        a, b = _visible(draft, batch, layer, segment, row0 + r)
        low, high = min(low, a), max(high, b)

    slot = batch.slot[row0]
    q = pointer(acts.q, (head * acts.q.shape[1] + row0 * group) * size)
    scores, sums = pointer(acts.scratch, base), pointer(acts.scratch, base + sums_at)
    for block in range(low // PAGE, (high + PAGE - 1) // PAGE):
        page = (layer * kv.k.shape[1] + batch.pages[slot, block]) * dims.kv_heads + head
        after = min(block + 1, (high - 1) // PAGE)
        coming = (layer * kv.k.shape[1] + batch.pages[slot, after]) * dims.kv_heads + head
        keys = min(high - block * PAGE, PAGE)  # beyond them nothing has been written
        for pair in range((keys + PAIR - 1) // PAIR):
            k = pointer(kv.k, (page * PAGE + pair * PAIR) * size)
            ahead = pointer(kv.k, (coming * PAGE + pair * PAIR) * size)
            pair_gemm(
                q, size, rows * group, k, LANES, size * LANES, advance(scores, pair * PAIR), PAGE,
                size, False, ahead, True,
            )  # fmt: skip
        for r in range(rows):
            a, b = _visible(draft, batch, layer, segment, row0 + r)
            a, b = min(max(a - block * PAGE, 0), PAGE), max(b - block * PAGE, 0)
            for i in range(r * group, (r + 1) * group):
                scratch[i * PAGE : i * PAGE + a] = _NO_KEY
                scratch[i * PAGE + min(b, PAGE) : (i + 1) * PAGE] = _NO_KEY
        softmax_page(scores, rows * group, advance(scores, states_at), sums, size)
        for pair in range(size // PAIR):
            v = pointer(kv.v, page * PAGE * size + pair * PAIR)
            ahead = pointer(kv.v, (coming * size + pair * PAIR) * PAGE)
            pair_gemm(
                scores, PAGE, rows * group, v, size, LANES, advance(sums, pair * PAIR), size, keys,
                True, ahead, True,
            )  # fmt: skip
    for r in range(rows):
        for g in range(group):
            i = r * group + g
            total = scratch[states_at + 2 * i + 1]
            out = (head * group + g) * size
            for d in range(size):
                acts.attn[row0 + r, out + d] = scratch[sums_at + i * size + d] / total
