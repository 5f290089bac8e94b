"""Lay weights, keys and values, and activations out in memory for the CPU device.

Everything large is one anonymous mapping: zeroed, committed page by page as it is touched, and
backed by huge pages where the system has them (a weight stream crosses a 4 KiB page every 64
cycles). Weights are converted once, at load time, in the order in which the phases read them.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from cute_kernels.cpu.attention import FEW_ROWS, SPLIT_BLOCKS, TAIL, tile_rows
from cute_kernels.cpu.simd import LANES, PAIR
from cute_kernels.cpu.state import PAGE, Acts, Dims, Kv, Weights

if TYPE_CHECKING:
    from megadecode.config import ModelConfig

Getter = Callable[[str], np.ndarray]

_HUGE = 2 << 20
_PAD = 16
"""Floats added to every row of an activation, so that rows do not fall on the same cache sets."""


def dims_of(config: ModelConfig) -> Dims:
    """The sizes the compiled code needs; ValueError for a shape it has no kernel for."""
    for name, multiple in (("head_dim", PAIR), ("hidden", PAIR), ("ffn", LANES)):
        value = getattr(config, name)
        if value % multiple:
            raise ValueError(
                f"model {config.name!r}: {name} is {value}; the CPU device needs a multiple of "
                f"{multiple}"
            )
    return Dims(
        config.layers, config.hidden, config.heads, config.kv_heads, config.head_dim, config.ffn,
        config.vocab,
    )  # fmt: skip


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def allocate(size_bytes: int) -> np.ndarray:
    """Zeroed bytes, aligned to a huge page, committed as they are touched."""
    # Private, or the mapping is shared memory: no huge pages, and common to forked children.
    raw = mmap.mmap(-1, size_bytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            raw.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without huge pages: slower, nothing else
    whole = np.frombuffer(raw, np.uint8)
    start = -whole.ctypes.data % _HUGE
    return whole[start : start + size_bytes]


class _Arena:
    """Hands out consecutive 64-byte-aligned arrays of one allocation."""

    def __init__(self, size_bytes: int) -> None:
        self._bytes = allocate(size_bytes)
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        block = self._bytes[self._used : self._used + size]
        if block.size != size:
            raise RuntimeError(f"arena of {self._bytes.size} bytes has no room for {shape}")
        self._used += _round_up(size, 64)
        return block.view(dtype).reshape(shape)


def round_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 bits (uint16), to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    quiet = ((bits >> 16) | 0x40).astype(np.uint16)
    return np.where(np.isnan(values), quiet, rounded)


def _fill(tiles: np.ndarray, matrix: np.ndarray) -> None:
    """Write `[N, K]` into `[tiles, K, 16]`; tiles beyond N keep their zeros."""
    rows, depth = matrix.shape
    whole = rows // LANES
    source = matrix if tiles.dtype == np.float32 else round_bfloat16(matrix)
    tiles[:whole] = source[: whole * LANES].reshape(whole, LANES, depth).transpose(0, 2, 1)
    if rows % LANES:
        tiles[whole, :, : rows % LANES] = source[whole * LANES :].T


def pack_matrix(matrix: np.ndarray, dtype: str = "fp32") -> np.ndarray:
    """One `[N, K]` matrix as `[N/16, K, 16]` in memory of its own; N is a multiple of 16."""
    kind = np.dtype(np.float32 if dtype == "fp32" else np.uint16)
    rows, depth = matrix.shape
    tiles = allocate(matrix.size * kind.itemsize).view(kind).reshape(rows // LANES, depth, LANES)
    _fill(tiles, matrix)
    return tiles


def _rotation_order(head_dim: int) -> np.ndarray:
    """A head's outputs so that a pair of tiles holds 16 rotation pairs (d, d + head_dim / 2)."""
    halves = np.arange(head_dim).reshape(2, head_dim // 2 // LANES, LANES)
    return halves.transpose(1, 0, 2).reshape(-1)


def pack_weights(
    config: ModelConfig,
    get: Getter,
    positions: int,
    dtype: str = "fp32",
    *,
    shared: Weights | None = None,
) -> Weights:
    """Pack a model's tensors, one at a time, into one arena.

    `get(name)` returns a float32 tensor whose rows are outputs: `embed`, `final_norm`, `head` (not
    asked for when tied), and `layers.{i}.` + `attn_norm`, `q`, `k`, `v`, `o`, `ffn_norm`, `gate`,
    `up`, `down`; with `qk_norm` also `q_norm` and `k_norm`, with `qkv_bias` also `q_bias`, `k_bias`
    and `v_bias`. With `shared`, `embed` and `head` are that model's, not asked for and not copied.
    `positions` is how many positions can be rotated. ValueError for a wrong shape.
    """
    if dtype not in ("fp32", "bf16"):
        raise ValueError(f"weights dtype {dtype!r} is unknown; use 'fp32' or 'bf16'")
    dims_of(config)
    c, kind = config, np.float32 if dtype == "fp32" else np.uint16
    q_rows, kv_rows = c.heads * c.head_dim, c.kv_heads * c.head_dim
    vocab_tiles = _round_up(c.vocab, PAIR) // LANES
    shapes = {
        "embed": (vocab_tiles, c.hidden, LANES),
        "qkv": (c.layers, (q_rows + 2 * kv_rows) // LANES, c.hidden, LANES),
        "out": (c.layers, c.hidden // LANES, q_rows, LANES),
        "gate_up": (c.layers, 2 * c.ffn // LANES, c.hidden, LANES),
        "down": (c.layers, c.hidden // LANES, c.ffn, LANES),
        "head": (vocab_tiles, c.hidden, LANES),
    }
    if c.tied_embeddings or shared is not None:
        del shapes["head"]
    if shared is not None:
        del shapes["embed"]
    size = sum(_round_up(int(np.prod(s)) * np.dtype(kind).itemsize, 64) for s in shapes.values())
    arena = _Arena(size)
    packed = {name: arena.take(shape, kind) for name, shape in shapes.items()}
    norms = {name: np.empty((c.layers, c.hidden), np.float32) for name in ("attn", "ffn")}
    head_size = c.head_dim if c.qk_norm else 0
    norms |= {name: np.empty((c.layers, head_size), np.float32) for name in ("q", "k")}
    bias = np.empty((c.layers, q_rows + 2 * kv_rows if c.qkv_bias else 0), np.float32)

    def tensor(name: str, *shape: int) -> np.ndarray:
        value = np.asarray(get(name), np.float32)
        if value.shape != shape:
            raise ValueError(
                f"model {c.name!r}: tensor {name!r} has shape {list(value.shape)}; "
                f"expected {list(shape)}"
            )
        return value

    for name in packed.keys() & {"embed", "head"}:
        _fill(packed[name], tensor(name, c.vocab, c.hidden))
    order = _rotation_order(c.head_dim)
    for i in range(c.layers):
        at = f"layers.{i}."
        norms["attn"][i] = tensor(at + "attn_norm", c.hidden)
        norms["ffn"][i] = tensor(at + "ffn_norm", c.hidden)
        if c.qk_norm:
            norms["q"][i] = tensor(at + "q_norm", c.head_dim)
            norms["k"][i] = tensor(at + "k_norm", c.head_dim)
        first = 0
        for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            matrix = tensor(at + name, rows, c.hidden)
            if name != "v":
                matrix = matrix.reshape(-1, c.head_dim, c.hidden)[:, order].reshape(rows, c.hidden)
            _fill(packed["qkv"][i, first // LANES : (first + rows) // LANES], matrix)
            if c.qkv_bias:
                values = tensor(at + name + "_bias", rows)
                if name != "v":
                    values = values.reshape(-1, c.head_dim)[:, order].reshape(rows)
                bias[i, first : first + rows] = values
            first += rows
        _fill(packed["out"][i], tensor(at + "o", c.hidden, q_rows))
        _fill(packed["gate_up"][i, 0::2], tensor(at + "gate", c.ffn, c.hidden))
        _fill(packed["gate_up"][i, 1::2], tensor(at + "up", c.ffn, c.hidden))
        _fill(packed["down"][i], tensor(at + "down", c.hidden, c.ffn))
    if shared is None:
        embed, head = packed["embed"], packed.get("head", packed["embed"])
    else:
        embed, head = shared.embed, shared.head
    return Weights(
        embed=embed,
        qkv=packed["qkv"],
        out=packed["out"],
        gate_up=packed["gate_up"],
        down=packed["down"],
        head=head,
        attn_norm=norms["attn"],
        ffn_norm=norms["ffn"],
        final_norm=tensor("final_norm", c.hidden).copy(),
        rope=c.rotations(positions).astype(np.float32),
        eps=np.array([c.rms_eps], np.float32),
        q_norm=norms["q"],
        k_norm=norms["k"],
        qkv_bias=bias,
    )


def allocate_kv(config: ModelConfig, pages: int) -> Kv:
    """Keys and values of `pages` pages in all layers; memory is committed when first written."""
    c = config
    shape = (c.layers, pages, c.kv_heads)
    k = allocate(int(np.prod(shape)) * PAGE * c.head_dim * 4).view(np.float32)
    v = allocate(int(np.prod(shape)) * PAGE * c.head_dim * 4).view(np.float32)
    return Kv(
        k.reshape(*shape, PAGE // LANES, c.head_dim, LANES), v.reshape(*shape, PAGE, c.head_dim)
    )


def attention_parts(rows: int, slots: int, pages: int) -> int:
    """Most parts one step can need, of one query head each; a slot has at most `pages` pages."""
    return min(rows, FEW_ROWS * (slots + 1)) * -(-pages // SPLIT_BLOCKS) + rows


def attention_items(config: ModelConfig, rows: int, slots: int, pages: int) -> int:
    """Most attention work items one step can need; a step has at most `slots + 1` segments."""
    segments = min(rows, slots + 1)
    few = segments * -(-pages // SPLIT_BLOCKS)
    many = rows // tile_rows(config.heads // config.kv_heads) + segments
    return config.kv_heads * (few + many)


def scratch_words(config: ModelConfig, rows: int) -> int:
    """Floats of one worker's private memory; the layout is in `phases` and `attention`."""
    group = config.heads // config.kv_heads
    # The product of an item: a pair of tiles, or a whole head where heads have a norm.
    gemm = rows * (config.hidden + _PAD) + rows * config.head_dim
    tile = group * max(tile_rows(group), FEW_ROWS)
    attend = tile * (PAGE + config.head_dim + 2)
    merge = group * (PAGE + 2 * PAIR + 2 * config.head_dim + 4) + TAIL * config.head_dim
    return _round_up(max(gemm, attend, merge) + _PAD, 1024)


def allocate_acts(
    config: ModelConfig, rows: int, head_rows: int, slots: int, pages: int, workers: int
) -> Acts:
    """Activations for steps of up to `rows` rows, `head_rows` of which get logits.

    A slot has at most `pages` pages. All `workers` threads take part in every phase.
    """
    c = config
    parts = attention_parts(rows, slots, pages) * (c.heads // c.kv_heads)
    shapes = {
        "x": (rows, c.hidden + _PAD),
        "q": (c.kv_heads, rows * (c.heads // c.kv_heads), c.head_dim),
        "attn": (rows, c.heads * c.head_dim + _PAD),
        "h": (rows, c.ffn + _PAD),
        "logits": (head_rows, _round_up(c.vocab, PAIR)),
        "part_ml": (c.kv_heads, parts, 2),
        "part_o": (c.kv_heads, parts, c.head_dim),
        "scratch": (workers, scratch_words(c, rows)),
    }
    size = sum(_round_up(4 * int(np.prod(shape)), 64) for shape in shapes.values())
    arena = _Arena(size + 64)
    made = {name: arena.take(shape, np.float32) for name, shape in shapes.items()}
    return Acts(**made)
