"""Target and drafter over static buffers: what the rivals' graphs are captured from.

Weights are megadecode's own, bf16 on a GPU; projections of the same rows are one matrix. With
`fused`, everything between two attentions is one compiled function: the matrix products stay the
library's, what stands between them becomes a few kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from megadecode.drafter.io import Drafter
from megadecode.models.weights import Weights
from megadecode.training.target import TorchTarget, after_attention, heads_of, rotate

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _enter(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor,
    keys: torch.Tensor, values: torch.Tensor, *parts: Any,
) -> torch.Tensor:  # fmt: skip
    """q [rows, heads, head_dim] of x [rows, hidden]; keys and values go to their slots."""
    q, k, v = heads_of(x, cos, sin, *parts)
    keys[:, slots] = k.transpose(0, 1)
    values[:, slots] = v.transpose(0, 1)
    return q


def _between(
    x: torch.Tensor, attended: torch.Tensor, behind: Sequence[Any], cos: torch.Tensor,
    sin: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
    ahead: Sequence[Any],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """From one layer's attention to the next's: the residual stream behind the layer, and q."""
    x = after_attention(x, attended, *behind)
    return x, _enter(x, cos, sin, slots, keys, values, *ahead)


def _leave(
    x: torch.Tensor, attended: torch.Tensor, behind: Sequence[Any], norm: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual stream behind the last layer, and its norm."""
    x = after_attention(x, attended, *behind)
    return x, F.rms_norm(x, norm.shape, norm, eps)


