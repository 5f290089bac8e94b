"""Who computes which tiles, and where results lie in device memory. Free of cutlass."""

from dataclasses import dataclass

import numpy as np

from cute_kernels.gpu.config import CHUNK, CHUNK_BYTES, LAYER_KINDS, ROWS, TILE, Config


@dataclass(frozen=True)
class Buffers:
    """Byte offsets of one copy of the activation buffers in `act`.

    q (all columns of qkv, before rotation), y, h, x, a (the attention's output): bf16 in the order
    of pack.py, 2 blocks of rows. parts: partial sums of `down`, fp32 [tiles, team, 64 pairs].
    part: the attention's, [kv heads, 16 rows, splits, part_bytes]. Whoever clears a copy needs the
    row of a byte: see kernel.run_janitor.
    """

    q: int
    y: int
    h: int
    x: int
    a: int
    parts: int
    part: int
    bytes: int

    @classmethod
    def of(cls, c: Config) -> "Buffers":
        s = c.shape
        at = [0]
        for cols in (s.qkv, s.hidden, s.ffn, s.hidden, s.attended):
            at.append(at[-1] + -(-cols // CHUNK) * CHUNK_BYTES)
        at.append(at[-1] + c.gemm("down").tiles * c.team * ROWS * TILE * 4 * (c.team > 1))
        part = s.kv_heads * ROWS * c.splits * c.part_bytes if c.attention else 0
        at.append(at[-1] + part)
        return cls(*at)


# -- tile assignment ---------------------------------------------------------------------------
def tile_stride(c: Config, name: str) -> int:
    """Distance of a CTA's consecutive tiles: `o` follows the ownership of `down`, so that the
    residual of a column never leaves its CTA."""
    return c.team if name == "o" else 1


def make_plan(c: Config, layers: int) -> np.ndarray:
    """plan[cta, phase] = (first tile, tiles, copies, bytes a copy), int32.

    Phases are 4 per layer and the head. Tiles of `down` belong to a team; CTA r of a team finishes
    tiles r, r + team, ... of them, and `o` follows. Elsewhere tiles are consecutive, and a
    remainder goes to those with the shortest streams so far.
    """
    plan = np.zeros((c.ctas, 4 * layers + 1, 4), np.int32)
    load = np.zeros(c.ctas)
    rank, team = np.arange(c.ctas) % c.team, np.arange(c.ctas) // c.team
    owned = c.team_tiles("down")
    owned_first = np.cumsum(owned) - owned
    for p, name in enumerate([*LAYER_KINDS] * layers + ["lm"]):
        g = c.gemm(name)
        if name in ("o", "down"):
            first, n = owned_first[team], owned[team]
            if g.split == 1:
                first, n = first + rank, (n - rank + c.team - 1) // c.team
        else:
            n = np.full(c.ctas, g.tiles // c.ctas)
            n[np.argsort(load, kind="stable")[: g.tiles % c.ctas]] += 1
            first = np.cumsum(n) - n
        plan[:, p, 0], plan[:, p, 1] = first, n
        plan[:, p, 2] = n * g.copies_per_unit
        plan[:, p, 3] = g.copy_bytes
        load += n * g.unit_bytes
    return plan


def step_bytes(c: Config, layers: int | None = None) -> int:
    """bf16 weight bytes that a step must read."""
    layers = c.shape.layers if layers is None else layers
    per_layer = sum(c.gemm(k).cols * c.gemm(k).k * 2 for k in LAYER_KINDS)
    return layers * per_layer + c.gemm("lm").cols * c.gemm("lm").k * 2
