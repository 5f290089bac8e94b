"""The row form's plan: where a chunk of a prompt keeps its activations, and who attends to what.

Free of cutlass: host, device code and tests share it. A *chunk* is up to 256 rows (token positions)
of one prompt; its first position is a multiple of 64. A tree has up to 128 rows. Rows are worked on
in *row tiles* of 16.

Activations are bf16 in the layout of the decode form with 32 blocks of 8 rows: `pack.to_fragments`.
"""

import functools
from dataclasses import dataclass

import numpy as np

from cute_kernels.gpu.board import MAX_ROWS as TREE_ROWS
from cute_kernels.gpu.config import CHUNK, TILE, Config
from cute_kernels.gpu.kv_layout import PAGE

MAX_ROWS, ROW_TILE = 256, 16
PARTS = ("embed", "qkv", "keys", "attention", "o", "gu", "down")  # each also a kernel of its own
ROW_TILES = MAX_ROWS // ROW_TILE
TREE_TILES = TREE_ROWS // ROW_TILE
CONSUMER_REGISTERS = 224  # with setmaxnreg: entry.register_split
OTHER_REGISTERS = 84  # of rows_gemm.py with 4 chunks ahead, besides what grows with the tiles
MOST_AHEAD, SPARE_REGISTERS = 12, 24
FEW_TILES = 4  # row tiles up to which rows_pairs.py multiplies
PAIR_REGISTERS = 52  # of rows_pairs.py besides sums, activations, squares and the head's norm
BLOCKS = MAX_ROWS // 8
COLUMNS_BYTES = BLOCKS * 512  # 32 columns (a chunk of K) of all rows