def _context(
    features: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, fc: torch.Tensor,
    norm: torch.Tensor, kv: torch.Tensor, k_norms: torch.Tensor, shape: tuple[int, int, int, int],
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """A drafter's keys and values [layers, kv heads, rows, head_dim] from features."""
    context = F.rms_norm(F.linear(features, fc), norm.shape, norm, eps)
    joint = F.linear(context, kv).view(len(features), *shape)
    k = F.rms_norm(joint[:, :, 0], shape[-1:], None, eps) * k_norms
    k = rotate(k, cos[:, None, None], sin[:, None, None])
    return k.permute(1, 2, 0, 3), joint[:, :, 1].permute(1, 2, 0, 3)


def compiled(work: Callable[..., Any]) -> Callable[..., Any]:
    """Fused for exactly the shapes it is called with, however many those are."""
    import torch._dynamo.config as limits

    limits.recompile_limit = 64
    made: Callable[..., Any] = torch.compile(work, dynamic=False)
    return made


class Stack:
    """Decoder layers with their cache [layers, kv heads, positions, head_dim].

    layers: per layer (in front of attention: the arguments of `heads_of` behind sin; behind it:
    those of `after_attention` behind `attended`).
    """

    def __init__(
        self, layers: Sequence[tuple[tuple, tuple]], norm: torch.Tensor, eps: float,
        tables: tuple[torch.Tensor, torch.Tensor], cache: tuple[int, int, int], fused: bool,
    ) -> None:  # fmt: skip
        self.layers, self.norm, self.eps = layers, norm, eps
        self.cos, self.sin = tables
        self.keys = torch.zeros(len(layers), *cache, dtype=norm.dtype, device=norm.device)
        self.values = torch.zeros_like(self.keys)
        self._parts = _enter, _between, _leave
        self._fused = tuple(map(compiled, self._parts)) if fused else self._parts

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, attend: Attend,
        taps: Sequence[int] = (), prompt: bool = False,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:  # fmt: skip
        """Normed hidden states [rows, hidden], and the residual stream behind the taps. prompt:
        any number of rows, so nothing is compiled for it."""
        enter, between, leave = self._parts if prompt else self._fused
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        found: dict[int, torch.Tensor] = {}
        caches = list(zip(self.keys, self.values))
        q = enter(x, cos, sin, slots, *caches[0], *self.layers[0][0])
        for i, (_, behind) in enumerate(self.layers):
            attended = attend(q, *caches[i])
            if i + 1 < len(self.layers):
                ahead = self.layers[i + 1][0]
                x, q = between(x, attended, behind, cos, sin, slots, *caches[i + 1], ahead)
            else:
                x, hidden = leave(x, attended, behind, self.norm, self.eps)
            if i in taps:
                found[i] = x
        return hidden, [found[tap] for tap in taps]


class Target:
    """The target with a cache of `capacity` positions."""

    def __init__(
        self, weights: Weights, device: torch.device, dtype: torch.dtype, capacity: int,
        fused: bool,
    ) -> None:  # fmt: skip
        made = TorchTarget(weights, device, dtype)
        c = self.config = made.config
        self.embed, self.head = made.embed, made.head
        made.angles(torch.zeros(1, dtype=torch.int64, device=device), capacity)
        layers = [
            (
                (w.attn_norm, w.qkv, w.qkv_bias, w.qk_norm, c.heads, c.kv_heads, c.rms_eps),
                (w.o, w.ffn_norm, w.gate_up, w.down, c.rms_eps),
            )
            for w in made.layers
        ]
        self.stack = Stack(
            layers, made.final_norm, c.rms_eps, made.tables,
            (c.kv_heads, capacity, c.head_dim), fused,
        )  # fmt: skip

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, attend: Attend,
        taps: Sequence[int], prompt: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Hidden states [rows, hidden] for `head`, and features [rows, taps * hidden]."""
        x = F.embedding(tokens, self.embed)
        hidden, found = self.stack.forward(x, positions, slots, attend, taps, prompt)
        return hidden, torch.cat(found, 1) if taps else x[:, :0]

    def decide(self, hidden: torch.Tensor) -> torch.Tensor:
        """The likeliest token of each row, the first of equals."""
        return F.linear(hidden, self.head).argmax(-1)


class Draft:
    """The drafter: keys and values of the context come from features, all layers in one product."""

    def __init__(self, drafter: Drafter, target: Target, capacity: int, fused: bool) -> None:
        c = self.config = drafter.config
        dtype, device = target.embed.dtype, target.embed.device
        self.embed = target.embed

        def take(*names: str) -> torch.Tensor:
            parts = [torch.as_tensor(drafter.get(name)) for name in names]
            return torch.cat(parts).to(device, dtype)

        self.fc, self.context_norm = take("fc"), take("context_norm")
        ids = torch.tensor(c.draft_tokens or range(c.vocab), device=device)
        self.ids = ids
        self.head = target.head[ids].contiguous() if c.draft_tokens else target.head
        numbers = range(c.layers)
        self.context_kv = take(*(f"layers.{i}.{part}" for i in numbers for part in ("k", "v")))
        self.k_norms = torch.stack([take(f"layers.{i}.k_norm") for i in numbers])[:, None]
        layers = []
        for i in numbers:
            at = f"layers.{i}."
            qkv = take(*(at + part for part in ("q", "k", "v")))
            norms = take(at + "q_norm"), take(at + "k_norm")
            layers.append(
                (
                    (take(at + "attn_norm"), qkv, None, norms, c.heads, c.kv_heads, c.rms_eps),
                    (take(at + "o"), take(at + "ffn_norm"), take(at + "gate", at + "up"),
                     take(at + "down"), c.rms_eps),
                )
            )  # fmt: skip
        table = torch.from_numpy(c.rotations(capacity)).to(device, dtype)
        self.stack = Stack(
            layers, take("final_norm"), c.rms_eps, (table[:, 0], table[:, 1]),
            (c.kv_heads, capacity, c.head_dim), fused,
        )  # fmt: skip
        self._fused = compiled(_context) if fused else _context

    def absorb(
        self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor,
        prompt: bool = False,
    ) -> None:  # fmt: skip
        """Keys and values of context positions from features [rows, taps * hidden], all layers."""
        c, stack = self.config, self.stack
        make = _context if prompt else self._fused
        k, v = make(
            features, stack.cos[positions], stack.sin[positions], self.fc, self.context_norm,
            self.context_kv, self.k_norms, (c.layers, 2, c.kv_heads, c.head_dim), c.rms_eps,
        )  # fmt: skip
        stack.keys[:, :, slots] = k
        stack.values[:, :, slots] = v

    def block(
        self, anchor: torch.Tensor, masks: torch.Tensor, length: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Logits [drafted, drafted tokens] of a block behind `length` [1] positions.

        anchor [1]: the newest token; masks [block - 1]: MASK ids.
        """
        c = self.config
        at = length + torch.arange(c.block_size, device=length.device)
        x = F.embedding(torch.cat((anchor, masks)), self.embed) * c.input_embedding_scale
        hidden, _ = self.stack.forward(x, at, at, attend)
        logits = F.linear(hidden[c.first_row :], self.head) * c.output_multiplier
        if (cap := c.final_logit_softcapping) is not None:
            logits = cap * torch.tanh(logits / cap)
        return logits
