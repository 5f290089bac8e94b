"""The phases of a forward step on the CPU device, apart from attention.

Every phase has the signature `phase(dims, weights, kv, batch, acts, layer, worker, counters, op)`.
All workers call it; a worker's first work item is the one with its own number, further ones come
from `counters[8 * op]`, which the caller has set to zero. Phases do not synchronise: the caller
puts a barrier between them.

An item of a matrix phase is one pair of 16-column tiles, a contiguous stream that is read once and
applied to all rows (in `qkv`, where each head has a norm, it is a head). The next item is taken
before the current one is computed, so that its weights can be requested meanwhile; the last one
requests the first of the matrix that follows. Thus the memory is busy across barriers too.
"""

from __future__ import annotations

import math

import numpy as np

from cute_kernels.cpu.simd import LANES, PAIR, advance, load_weight, pair_gemm, pointer
from cute_kernels.cpu.state import PAGE, kv_position
from cute_kernels.cpu.vecmath import silu_product, sum_squares
from host.atomics import fetch_add
from host.jit import jit


@jit
def embed(dims, weights, kv, batch, acts, layer, worker, counters, op):
    """acts.x = the embedding of each row's token."""
    workers = acts.scratch.shape[0]
    row = worker
    while row < batch.count[0]:
        token = batch.token[row]
        column = pointer(weights.embed, token // LANES * dims.hidden * LANES + token % LANES)
        for k in range(dims.hidden):
            acts.x[row, k] = load_weight(column, k * LANES)
        row = workers + fetch_add(counters, op * 8, 1)


@jit
def rms_norm(x, gain, eps, out, out_at):
    """`out[out_at + k] = x[k] / rms(x) * gain[k]` for one row x."""
    size = gain.size
    mean = sum_squares(pointer(x, 0), size) / np.float32(size)
    scale = np.float32(1.0) / np.float32(math.sqrt(mean + eps))
    for k in range(size):
        out[out_at + k] = x[k] * scale * gain[k]


@jit
def _multiply(acts, worker, rows, x, x_stride, depth, w, ahead):
    """One item: `rows` rows times the pair at `w`, into this worker's buffer of [rows, 32]."""
    out = pointer(acts.scratch, (worker + 1) * acts.scratch.shape[1] - acts.x.shape[0] * PAIR)
    pair_gemm(x, x_stride, rows, w, LANES, depth * LANES, out, PAIR, depth, False, ahead, True)


@jit
def products(acts, worker, width):
    """This worker's buffer for the product of an item of `width` columns, [rows, width]."""
    size = acts.x.shape[0] * width
    words = acts.scratch.shape[1]
    return acts.scratch[worker, words - size : words].reshape((acts.x.shape[0], width))


@jit
def qkv(dims, weights, kv, batch, acts, layer, worker, counters, op):
    """Rotated queries (times head_dim ** -0.5) into acts.q; keys and values into the KV pages."""
    workers, rows = acts.scratch.shape[0], batch.count[0]
    hidden, stride = dims.hidden, acts.x.shape[1]
    for r in range(rows):
        rms_norm(
            acts.x[r], weights.attn_norm[layer], weights.eps[0], acts.scratch[worker], r * stride
        )  # fmt: skip
    x = pointer(acts.scratch, worker * acts.scratch.shape[1])
    width = qkv_columns(dims, weights)
    buffer = products(acts, worker, width)
    items = (dims.heads + 2 * dims.kv_heads) * dims.head_dim // width
    item = worker
    while item < items:
        following = workers + fetch_add(counters, op * 8, 1)
        if following < items:
            ahead = pointer(weights.qkv, (layer * items + following) * width * hidden)
        else:
            ahead = _first_of_out(dims, weights, layer, worker)
        w = pointer(weights.qkv, (layer * items + item) * width * hidden)
        multiply_pairs(x, stride, rows, w, hidden, buffer, ahead)
        _add_bias(weights.qkv_bias[layer], item * width, buffer, rows)
        head, first = item * width // dims.head_dim, item * width % dims.head_dim // 2
        if head < dims.heads:
            norm_heads(buffer, rows, weights.q_norm[layer], weights.eps[0])
        elif head < dims.heads + dims.kv_heads:
            norm_heads(buffer, rows, weights.k_norm[layer], weights.eps[0])
        for at in range(0, width, PAIR):
            if head < dims.heads:
                _store_queries(dims, weights, batch, acts, buffer, at, rows, head, first)
            else:
                store_keys_values(
                    dims, weights, kv, batch, layer, buffer, at, rows, head - dims.heads, first
                )
            first += LANES
        item = following


@jit
def qkv_columns(dims, weights):
    """Columns of a work item of `qkv`: a pair of tiles, or a head where each head has a norm."""
    return dims.head_dim if weights.q_norm.shape[1] > 0 else PAIR


@jit
def multiply_pairs(x, x_stride, rows, w, depth, buffer, ahead):
    """`buffer[r] = x[r] @ w` over consecutive pairs at `w`; the last one requests `ahead`."""
    width = buffer.shape[1]
    for at in range(0, width, PAIR):
        here = advance(w, at * depth)
        coming = ahead if at + PAIR == width else advance(w, (at + PAIR) * depth)
        out = pointer(buffer, at)
        pair_gemm(
            x, x_stride, rows, here, LANES, depth * LANES, out, width, depth, False, coming, True
        )


@jit
def _add_bias(bias, at, buffer, rows):
    """Columns at..at+width of the bias to every row; nothing where the model has no bias."""
    for r in range(rows if bias.size > 0 else 0):
        for j in range(buffer.shape[1]):
            buffer[r, j] += bias[at + j]


@jit
def norm_heads(buffer, rows, gain, eps):
    """RMSNorm of one head's rows, before rotation; nothing where the model has no such norm.

    A pair of tiles holds elements first..first+15 and their partners half a head further on.
    """
    half = gain.size // 2
    for r in range(rows if half > 0 else 0):
        mean = sum_squares(pointer(buffer, r * buffer.shape[1]), gain.size)
        scale = np.float32(1.0) / np.float32(math.sqrt(mean / np.float32(gain.size) + eps))
        for first in range(0, half, LANES):
            for j in range(LANES):
                buffer[r, 2 * first + j] *= scale * gain[first + j]
                buffer[r, 2 * first + LANES + j] *= scale * gain[first + j + half]


@jit
def store_keys_values(dims, weights, kv, batch, layer, buffer, at, rows, head, first):
    """Columns at..at+31 of the products into the KV pages; heads past the keys' are values."""
    if head < dims.kv_heads:
        _store_keys(dims, weights, kv, batch, layer, buffer, at, rows, head, first)
        return
    head -= dims.kv_heads
    for r in range(rows):
        place = kv_position(batch, r)
        page = batch.pages[batch.slot[r], place // PAGE]
        for j in range(PAIR):
            kv.v[layer, page, head, place % PAGE, 2 * first + j] = buffer[r, at + j]


@jit
def _store_queries(dims, weights, batch, acts, buffer, at, rows, head, first):
    group, half = dims.heads // dims.kv_heads, dims.head_dim // 2
    scale = np.float32(1.0 / math.sqrt(dims.head_dim))
    for r in range(rows):
        turn = weights.rope[batch.position[r]]
        out = acts.q[head // group, r * group + head % group]
        for j in range(LANES):
            a, b = buffer[r, at + j], buffer[r, at + LANES + j]
            cos, sin = turn[0, first + j], turn[1, first + j]
            out[first + j] = (a * cos - b * sin) * scale
            out[first + j + half] = (b * cos + a * sin) * scale


@jit
def _store_keys(dims, weights, kv, batch, layer, buffer, at, rows, head, first):
    half = dims.head_dim // 2
    for r in range(rows):
        turn = weights.rope[batch.position[r]]
        place = kv_position(batch, r)
        offset = place % PAGE
        page = batch.pages[batch.slot[r], place // PAGE]
        tile = kv.k[layer, page, head, offset // LANES]
        for j in range(LANES):
            a, b = buffer[r, at + j], buffer[r, at + LANES + j]
            cos, sin = turn[0, first + j], turn[1, first + j]
            tile[first + j, offset % LANES] = a * cos - b * sin
            tile[first + j + half, offset % LANES] = b * cos + a * sin


@jit
def _first_of_qkv(dims, weights, layer, worker):
    width = qkv_columns(dims, weights)
    items = (dims.heads + 2 * dims.kv_heads) * dims.head_dim // width
    return pointer(weights.qkv, (layer * items + min(worker, items - 1)) * width * dims.hidden)


@jit
def _first_of_out(dims, weights, layer, worker):
    depth = dims.heads * dims.head_dim
    pairs = dims.hidden // PAIR
    return pointer(weights.out, (layer * pairs + min(worker, pairs - 1)) * PAIR * depth)


@jit
def out_proj(dims, weights, kv, batch, acts, layer, worker, counters, op):
    """acts.x += acts.attn times the output projection."""
    workers, rows = acts.scratch.shape[0], batch.count[0]
    depth, items = dims.heads * dims.head_dim, dims.hidden // PAIR
    x = pointer(acts.attn, 0)
    after = min(worker, dims.ffn // LANES - 1)
    item = worker
    while item < items:
        following = workers + fetch_add(counters, op * 8, 1)
        if following < items:
            ahead = pointer(weights.out, (layer * items + following) * PAIR * depth)
        else:
            first = layer * (dims.ffn // LANES) + after
            ahead = pointer(weights.gate_up, first * PAIR * dims.hidden)
        w = pointer(weights.out, (layer * items + item) * PAIR * depth)
        _multiply(acts, worker, rows, x, acts.attn.shape[1], depth, w, ahead)
        _add_to_residual(acts, worker, rows, item)
        item = following


@jit
def _add_to_residual(acts, worker, rows, item):
    buffer = products(acts, worker, PAIR)
    for r in range(rows):
        for j in range(PAIR):
            acts.x[r, item * PAIR + j] += buffer[r, j]


@jit
def gate_up(dims, weights, kv, batch, acts, layer, worker, counters, op):
    """acts.h = silu(gate) * up of the normalised residual stream."""
    workers, rows = acts.scratch.shape[0], batch.count[0]
    hidden, stride = dims.hidden, acts.x.shape[1]
    for r in range(rows):
        rms_norm(
            acts.x[r], weights.ffn_norm[layer], weights.eps[0], acts.scratch[worker], r * stride
        )  # fmt: skip
    x = pointer(acts.scratch, worker * acts.scratch.shape[1])
    buffer = products(acts, worker, PAIR)
    items, after = dims.ffn // LANES, hidden // PAIR
    item = worker
    while item < items:
        following = workers + fetch_add(counters, op * 8, 1)
        if following < items:
            ahead = pointer(weights.gate_up, (layer * items + following) * PAIR * hidden)
        else:
            first = layer * after + min(worker, after - 1)
            ahead = pointer(weights.down, first * PAIR * dims.ffn)
        w = pointer(weights.gate_up, (layer * items + item) * PAIR * hidden)
        _multiply(acts, worker, rows, x, stride, hidden, w, ahead)
        for r in range(rows):
            out = pointer(acts.h, r * acts.h.shape[1] + item * LANES)
            silu_product(pointer(buffer, r * PAIR), out)
        item = following


@jit
def down(dims, weights, kv, batch, acts, layer, worker, counters, op):
    """acts.x += acts.h times the down projection."""
    workers, rows = acts.scratch.shape[0], batch.count[0]
    depth, items = dims.ffn, dims.hidden // PAIR
    x = pointer(acts.h, 0)
    item = worker
    while item < items:
        following = workers + fetch_add(counters, op * 8, 1)
        if following < items:
            ahead = pointer(weights.down, (layer * items + following) * PAIR * depth)
        elif layer + 1 < dims.layers:
            ahead = _first_of_qkv(dims, weights, layer + 1, worker)
        else:
            first = min(worker, weights.head.shape[0] // 2 - 1)
            ahead = pointer(weights.head, first * PAIR * dims.hidden)
        w = pointer(weights.down, (layer * items + item) * PAIR * depth)
        _multiply(acts, worker, rows, x, acts.h.shape[1], depth, w, ahead)
        _add_to_residual(acts, worker, rows, item)
        item = following


@jit
def head(dims, weights, kv, batch, acts, layer, worker, counters, op):
    """acts.logits of the head rows: final norm, then the output embedding."""
    workers, rows = acts.scratch.shape[0], batch.count[1]
    hidden, stride = dims.hidden, acts.x.shape[1]
    for r in range(rows):
        rms_norm(
            acts.x[batch.head_row[r]], weights.final_norm, weights.eps[0], acts.scratch[worker],
            r * stride,
        )  # fmt: skip
    x = pointer(acts.scratch, worker * acts.scratch.shape[1])
    items, width = weights.head.shape[0] // 2, acts.logits.shape[1]
    item = worker if rows > 0 else items
    while item < items:
        following = workers + fetch_add(counters, op * 8, 1)
        w = pointer(weights.head, item * PAIR * hidden)
        if following < items:
            ahead = pointer(weights.head, following * PAIR * hidden)
        else:
            ahead = _first_of_qkv(dims, weights, 0, worker)
        out = pointer(acts.logits, item * PAIR)
        pair_gemm(x, stride, rows, w, LANES, hidden * LANES, out, width, hidden, False, ahead, True)
        item = following
