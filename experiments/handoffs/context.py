"""A synthetic context for attention: committed keys and values, and a tree of rows on top."""

import random

import numpy as np
import torch

from cute_kernels.gpu import pack
from cute_kernels.gpu.config import PAGE, Shape

THETA = 500000.0


def random_tree(rows: int, seed: int) -> list[int]:
    """Parents of a random tree whose first four rows are a chain; depth stays under 16."""
    rng = random.Random(seed)
    return [-1, 0, 1, 2][:rows] + [rng.randrange(i) for i in range(4, rows)]


class Context:
    """keys, values: [layers, kv heads, committed, 64] bf16 (keys rotated, plain order).

    `pool` holds them in pages in a random order, with NaN in every position nobody may read.
    """

    def __init__(
        self,
        shape: Shape,
        parents: list[int],
        keys: torch.Tensor,
        values: torch.Tensor,
        seed: int,
    ) -> None:
        committed = keys.shape[2]
        self.shape, self.committed, self.parents = shape, committed, parents
        self.keys, self.values = keys, values
        gen = torch.Generator("cuda").manual_seed(seed)
        blocks = max(-(-committed // PAGE), 1)
        self.pages = torch.randperm(blocks, generator=gen, device="cuda").int()
        shape_ = (blocks, shape.layers, shape.kv_heads, 2, PAGE, 64)
        self.pool = torch.full(shape_, float("nan"), dtype=torch.bfloat16, device="cuda")
        order = torch.from_numpy(pack.key_order()).cuda()
        for layer in range(shape.layers):
            for i, x in enumerate((self.keys[layer][..., order], self.values[layer])):
                padded = torch.full(
                    (shape.kv_heads, blocks * PAGE, 64), float("nan"),
                    dtype=torch.bfloat16, device="cuda",
                )  # fmt: skip
                padded[:, :committed] = x
                rows = pack.swizzle_rows(padded.reshape(shape.kv_heads, blocks, PAGE, 64))
                self.pool[self.pages.long(), layer, :, i] = rows.transpose(0, 1)
        self.table = pack.row_table(parents, committed)
        self.positions = self.table[:, 0].astype(np.int64)
        angle = self.positions[:, None] * THETA ** (-np.arange(32) / 32)
        self.rope = torch.tensor(
            np.stack([np.cos(angle), np.sin(angle)], -1), dtype=torch.float32, device="cuda"
        )
        self.rows = torch.from_numpy(self.table).cuda()

    @classmethod
    def random(cls, shape: Shape, committed: int, parents: list[int], seed: int) -> "Context":
        gen = torch.Generator("cuda").manual_seed(seed)
        size = (shape.layers, shape.kv_heads, committed, 64)
        keys, values = (
            torch.randn(size, generator=gen, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        )
        return cls(shape, parents, keys, values, seed)

    def scalars(self) -> list[int]:
        """committed, first tail block, blocks below the largest c(p)."""
        starts = self.table[: len(self.parents), 1]
        return [self.committed, int(starts.min()) // PAGE, int(starts.max()) // PAGE]

    def permuted(self, order: list[int]) -> "Context":
        """The same rows in another order (order[i]: the old row at place i); same pool.

        Paths are remapped as they are: a permuted tree needs no parent order."""
        other = object.__new__(Context)
        other.__dict__.update(self.__dict__)
        place = {old: new for new, old in enumerate(order)}
        table = self.table[order].copy().view(np.uint32)
        for row in table:
            depth = int(row[0]) - self.committed
            old = [int(row[2 + d // 8]) >> (d % 8 * 4) & 15 for d in range(depth + 1)]
            row[2:] = 0
            for d, r in enumerate(old):
                row[2 + d // 8] |= np.uint32(place[r] << (d % 8 * 4))
        other.table = table.view(np.int32)
        other.rows = torch.from_numpy(other.table).cuda()
        other.rope = self.rope[order].contiguous()
        return other

    def mask(self) -> torch.Tensor:
        """[rows, rows] bool: row i sees row j of the step."""
        n = len(self.parents)
        seen = torch.zeros(n, n, dtype=torch.bool, device="cuda")
        for i, parent in enumerate(self.parents):
            if parent >= 0:
                seen[i] = seen[parent]
            seen[i, i] = True
        return seen


def attend(context: Context, layer: int, qkv: torch.Tensor) -> torch.Tensor:
    """Reference attention in fp32. qkv: [rows, qkv] in plain column order, before rotation.

    Returns [rows, heads * 64], rounded to bf16 where the kernel stores bf16."""
    s, n = context.shape, qkv.shape[0]

    def stored(v: torch.Tensor) -> torch.Tensor:
        return v.bfloat16().float()

    q, key, value = qkv.split([s.heads * 64, s.kv_heads * 64, s.kv_heads * 64], 1)
    cos, sin = context.rope[:n, None, :, 0], context.rope[:n, None, :, 1]

    def rotate(v: torch.Tensor) -> torch.Tensor:
        a, b = v.reshape(n, -1, 64).chunk(2, -1)
        return stored(torch.cat([a * cos - b * sin, b * cos + a * sin], -1))

    q, key, value = rotate(q), rotate(key), stored(value.reshape(n, -1, 64))
    out = torch.empty(n, s.heads, 64, device="cuda")
    group = s.heads // s.kv_heads
    for h in range(s.kv_heads):
        keys = torch.cat([context.keys[layer, h].float(), key[:, h]])
        values = torch.cat([context.values[layer, h].float(), value[:, h]])
        heads = slice(h * group, (h + 1) * group)
        scores = torch.einsum("nhd,kd->nhk", q[:, heads], keys) / 8
        scores[:, :, context.committed :].masked_fill_(~context.mask()[:, None], float("-inf"))
        out[:, heads] = torch.einsum("nhk,kd->nhd", scores.softmax(-1), values)
    return stored(out.reshape(n, -1))
