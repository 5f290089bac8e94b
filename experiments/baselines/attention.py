"""Attention of N rows behind a context in a static cache, as the rivals do it.

A row sees the context's keys (with a window: the last ones), then those of its own step that a mask
[rows, rows] shows it. Rows lie in the cache at positions length, length + 1, ...
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

STRETCH = 256
"""torch's attention reads a fixed number of keys: the context rounded up to this."""


class Sdpa:
    """torch's attention with an additive mask over all `keys` positions.

    Query heads that share a key head stand as rows before it, since the kernels that take a mask
    know no groups; repeating the cache would cost more than reading it.
    """

    def __init__(self, rows: int, heads: int, kv_heads: int, window: int | None = None) -> None:
        self.rows, self.heads, self.kv_heads, self.window = rows, heads, kv_heads, window
        self.bias: torch.Tensor | None = None
        self.keys = 0

    def begin(
        self, keys: int, length: torch.Tensor, tree: torch.Tensor, like: torch.Tensor
    ) -> None:
        """Make the mask of a step: once, for all layers."""
        self.keys = keys
        at = torch.arange(keys, device=like.device)
        own = at - length
        inside = own.clamp(0, self.rows - 1)
        shown = tree.bool()[:, inside] & (own < self.rows)
        seen = torch.where(own < 0, torch.ones_like(shown), shown)
        if self.window is not None:
            row = length + torch.arange(self.rows, device=like.device)
            seen = seen & ((row[:, None] - at).abs() < self.window)
        bias = torch.zeros(self.rows, keys, dtype=like.dtype, device=like.device)
        bias = bias.masked_fill(~seen, float("-inf"))
        self.bias = bias.repeat(self.heads // self.kv_heads, 1)[None, None]

    def __call__(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[rows, heads * head_dim] of q [rows, heads, head_dim], keys and values
        [kv heads, positions, head_dim]."""
        n, group = self.rows, self.heads // self.kv_heads
        stacked = q.view(n, self.kv_heads, group, -1).permute(1, 2, 0, 3).flatten(1, 2)
        out = F.scaled_dot_product_attention(
            stacked[None], keys[None, :, : self.keys], values[None, :, : self.keys],
            attn_mask=self.bias,
        )[0]  # fmt: skip
        return out.unflatten(1, (group, n)).permute(2, 0, 1, 3).reshape(n, -1)


class Triton:
    """split_kv.SplitKv behind the same two calls; `keys` is not needed."""

    def __init__(
        self, rows: int, heads: int, kv_heads: int, head_dim: int, device: torch.device,
        window: int | None = None, splits: int = 0, scalar: bool = False,
    ) -> None:  # fmt: skip
        from experiments.baselines.split_kv import SplitKv

        self._kernel = SplitKv(
            rows, heads, kv_heads, head_dim, device, splits=splits, window=window, scalar=scalar
        )
        self._length = self._tree = torch.zeros(0)

    def begin(
        self, keys: int, length: torch.Tensor, tree: torch.Tensor, like: torch.Tensor
    ) -> None:
        self._length, self._tree = length, tree

    def __call__(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return self._kernel(q, keys, values, self._tree, self._length)


Attention = Sdpa | Triton


def make_attention(
    kind: str, rows: int, heads: int, kv_heads: int, head_dim: int, device: torch.device,
    window: int | None = None, splits: int = 0, scalar: bool = False,
) -> Attention:  # fmt: skip
    """kind: `sdpa` or `triton`. ValueError for another."""
    if kind == "sdpa":
        return Sdpa(rows, heads, kv_heads, window)
    if kind == "triton":
        return Triton(rows, heads, kv_heads, head_dim, device, window, splits, scalar)
    raise ValueError(f"attention {kind!r} is not known; known: sdpa, triton")
