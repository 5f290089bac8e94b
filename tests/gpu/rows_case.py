"""Trees for ROWS steps, and a drafter of random weights whose bits alone matter. Needs torch."""

import random

import torch

from cute_kernels.gpu import pack
from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.board import FEW_ROWS
from cute_kernels.gpu.buffers import draft_buffers, step_buffers
from cute_kernels.gpu.config import PAGE, Config, DraftShape
from cute_kernels.gpu.kv_layout import swizzle_rows
from cute_kernels.gpu.script import draft_phases, draft_step
from cute_kernels.gpu.tiles import make_plan
from cute_kernels.gpu.tree_rows import row_path
from host.wire import SAMPLING
from tests.gpu.model import Context, Model
from tests.gpu.rig import Rig

DEPTH, FEATURE_ROWS = 15, 256


# -- trees ---------------------------------------------------------------------------------------
def random_tree(rows: int, rng: random.Random) -> list[int]:
    """Parents: some trees are wide, some are as deep as they may be."""
    parents, depth, near = [-1], [0], rng.choice([1, 3, rows])
    for row in range(1, rows):
        parent = rng.randrange(max(0, row - near), row)
        while depth[parent] == DEPTH:
            parent = rng.randrange(row)
        parents.append(parent)
        depth.append(depth[parent] + 1)
    return parents


def cover(parents: list[int]) -> list[list[int]]:
    """Sets of up to 16 rows, ascending, each with the ancestors of its rows, that hold all rows."""
    left, out = set(range(len(parents))), []
    while left:
        found: set[int] = set()
        for row in sorted(left, reverse=True):
            more = found | set(row_path(parents, row))
            if len(more) <= FEW_ROWS:
                found = more
        out.append(sorted(found))
        left -= found
    return out


def subtree(parents: list[int], rows: list[int]) -> list[int]:
    """Parents of some rows of a tree among themselves."""
    place = {row: i for i, row in enumerate(rows)}
    return [place[parents[row]] if parents[row] >= 0 else -1 for row in rows]


# -- a drafter -----------------------------------------------------------------------------------
class Drafter:
    """Random bits that look like weights for every phase of a drafter, and its buffers."""

    def __init__(self, c: Config, target: dict, ctx: Context, seed: int) -> None:
        s = c.shape
        self.taps = (1, 0, s.layers - 1) if s.layers > 2 else (1, 0)
        self.c, self.shape, self.ctx = c, DraftShape(2, len(self.taps)), ctx
        gen = torch.Generator("cuda").manual_seed(seed)
        index, offsets = pack.draft_stream_index(c, self.shape)
        size = index.size * pack.granule(c) // 2
        bits = torch.randn(size, generator=gen, device="cuda") * s.hidden**-0.5
        self.stream, at = bits.bfloat16(), target["STREAM"].data_ptr()
        own = torch.from_numpy(offsets).cuda() + (self.stream.data_ptr() - at)
        offsets = torch.cat([target["OFFSETS"], own, target["OFFSETS"][:, -1:]], 1)
        norms = 1 + 0.2 * torch.randn(2, 2, s.head_dim, generator=gen, device="cuda")
        tap_of = torch.full((s.layers,), -1, dtype=torch.int32)
        tap_of[list(self.taps)] = torch.arange(len(self.taps), dtype=torch.int32)
        self.buffers = {
            name: torch.full((size,), 255, dtype=torch.uint8, device="cuda")
            for name, size in draft_buffers(c, self.shape).items()
        }
        self.pool = torch.full(
            (len(ctx.pages), 2, s.kv_heads, 2, PAGE, s.head_dim), float("nan"),
            dtype=torch.bfloat16, device="cuda",
        )  # fmt: skip
        self.held = self.buffers | dict(
            OFFSETS=offsets.contiguous(), PLAN=torch.from_numpy(make_plan(c, s.layers, self.shape)),
            DRAFT_QK_NORM=norms, DRAFT_ROPE=ctx.rope, DRAFT_NORM=target["FINAL_NORM"],
            DRAFT_MASK=torch.zeros(2, 2, dtype=torch.int32), TAP_OF=tap_of, DRAFT_KV=self.pool,
            DRAFT_LAYERS=2, DRAFT_TAPS=len(self.taps), DRAFT_COLUMNS=s.vocab,
        )  # fmt: skip
        self.held = {
            name: v.cuda() if isinstance(v, torch.Tensor) else v for name, v in self.held.items()
        }
        self.held.pop("ROW_TABLE", None)  # the rig's
        self.phases = draft_phases(s.layers, len(self.taps), 2)

    def features(self, rows: int) -> torch.Tensor:
        """bf16 bits [taps, rows, hidden] that the last step left."""
        each = self.buffers["FEATURES"].view(torch.int16).chunk(len(self.taps))
        return torch.stack([pack.from_fragments(x, 32)[:rows] for x in each])

    def give(self, rig: Rig, features: torch.Tensor, start: int) -> None:
        """The context of positions from `start` on in the decode form, 16 at a time."""
        full = torch.zeros(
            len(self.taps), FEATURE_ROWS, self.c.shape.hidden, dtype=torch.int16, device="cuda"
        )
        for at in range(0, features.shape[1], FEW_ROWS):
            some = features[:, at : at + FEW_ROWS]
            n = some.shape[1]
            full[:, :n] = some
            flat = torch.cat([pack.to_fragments(x, 32) for x in full])
            self.buffers["FEATURES"].copy_(flat.contiguous().view(torch.uint8))
            rig.run([draft_step([], start + at + n, self.phases, context=range(n))])


def make_rig(kernel, c: Config, model: Model, packed: dict, ctx: Context, **other):
    """(rig, drafter) of a target with a drafter; greedy decisions."""
    drafter = Drafter(c, packed, ctx, seed=3)
    record = torch.zeros(SAMPLING.itemsize, dtype=torch.uint8)
    record.numpy().view(SAMPLING)["top_p"] = 1.0
    alternatives = torch.zeros(step_buffers(c)["ALTERNATIVES"], dtype=torch.uint8, device="cuda")
    held = packed | drafter.held | dict(SAMPLING=record.cuda(), ALTERNATIVES=alternatives) | other
    assert all(name in Arg.__members__ for name in held)
    return Rig(kernel, c, held, ctx), drafter


# -- keys and values as they lie -----------------------------------------------------------------
def bits_at(pool: torch.Tensor, pages: torch.Tensor, position: int, n: int) -> torch.Tensor:
    """int16 [layers, heads, K or V, n, head_dim] of positions from `position` on."""
    plain = swizzle_rows(pool.view(torch.int16)[pages.long()])
    pages_n, layers, heads, two, page, dim = plain.shape
    rows = plain.permute(1, 2, 3, 0, 4, 5).reshape(layers, heads, two, pages_n * page, dim)
    return rows[..., position : position + n, :].clone()
