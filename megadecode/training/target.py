"""The frozen target on any torch device, over batches of sequences: features, logits, a KV cache.

`megadecode.reference` is the oracle of the same arithmetic, one sequence at a time; here the
projections that read the same rows are one matrix, and attention is the library's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from megadecode.models.weights import Weights


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


class Layer:
    """One layer's matrices and the two halves of its arithmetic around attention."""

    def __init__(self, target: TorchTarget, number: int) -> None:
        c = target.config
        self.eps, self.hidden = c.rms_eps, c.hidden
        self.shape = (c.heads, c.kv_heads, c.head_dim)

        def take(*names: str) -> torch.Tensor:
            return torch.cat([target.take(f"layers.{number}.{name}") for name in names])

        self.attn_norm, self.ffn_norm = take("attn_norm"), take("ffn_norm")
        self.qkv, self.o = take("q", "k", "v"), take("o")
        self.gate_up, self.down = take("gate", "up"), take("down")

    def heads_of(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k (rotated) and v [sequences, heads, rows, head_dim] of x [sequences, rows, hidden].

        cos, sin: [sequences or 1, 1, rows, head_dim / 2].
        """
        heads, kv_heads, d = self.shape
        joint = F.linear(F.rms_norm(x, (self.hidden,), self.attn_norm, self.eps), self.qkv)
        joint = joint.unflatten(-1, (heads + 2 * kv_heads, d)).transpose(1, 2)
        turned = rotate(joint[:, : heads + kv_heads], cos, sin)
        return turned[:, :heads], turned[:, heads:], joint[:, heads + kv_heads :]

    def after_attention(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The residual stream behind the layer; attended: [sequences, heads, rows, head_dim]."""
        x = x + F.linear(attended.transpose(1, 2).flatten(2), self.o)
        h = F.rms_norm(x, (self.hidden,), self.ffn_norm, self.eps)
        gate, up = F.linear(h, self.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)


class TorchTarget:
    """A frozen model from megadecode's own weights.

    dtype: of weights and activations; default bfloat16 on a GPU, float32 elsewhere.
    """

    def __init__(
        self,
        weights: Weights,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        self.weights, self.config, self.device = weights, weights.config, torch.device(device)
        on_gpu = self.device.type == "cuda"
        self.dtype = dtype or (torch.bfloat16 if on_gpu else torch.float32)
        c = self.config
        self.embed = self.take("embed")
        self.head = self.embed if c.tied_embeddings else self.take("head")
        self.final_norm = self.take("final_norm")
        self.layers = [Layer(self, number) for number in range(c.layers)]
        self._cos = self._sin = torch.empty(0)

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
        cos, sin = self.angles(positions.view(-1, rows), past + rows)
        causal = mask is None and past == 0
        if mask is None and past and rows > 1:
            ones = torch.ones(rows, past + rows, dtype=torch.bool, device=self.device)
            mask = ones.tril(past)[None]
        seen = None if mask is None else mask[:, None]
        found: dict[int, torch.Tensor] = {}
        x = F.embedding(tokens, self.embed)
        for number, layer in enumerate(self.layers):
            q, k, v = layer.heads_of(x, cos, sin)
            if cache is not None:
                cache.keys[number, :, :, past : past + rows] = k
                cache.values[number, :, :, past : past + rows] = v
                k = cache.keys[number, :, :, : past + rows]
                v = cache.values[number, :, :, : past + rows]
            x = layer.after_attention(x, attend(q, k, v, seen, causal and rows > 1))
            if number in taps:
                found[number] = x
        if cache is not None:
            cache.rows = past + rows
        hidden = F.rms_norm(x, (self.config.hidden,), self.final_norm, self.config.rms_eps)
        if not taps:
            return hidden, x.new_empty(sequences, rows, 0, self.config.hidden)
        return hidden, torch.stack([found[tap] for tap in taps], dim=2)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., vocab] in `dtype`, of hidden states [..., hidden]."""
        return F.linear(hidden, self.head)

    def angles(self, positions: torch.Tensor, bound: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [sequences, 1, rows, head_dim / 2] of positions [sequences, rows], for
        positions below `bound` (known on the host, so that nothing waits for the device)."""
        if len(self._cos) < bound:
            d = self.config.head_dim
            inverse = 1.0 / self.config.rope_theta ** (torch.arange(0, d, 2).float() / d)
            at = torch.arange(1 << (bound - 1).bit_length()).float()
            angle = (at[:, None] * inverse).to(self.device)
            self._cos, self._sin = angle.cos().to(self.dtype), angle.sin().to(self.dtype)
        return self._cos[positions][:, None], self._sin[positions][:, None]


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
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, is_causal=causal, enable_gqa=seen is None and group > 1
    )