@dataclass(frozen=True)
class PromptBuffers:
    """Byte offsets in the prompt's activations.

    x, q, a, h: bf16, columns [hidden], [qkv], [heads x head_dim], [ffn]; q: before rotation.
    residual: fp32 [hidden / 8, row tiles, lane, 4], the values an mma leaves in a lane; its columns
    are read and written by their owner CTA alone. parts: fp32 [hidden / 8, team, row tiles, lane,
    4], the team's sums of `down`. tree: a tree's attention, [row tile] of what tiles.Buffers.part
    holds.
    """

    x: int
    q: int
    a: int
    h: int
    residual: int
    parts: int
    tree: int
    bytes: int

    @classmethod
    def of(cls, c: Config) -> "PromptBuffers":
        s = c.shape
        columns = (s.hidden, s.qkv, s.attended, s.ffn)
        sizes = [-(-n // CHUNK) * COLUMNS_BYTES for n in columns]
        tile = MAX_ROWS * TILE * 4
        sizes.append(s.hidden // TILE * tile)
        sizes.append(s.hidden // TILE * tile * c.team if c.team > 1 else 0)
        sizes.append(TREE_TILES * tree_part_bytes(c) if c.draft else 0)
        ends = np.cumsum(sizes).tolist()
        return cls(0, *ends)


def tree_part_bytes(c: Config) -> int:
    """Of a row tile's attention: what the splits say about 16 rows."""
    return c.shape.kv_heads * ROW_TILE * c.splits * c.part_bytes


def most_tiles(c: Config, name: str) -> int:
    """Most tiles of a matrix that one CTA multiplies; of `ckv`, of a layer of the drafter."""
    g = c.gemm(name)
    if g.owned:
        owned = int(c.team_tiles("down").max())
        return owned if g.split > 1 else -(-owned // c.team)
    return -(-g.tiles // c.ctas)


def rounds(c: Config, name: str) -> int:
    """Most row tiles of a warp in a matrix; the head is for rows of a tree alone."""
    return -(-(TREE_TILES if name == "lm" else ROW_TILES) // c.warps)


def warp_bytes(c: Config, name: str) -> int:
    """What one warp of the decode form reads of a unit."""
    return c.gemm(name).unit_bytes // c.warps


def slice_warps(c: Config, name: str) -> int:
    """K warps of the decode form whose weights of a tile make a *slice*: one stage of the ring."""
    fit = [n for n in range(1, c.warps + 1) if c.warps % n == 0]
    return max(n for n in fit if n * warp_bytes(c, name) <= c.stage_bytes)


def slice_count(c: Config, name: str) -> int:
    """Slices of a unit."""
    return c.warps // slice_warps(c, name)


def consumer_registers(c: Config) -> int:
    """Of a consumer's thread."""
    return CONSUMER_REGISTERS if c.setmaxnreg else 65536 // (-(-c.block // 128) * 128)


def free_registers(c: Config, name: str, tiles: int) -> int:
    """Of a thread, beside those that every sweep over `tiles` tiles needs: for each 4 sums a row
    tile of its warp, two chains of 4, and an address."""
    return consumer_registers(c) - OTHER_REGISTERS - tiles * (4 * rounds(c, name) + 9)


def group_tiles(c: Config, name: str) -> int:
    """Tiles multiplied in one sweep over K, so that an activation fragment read from L2 serves all
    of them; evened out over the sweeps. Their slices lie in the ring together."""
    most, at_once = most_tiles(c, name), 1
    while at_once < min(c.stages - 2, most) and free_registers(c, name, at_once + 1) >= 0:
        at_once += 1
    return -(-most // -(-most // at_once))


def chunks_ahead(c: Config, name: str) -> int:
    """Chunks of activations in flight a warp, 1 KiB each: 8 registers. At most a slice's."""
    chunks = c.gemm(name).slab // CHUNK // c.warps
    more = max(free_registers(c, name, group_tiles(c, name)) - SPARE_REGISTERS, 0) // 8
    return min(4 + more, MOST_AHEAD, slice_warps(c, name) * chunks)


@dataclass(frozen=True)
class PairSweep:
    """How rows_pairs.py multiplies a matrix: most tiles of a sweep, chunks of K a warp takes in a
    step, steps of a sweep; bytes of a tile's weights in a step, tiles whose share a stage."""

    tiles: int
    chunks: int
    steps: int
    piece_bytes: int
    together: int


@functools.cache
def pair_sweep(c: Config, name: str) -> PairSweep:
    """As many tiles as registers allow with at least two chunks of activations in flight, evened
    out over the sweeps; then as many chunks as fit. A step's weights take at most half the ring."""
    g, most = c.gemm(name), most_tiles(c, name)
    chunks, per_chunk = g.slab // CHUNK // c.warps, c.warps * CHUNK * TILE * 2
    free = consumer_registers(c) - PAIR_REGISTERS - 16 * g.normed - 16 * (name == "lm")
    divisors = [n for n in range(1, chunks + 1) if chunks % n == 0]
    steps = [n for n in divisors if n * per_chunk <= c.stage_bytes]

    def fits(tiles: int, step: int) -> bool:
        stages = -(-tiles // (c.stage_bytes // (step * per_chunk)))
        return stages <= c.stages // 2 and 16 * (tiles + step) + stages <= free

    deep = [n for n in steps if n > 1] or steps
    tiles = max((n for n in range(1, most + 1) if any(fits(n, step) for step in deep)), default=1)
    tiles = -(-most // -(-most // tiles))
    step = max((n for n in steps if fits(tiles, n)), default=1)
    piece = step * per_chunk
    return PairSweep(tiles, step, chunks // step, piece, c.stage_bytes // piece)


def pair_slots(c: Config) -> int:
    """Sums (of a tile and row tile, by all warps) that meet in shared memory at a time."""
    return min(c.smem_plan()["partial sums"] // (c.warps * 512), c.warps)


def task_tiles(c: Config) -> int:
    """Row tiles of an attention task: one where every task finds a CTA of its own, more (a warp
    per row tile and query head) where there are more tasks than CTAs."""
    fit = c.warps // c.group_heads  # at least 1: attention_plan.check
    return min(fit, -(-c.shape.kv_heads * ROW_TILES // c.ctas))


def task_count(c: Config, row_tiles):
    """Attention tasks of a chunk; ints or device values."""
    return (row_tiles + (task_tiles(c) - 1)) // task_tiles(c) * c.shape.kv_heads


@dataclass(frozen=True)
class Task:
    """A CTA's share of a chunk's attention: query heads of one kv head, some row tiles, and the
    KV blocks 0 .. blocks - 1 that they walk."""

    kv_head: int
    tiles: range
    blocks: int


def tasks_of(c: Config, cta: int, rows: int, position: int) -> list[Task]:
    """What prompt_attention.py does, as data."""
    row_tiles, per_task = -(-rows // ROW_TILE), task_tiles(c)
    out = []
    for index in range(cta, task_count(c, row_tiles), c.ctas):
        first = index // c.shape.kv_heads * per_task
        tiles = range(first, min(first + per_task, row_tiles))
        end = position + min(tiles.stop * ROW_TILE, rows)
        out.append(Task(index % c.shape.kv_heads, tiles, (end - 1) // PAGE + 1))
    return out


def chunks_of(length: int, sizes: tuple[int, ...] = (MAX_ROWS,)) -> list[tuple[int, int]]:
    """(position, rows) of chunks that cover `length` positions; sizes are taken in turn and must
    keep every start a multiple of 64."""
    out, at, turn = [], 0, 0
    while at < length:
        rows = min(sizes[turn % len(sizes)], length - at)
        out.append((at, rows))
        at, turn = at + rows, turn + 1
        if at < length and at % PAGE:
            raise ValueError(f"a chunk would start at {at}; starts are multiples of {PAGE}")
    return out


# -- fp32 buffers, for tests and host code; numpy arrays or torch tensors ------------------------
def to_row_quads(x):
    """fp32 [256, columns] -> [columns / 8, row tiles, lane, 4], flat: PromptBuffers.residual."""
    v = x.reshape(ROW_TILES, 2, 8, -1, 4, 2)  # row tile, half, g, tile, t, element
    order = (3, 0, 2, 4, 1, 5)
    return (v.permute(order) if hasattr(v, "permute") else v.transpose(order)).reshape(-1)


def from_row_quads(a):
    """The inverse: [256, columns]."""
    v = a.reshape(-1, ROW_TILES, 8, 4, 2, 2)
    order = (1, 4, 2, 0, 3, 5)
    v = v.permute(order) if hasattr(v, "permute") else v.transpose(order)
    return v.reshape(MAX_ROWS, -1)
