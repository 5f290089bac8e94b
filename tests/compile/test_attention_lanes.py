"""Where attention's registers hold what: its plain functions on a warp of numpy lanes."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cute_kernels.gpu import (
    attention_blocks,
    attention_merge,
    attention_tail,
    draft_attention,
    kv_layout,
    prompt_attention,
)
from cute_kernels.gpu.attention_plan import TAIL_GROUPS
from tests.compile import lanes

SMEM = 1 << 17
CASES = [(64, 4, 16), (64, 3, 32), (128, 4, 16), (64, 1, 8)]  # head_dim, heads of a group, splits


def device(monkeypatch, d, heads, splits):
    memory = lanes.Memory(SMEM)
    lanes.on_lanes(monkeypatch, memory, attention_blocks, attention_merge, attention_tail)
    shape = SimpleNamespace(head_dim=d)
    c = SimpleNamespace(shape=shape, group_heads=heads, splits=splits)
    smem = SimpleNamespace(tail_stride=4 * (d + 4))
    p = SimpleNamespace(queries=0, tails=8192, smem=smem, tail=True)
    return memory, SimpleNamespace(c=c, lane=lanes.LANES), p


def bf16(rng, *size):
    return lanes.from_bf16(lanes.to_bf16(rng.standard_normal(size)))


def put_query(memory, p, d, heads, q):
    """As stage_query leaves it: lane t's words of every head's row."""
    col = np.arange(0, d, 2)
    t, word = col >> 2 & 3, (col >> 5) * 4 + (col >> 4 & 1) * 2 + (col >> 1 & 1)
    for head in range(heads):
        columns = q[head][kv_layout.rotary_order(d)]
        words = np.zeros((4, d // 8), np.uint32)
        words[t, word] = lanes.pack(columns[::2], columns[1::2])
        memory.put(p.queries + head * 2 * d, words)


def put_rows(memory, at, rows):
    memory.put(at, lanes.to_bf16(kv_layout.swizzle_rows(rows)).astype(np.uint16))


@pytest.mark.parametrize(("d", "heads", "splits"), CASES)
@pytest.mark.parametrize("left", [1, 17, 32])
def test_a_group_of_a_tail(monkeypatch, d, heads, splits, left):
    rng = np.random.default_rng(d + left)
    memory, k, p = device(monkeypatch, d, heads, splits)
    q, keys, values = bf16(rng, heads, d), bf16(rng, 64, d), bf16(rng, 64, d)
    put_query(memory, p, d, heads, q)
    keys_at, values_at = 32768, 65536
    put_rows(memory, keys_at, keys[:, kv_layout.key_order(d)])
    put_rows(memory, values_at, values)
    place = rng.permutation(64)[np.minimum(lanes.LANES, left - 1)]  # gathered from anywhere
    rows = [attention_tail.row_address(at, place, 2 * d) for at in (keys_at, values_at)]
    memory.put(p.tails, np.stack(rows, -1).astype(np.int32))
    m, den, o = [None], [None], [np.zeros(32, np.float32)] * (d // 2)
    query = attention_tail.load_query(k, p, 0)
    attention_tail.multiply_group(k, query, p.tails, left, m, den, o)
    seen = place[:left]
    for head in range(heads):
        scores = (keys[seen] @ q[head]) * attention_blocks.score_scale(k)
        weights = np.exp2(scores - scores.max())
        assert np.allclose(m[0][4 * head], scores.max(), atol=1e-4)
        assert np.allclose(den[0][4 * head], weights.sum(), rtol=1e-4)
        want = weights @ values[seen]
        got = np.stack([[o[4 * n + e][4 * head + t] for t in range(4) for e in range(2)]
                        for n in range(d // 8)]).reshape(-1)  # fmt: skip
        assert np.abs(got - want).max() < 2**-7 * weights.sum()


@pytest.mark.parametrize(("d", "heads", "splits"), CASES)
def test_splits_and_tail_merge(monkeypatch, d, heads, splits):
    rng = np.random.default_rng(d + splits)
    memory, k, p = device(monkeypatch, d, heads, splits)
    head, lane_count = heads - 1, d // 8
    sums = bf16(rng, splits, d)
    tops, dens = rng.standard_normal(splits), rng.random(splits) + 1
    tops[1] = -np.inf  # a split without blocks
    sums[1], dens[1] = 0, 0
    # word w of vector v of a split's sums holds dimensions 8 n + 2 t and the next
    vector, w = np.divmod(np.arange(d // 2), 4)
    t, n = vector % 4, vector // 4 * 4 + w
    words = lanes.pack(sums[:, 8 * n + 2 * t], sums[:, 8 * n + 2 * t + 1])
    count = splits * lane_count // 32
    u = []
    for i in range(count):
        split = i * (32 // lane_count) + lanes.LANES // lane_count
        u += [words[split, lanes.LANES % lane_count * 4 + w] for w in range(4)]
    own = np.minimum(lanes.LANES, splits - 1)
    u += [
        tops.astype(np.float32)[own].view(np.uint32),
        dens.astype(np.float32)[own].view(np.uint32),
    ]
    tails = rng.standard_normal((TAIL_GROUPS, d)).astype(np.float32)
    tail_tops, tail_dens = np.array([0.5, 2.0, -np.inf]), np.array([3.0, 4.0, 0.0])
    tails[2] = 0
    for group in range(TAIL_GROUPS):
        at = int(attention_tail.tail_at(k, p, 0, group, head))
        memory.put(at, tails[group])
        memory.put(at + 4 * d, np.array([tail_tops[group], tail_dens[group]], np.float32))
    got = attention_merge.merge_words(k, p, u, 0, head)
    all_tops = np.concatenate([tops, tail_tops])
    factors = np.exp2(all_tops - all_tops.max())
    total = factors @ np.concatenate([dens, tail_dens])
    want = factors @ np.concatenate([sums, tails]) / total
    for w in range(4):
        dim = attention_merge.merge_dim(k, w)
        for e, value in enumerate(lanes.unpack(got[w])):
            assert np.allclose(value, want[dim + e], atol=2**-8)


def tile_query(q):
    """16 rows of a head as words: rows g, then rows g + 8."""
    d = q.shape[1]
    columns, out = q[:, kv_layout.rotary_order(d)], []
    g, t = lanes.LANES // 4, lanes.LANES % 4
    for upper in range(2):
        for word in range(d // 8):
            col = word // 4 * 32 + (word // 2 & 1) * 16 + t * 4 + (word & 1) * 2
            row = g + 8 * upper
            out.append(lanes.pack(columns[row, col], columns[row, col + 1]))
    return out


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("window", [0, 5, 40])
def test_masked_blocks(monkeypatch, d, window):
    """40 cached keys, of which a page holds NaN behind the last, and a block of 11 rows."""
    memory, k, _ = device(monkeypatch, d, 1, 8)
    lanes.on_lanes(monkeypatch, memory, draft_attention, prompt_attention)
    rng = np.random.default_rng(d + window)
    n, rows = 40, 11
    q, keys, values = bf16(rng, 16, d), bf16(rng, n + rows, d), bf16(rng, n + rows, d)
    for at, x in ((32768, keys[:, kv_layout.key_order(d)]), (65536, values)):
        page, own = np.full((64, d), np.nan, np.float32), np.full((32, d), np.nan, np.float32)
        page[:n], own[:rows] = x[:n], x[n:]
        put_rows(memory, at, page)
        put_rows(memory, at + 16384, own)
    row = lanes.LANES // 4 + 8 * np.arange(2)[:, None]
    low = np.maximum(n + row - window + 1, 0) if window else 0 * row
    end = n + (np.minimum(rows, row + window) if window else rows + 0 * row)
    m, den = ([np.full(32, v, np.float32) for _ in range(2)] for v in (-np.inf, 0))
    o = [np.zeros(32, np.float32)] * (d // 2)
    for base, written, at in ((0, n, 0), (32, n, 64 * d), (n, n + rows, 16384)):
        reach = [(low[h], np.minimum(end[h], written)) for h in range(2)]
        tiles = attention_blocks.block_scores(k, tile_query(q), 32768 + at)
        tiles = draft_attention.mask_scores(k, tiles, base, reach)
        prob = [np.zeros(32, np.float32)] * 16
        for h in range(2):
            valid = draft_attention.seen_from(base, *reach[h])
            with np.errstate(invalid="ignore"):  # where a selection drops it
                attention_blocks.softmax_half(k, tiles, h, valid, prob, m, den, o)
        masks = prompt_attention.value_masks(k, written - base)
        attention_blocks.block_values(k, o, prob, 65536 + at, masks)
    for r in range(rows):
        position = np.arange(n + rows)
        seen = np.abs(position - (n + r)) < window if window else position >= 0
        scores = keys @ q[r] * attention_blocks.score_scale(k)
        weights = np.where(seen, np.exp2(scores - scores[seen].max()), 0)
        lane = r % 8 * 4
        total = sum(den[r // 8][lane : lane + 4])
        got = [o[4 * i + 2 * (r // 8) + e][lane + t] / total
               for i in range(d // 8) for t in range(4) for e in range(2)]  # fmt: skip
        assert np.abs(np.array(got) - weights @ values / weights.sum()).max() < 2**-7
