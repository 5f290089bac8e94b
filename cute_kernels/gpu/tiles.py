"""Who computes which tiles, and where results lie in device memory. Free of cutlass."""

from dataclasses import dataclass

import numpy as np

from cute_kernels.gpu.config import CHUNK, CHUNK_BYTES, LAYER_KINDS, ROWS, TILE, Config, DraftShape


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


# -- phases ------------------------------------------------------------------------------------
def draft_phases(c: Config, draft: DraftShape) -> list[tuple[str, int]]:
    """(matrix, its tiles) of the drafter's phases, as they follow the target's head: fc of every
    tap, ckv of all layers in one, four a layer, the head."""
    head = draft.columns // TILE or c.gemm("lm").tiles
    kinds = ["fc"] * draft.taps + ["ckv"] + [*LAYER_KINDS] * draft.layers
    tiles = [c.gemm(name).tiles * (draft.layers if name == "ckv" else 1) for name in kinds]
    return [*zip(kinds, tiles, strict=True), ("lm", head)]


def target_phases(c: Config, layers: int) -> list[tuple[str, int]]:
    """(matrix, its tiles) of the target's phases: four a layer and the head."""
    return [(name, c.gemm(name).tiles) for name in [*LAYER_KINDS] * layers + ["lm"]]


# -- tile assignment ---------------------------------------------------------------------------
def tile_stride(c: Config, name: str) -> int:
    """Distance of a CTA's consecutive tiles: `o` and `fc` follow the ownership of `down`, so that
    the fp32 sums of a column never leave its CTA."""
    return c.team if name in ("o", "fc") else 1


def make_plan(c: Config, layers: int, draft: DraftShape | None = None) -> np.ndarray:
    """plan[cta, phase] = (first tile, tiles, copies, bytes a copy), int32.

    Phases are 4 per layer and the head; behind them, the drafter's. Tiles of `down` belong to a
    team; CTA r of a team finishes tiles r, r + team, ... of them, and `o` and `fc` follow.
    Elsewhere tiles are consecutive, and a remainder goes to those with the shortest streams so far.
    """
    plan = assign(c, target_phases(c, layers))
    if draft is None:
        return plan
    own = assign(c, draft_phases(c, draft))
    if not draft.columns:
        own[:, -1] = plan[:, -1]
    return np.concatenate([plan, own], 1)


def assign(c: Config, phases: list[tuple[str, int]]) -> np.ndarray:
    """The plan of some phases, given as (matrix, tiles): see `make_plan`."""
    plan = np.zeros((c.ctas, len(phases), 4), np.int32)
    load = np.zeros(c.ctas)
    rank, team = np.arange(c.ctas) % c.team, np.arange(c.ctas) // c.team
    owned = c.team_tiles("down")
    owned_first = np.cumsum(owned) - owned
    for p, (name, tiles) in enumerate(phases):
        g = c.gemm(name)
        if g.owned:
            first, n = owned_first[team], owned[team]
            if g.split == 1:
                first, n = first + rank, (n - rank + c.team - 1) // c.team
        else:
            n = np.full(c.ctas, tiles // c.ctas)
            n[np.argsort(load, kind="stable")[: tiles % c.ctas]] += 1
            first = np.cumsum(n) - n
        plan[:, p, 0], plan[:, p, 1] = first, n
        plan[:, p, 2] = n * g.copies_per_unit
        plan[:, p, 3] = g.copy_bytes
        load += n * g.unit_bytes
    return plan


def step_bytes(c: Config, layers: int | None = None) -> int:
    """bf16 weight bytes that a step must read."""
    return _bytes(c, target_phases(c, c.shape.layers if layers is None else layers))


def draft_bytes(c: Config, draft: DraftShape) -> int:
    """bf16 weight bytes that the drafter reads a step, its head included."""
    return _bytes(c, draft_phases(c, draft))


def _bytes(c: Config, phases: list[tuple[str, int]]) -> int:
    return sum(tiles * TILE * c.gemm(name).k * 2 for name, tiles in phases)
