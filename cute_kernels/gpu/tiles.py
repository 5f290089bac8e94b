"""Who computes which tiles, and where results lie in device memory. Free of cutlass."""

from dataclasses import dataclass

import numpy as np

from cute_kernels.gpu.config import CHUNK, LAYER_KINDS, Config


@dataclass(frozen=True)
class Buffers:
    """Byte offsets of one copy of the activation buffers in `act`: q, y, h, x (bf16, A fragment
    order), the partial sums of `down` (fp32 [tiles, team, row tiles, 128] as pairs), and with
    attention: kv ([kv heads, K and V, 16 rows, 128 bytes]), a (its output, as q) and part
    ([kv heads, 16 rows, splits, part_bytes])."""

    q: int
    y: int
    h: int
    x: int
    parts: int
    kv: int
    a: int
    part: int
    bytes: int

    @classmethod
    def of(cls, c: Config) -> "Buffers":
        s = c.shape
        at, sizes = [0], (s.qkv, s.hidden, s.ffn, s.hidden)
        for cols in sizes:
            at.append(at[-1] + -(-cols // CHUNK) * c.chunk_bytes)
        parts = c.gemm("down").tiles * c.team * c.m_tiles * 512 if c.exchange == "global" else 0
        at.append(at[-1] + parts)
        more = (0, 0, 0)
        if c.attention:
            a = s.heads * s.head_dim // CHUNK * c.chunk_bytes
            part = s.kv_heads * 16 * c.splits * c.part_bytes
            more = (s.kv_heads * 16 * 256, a, part)
        for n_bytes in more:
            at.append(at[-1] + n_bytes)
        return cls(*at)


# -- tile assignment ---------------------------------------------------------------------------
def tile_stride(c: Config, name: str) -> int:
    """Distance of a CTA's consecutive tiles: `o` follows the ownership of `down`, so that the
    residual of a column never leaves its CTA."""
    return c.team if name == "o" and c.split == 1 else 1


def make_plan(c: Config, layers: int) -> np.ndarray:
    """plan[cta, phase] = (first tile, tiles, copies, bytes a copy), int32.

    Phases are 4 per layer and the head. Tiles of a split matrix belong to a team; CTA r of a
    team finishes tiles r, r + team, ... of its `down`, and `o` follows. Elsewhere tiles are
    consecutive, and a remainder goes to those with the shortest streams so far.
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
            width = g.split
            units = load.reshape(-1, width)[:, 0]
            n = np.full(len(units), g.tiles // len(units))
            n[np.argsort(units, kind="stable")[: g.tiles % len(units)]] += 1
            first = np.repeat(np.cumsum(n) - n, width)
            n = np.repeat(n, width)
        plan[:, p, 0], plan[:, p, 1] = first, n
        plan[:, p, 2] = n * g.passes * g.copies_per_unit
        plan[:, p, 3] = g.copy_bytes
        load += n * g.passes * g.unit_bytes
    return plan


def step_bytes(c: Config, layers: int | None = None) -> int:
    """bf16 weight bytes that a step must read."""
    layers = c.shape.layers if layers is None else layers
    per_layer = sum(c.gemm(k).cols * c.gemm(k).k * 2 for k in LAYER_KINDS)
    return layers * per_layer + c.gemm("lm").cols * c.gemm("lm").k * 2
