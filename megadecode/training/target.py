"""The frozen target on any torch device, over batches of sequences: features, logits, a KV cache.

`megadecode.reference` is the oracle of the same arithmetic, one sequence at a time; here the
projections that read the same rows are one matrix, and attention is the library's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from megadecode.models.weights import Weights
from megadecode.rope import inverse_frequencies


class KvCache:
    """Keys and values of a batch: [layer, sequence, kv head, position, head_dim].

    `rows` positions are filled, the same number in every sequence. Setting it lower forgets the
    positions behind it.
    """

    def __init__(self, target: TorchTarget, sequences: int, capacity: int) -> None:
        c = target.config
        shape = (c.layers, sequences, c.kv_heads, capacity, c.head_dim)
        self.keys = torch.zeros(shape, dtype=target.dtype, device=target.device)
        self.values = torch.zeros_like(self.keys)
        self.rows = 0

    def part(self, first: int, last: int) -> KvCache:
        """The same memory seen as a cache of the sequences first..last - 1."""
        part = copy.copy(self)
        part.keys, part.values = self.keys[:, first:last], self.values[:, first:last]
        return part


class Layer:
    """One layer's matrices; projections of the same rows are joined."""

    def __init__(self, target: TorchTarget, number: int) -> None:
        def take(*names: str) -> torch.Tensor:
            return torch.cat([target.take(f"layers.{number}.{name}") for name in names])

        self.attn_norm, self.ffn_norm = take("attn_norm"), take("ffn_norm")
        self.qkv, self.o = take("q", "k", "v"), take("o")
        c = target.config
        self.qkv_bias = take("q_bias", "k_bias", "v_bias") if c.qkv_bias else None
        self.qk_norm = (take("q_norm"), take("k_norm")) if c.qk_norm else None
        self.gate_up, self.down = take("gate", "up"), take("down")


def heads_of(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: torch.Tensor,
    qkv: torch.Tensor,
    qkv_bias: torch.Tensor | None,
    qk_norm: tuple[torch.Tensor, torch.Tensor] | None,
    heads: int,
    kv_heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k (rotated) and v [rows, heads, head_dim] of x [rows, hidden].

    cos, sin: [rows, 1, head_dim / 2]; qk_norm: weights of each query and key head's norm. Rows of
    all sequences are one axis here, so that a compiled form serves every division of so many tokens
    into sequences.
    """
    joint = F.linear(F.rms_norm(x, norm.shape, norm, eps), qkv, qkv_bias)
    joint = joint.unflatten(-1, (heads + 2 * kv_heads, -1))
    straight = joint[:, : heads + kv_heads]
    if qk_norm is not None:
        pairs = zip((straight[:, :heads], straight[:, heads:]), qk_norm)
        straight = torch.cat([F.rms_norm(part, w.shape, w, eps) for part, w in pairs], 1)
    turned = rotate(straight, cos, sin)
    return turned[:, :heads], turned[:, heads:], joint[:, heads + kv_heads :]


def after_attention(
    x: torch.Tensor,
    attended: torch.Tensor,
    o: torch.Tensor,
    norm: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The residual stream [rows, hidden] behind the layer; attended: [rows, heads * head_dim]."""
    x = x + F.linear(attended, o)
    gate, up = F.linear(F.rms_norm(x, norm.shape, norm, eps), gate_up).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, down)


class TorchTarget:
    """A frozen model from megadecode's own weights.

    dtype: of weights and activations; default bfloat16 on a GPU, float32 elsewhere.
    fused: compile what stands between the matrix products; pays on a GPU, after some seconds.
    """

    def __init__(
        self,
        weights: Weights,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        fused: bool = False,
    ) -> None:
        self.weights, self.config, self.fused = weights, weights.config, fused
        self.device = torch.device(device)
        on_gpu = self.device.type == "cuda"
        self.dtype = dtype or (torch.bfloat16 if on_gpu else torch.float32)
        c = self.config
        self.embed = self.take("embed")
        self.head = self.embed if c.tied_embeddings else self.take("head")
        self.final_norm = self.take("final_norm")
        self.layers = [Layer(self, number) for number in range(c.layers)]
        self.tables = self._tables(c.context_tokens)
        self._heads_of = torch.compile(heads_of) if fused else heads_of
        self._after = torch.compile(after_attention) if fused else after_attention

    def take(self, name: str) -> torch.Tensor:
        """A tensor by canonical name, on the device, in `dtype`."""
        return torch.tensor(self.weights.tensor(name)).to(self.device, self.dtype)

    def cache(self, sequences: int, capacity: int) -> KvCache:
        """An empty cache of `capacity` positions for each of `sequences`."""
        return KvCache(self, sequences, capacity)

    @torch.no_grad()
    def forward(
        self,
        tokens: torch.Tensor,
        taps: Sequence[int] = (),
        *,
        cache: KvCache | None = None,
        positions: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [sequences, rows, hidden] behind the final norm, for `logits`, and features
        [sequences, rows, taps, hidden].

        tokens: [sequences, rows] ids. taps: layers, counted from 0; tap l is the residual stream
        after decoder layer l. cache: holds the positions before these rows and takes them up.
        positions: [rows] or [sequences, rows]; default: counted on from the cache.
        mask: [sequences or 1, rows, cached + rows] bool, True where a row sees a key; the keys are
        the cached rows, then these in order. Default: causal.
        """
        sequences, rows = tokens.shape
        past = cache.rows if cache is not None else 0
        if cache is not None and past + rows > cache.keys.shape[3]:
            raise ValueError(
                f"{rows} rows behind {past} do not fit a cache of {cache.keys.shape[3]} positions"
            )
        if positions is None:
            positions = torch.arange(past, past + rows, device=self.device)
        cos, sin = self.angles(positions.view(-1, rows).expand(sequences, -1), past + rows)
        causal = mask is None and past == 0
        if mask is None and past and rows > 1:
            ones = torch.ones(rows, past + rows, dtype=torch.bool, device=self.device)
            mask = ones.tril(past)[None]
        seen = None if mask is None else mask[:, None]
        found: dict[int, torch.Tensor] = {}
        x = F.embedding(tokens.flatten(), self.embed)
        for number, layer in enumerate(self.layers):
            q, k, v = (
                part.unflatten(0, (sequences, rows)).transpose(1, 2)
                for part in self.heads_of(layer, x, cos, sin)
            )
            if cache is not None:
                cache.keys[number, :, :, past : past + rows] = k
                cache.values[number, :, :, past : past + rows] = v
                k = cache.keys[number, :, :, : past + rows]
                v = cache.values[number, :, :, : past + rows]
            attended = attend(q, k, v, seen, causal and rows > 1)
            x = self.after_attention(layer, x, attended.transpose(1, 2).reshape(len(x), -1))
            if number in taps:
                found[number] = x
        if cache is not None:
            cache.rows = past + rows
        hidden = F.rms_norm(x, (self.config.hidden,), self.final_norm, self.config.rms_eps)
        hidden = hidden.unflatten(0, (sequences, rows))
        if not taps:
            return hidden, x.new_empty(sequences, rows, 0, self.config.hidden)
        features = torch.stack([found[tap] for tap in taps], dim=1)
        return hidden, features.unflatten(0, (sequences, rows))

    def heads_of(
        self, layer: Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        c = self.config
        made: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = self._heads_of(
            x, cos, sin, layer.attn_norm, layer.qkv, layer.qkv_bias, layer.qk_norm, c.heads,
            c.kv_heads, c.rms_eps,
        )  # fmt: skip
        return made

    def after_attention(
        self, layer: Layer, x: torch.Tensor, attended: torch.Tensor
    ) -> torch.Tensor:
        made: torch.Tensor = self._after(
            x, attended, layer.o, layer.ffn_norm, layer.gate_up, layer.down, self.config.rms_eps
        )
        return made

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., vocab] in `dtype`, of hidden states [..., hidden]."""
        return F.linear(hidden, self.head)

    def angles(self, positions: torch.Tensor, bound: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [all rows, 1, head_dim / 2] of positions of any shape, which lie below
        `bound` (known on the host, so that nothing waits for the device)."""
        if len(self.tables[0]) < bound:
            self.tables = self._tables(bound)
        flat = positions.reshape(-1)
        cos, sin = self.tables
        return cos[flat][:, None], sin[flat][:, None]

    def _tables(self, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        c, scaling = self.config, self.config.rope_scaling
        inverse = inverse_frequencies(c.head_dim, c.rope_theta, scaling)
        angle = torch.arange(positions).float()[:, None] * torch.from_numpy(inverse).float()
        multiplier = 1.0 if scaling is None else scaling.multiplier
        cos, sin = angle.cos() * multiplier, angle.sin() * multiplier
        return cos.to(self.device, self.dtype), sin.to(self.device, self.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half-split rotary embedding: element j of a head turns with element j + head_dim / 2."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor | None,
    causal: bool,
) -> torch.Tensor:
    """softmax(q k^T / sqrt(head_dim)) v; q [sequences, heads, rows, head_dim], k and v with fewer
    heads. seen: bool, [sequences or 1, 1, rows, keys].

    Heads are repeated by hand where there is a mask: the kernels that take one know no groups, and
    what torch falls back to would store all scores.
    """
    group = q.shape[1] // k.shape[1]
    if seen is not None and group > 1:
        k, v = (x[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for x in (k, v))
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, is_causal=causal, enable_gqa=seen is None and group > 1
    )
