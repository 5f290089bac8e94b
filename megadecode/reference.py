"""The oracle: the target model as a plain torch forward, to be read in one sitting.

It knows nothing of rings, plans or kernels. Rows are token positions; which keys a row may see is a
boolean mask and nothing else, so that prompts, chains and trees are all the same call. Arithmetic
follows the usual PyTorch implementation: norms, rotary angles and softmax in fp32, the rest in
`dtype`. torch is imported here and nowhere else outside training.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray

from megadecode.config import ModelConfig
from megadecode.models.weights import tensor_shapes
from megadecode.rope import inverse_frequencies


class Cache:
    """Keys and values of the rows seen so far: [layer, kv head, row, head_dim]."""

    def __init__(self, config: ModelConfig, capacity_rows: int, dtype: torch.dtype) -> None:
        shape = (config.layers, config.kv_heads, capacity_rows, config.head_dim)
        self.keys, self.values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        self.rows = 0


class Reference:
    """`tensors` are (canonical name, fp32 array) pairs or a mapping; see `models.weights`."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, NDArray[np.float32]] | Iterable[tuple[str, NDArray[np.float32]]],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config, self.dtype = config, dtype
        self._layer_tensors = [
            name.removeprefix("layers.0.")
            for name in tensor_shapes(config)
            if name.startswith("layers.0.")
        ]
        pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
        self.weights: dict[str, torch.Tensor] = {}
        for name, values in pairs:
            if name == "head" and config.tied_embeddings:
                self.weights[name] = self.weights["embed"]
            else:
                self.weights[name] = torch.from_numpy(np.ascontiguousarray(values)).to(dtype)

    def cache(self, capacity_rows: int) -> Cache:
        """An empty cache, to be passed to `forward` again and again."""
        return Cache(self.config, capacity_rows, self.dtype)

    @torch.inference_mode()
    def forward(
        self,
        tokens: ArrayLike,
        positions: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        taps: Sequence[int] = (),
        *,
        cache: Cache | None = None,
        logits_rows: Sequence[int] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [rows, vocab] in fp32 and features [rows, taps, hidden] in `dtype`.

        tokens: [rows] ids. positions: [rows]; default: counted on from the cache.
        mask: [rows, keys] bool, True where a row sees a key; the keys are the cached rows, then
        these rows in order. Default: causal. Every row must see at least one key.
        taps: layers whose output is wanted; tap l is the residual stream after decoder layer l,
        counted from 0 (what Hugging Face calls hidden_states[l + 1], before any final norm).
        cache: takes up these rows, whatever the mask. logits_rows: only these rows' logits.
        """
        config, weights = self.config, self.weights
        ids = torch.as_tensor(np.asarray(tokens), dtype=torch.int64)
        rows = len(ids)
        cache = cache or self.cache(rows)
        past, keys = cache.rows, cache.rows + rows
        if positions is None:
            at = torch.arange(past, keys)
        else:
            at = torch.as_tensor(np.asarray(positions), dtype=torch.int64)
        if mask is None:
            seen = torch.ones(rows, keys, dtype=torch.bool).tril(past)
        else:
            seen = torch.as_tensor(np.asarray(mask), dtype=torch.bool)
        if at.shape != (rows,) or seen.shape != (rows, keys) or not seen.any(1).all():
            raise ValueError(
                f"{rows} rows on {past} cached ones need positions [{rows}] and a mask "
                f"[{rows}, {keys}] with no empty row, not {list(at.shape)} and {list(seen.shape)}"
            )
        for tap in taps:
            if not 0 <= tap < config.layers:
                raise ValueError(f"tap {tap} is not one of the layers 0 to {config.layers - 1}")
        cos, sin = self._angles(at)

        features: dict[int, torch.Tensor] = {}
        x = weights["embed"][ids]
        for layer in range(config.layers):
            w = {name: weights[f"layers.{layer}.{name}"] for name in self._layer_tensors}
            h = self._norm(x, w["attn_norm"])
            q = _heads(F.linear(h, w["q"], w.get("q_bias")), config.heads)
            k = _heads(F.linear(h, w["k"], w.get("k_bias")), config.kv_heads)
            v = _heads(F.linear(h, w["v"], w.get("v_bias")), config.kv_heads)
            if config.qk_norm:
                q, k = self._norm(q, w["q_norm"]), self._norm(k, w["k_norm"])
            q = _rotate(q, cos, sin)
            cache.keys[layer, :, past:keys] = _rotate(k, cos, sin)
            cache.values[layer, :, past:keys] = v
            k, v = cache.keys[layer, :, :keys], cache.values[layer, :, :keys]
            attended = _attend(q, k, v, seen)
            x = x + F.linear(attended.transpose(0, 1).reshape(rows, -1), w["o"])
            h = self._norm(x, w["ffn_norm"])
            x = x + F.linear(F.silu(F.linear(h, w["gate"])) * F.linear(h, w["up"]), w["down"])
            if layer in taps:
                features[layer] = x
        cache.rows = keys

        wanted = x if logits_rows is None else x[list(logits_rows)]
        logits = F.linear(self._norm(wanted, weights["final_norm"]), weights["head"]).float()
        if not taps:
            return logits, x.new_empty(rows, 0, config.hidden)
        return logits, torch.stack([features[tap] for tap in taps], dim=1)

    def greedy(
        self, ids: Sequence[int], max_new: int, stop_ids: Iterable[int] = ()
    ) -> tuple[list[int], list[float]]:
        """Plain greedy decoding: new tokens (a stop token included) and each step's gap.

        The gap is the distance in logits between the best and the second best token; of equal
        tokens the lowest id wins. Ends after `max_new` tokens or at the first of `stop_ids`.
        """
        stops = set(stop_ids)
        cache = self.cache(len(ids) + max_new)
        tokens: list[int] = []
        gaps: list[float] = []
        rows: Sequence[int] = ids
        while len(tokens) < max_new:
            logits, _ = self.forward(rows, cache=cache, logits_rows=[len(rows) - 1])
            best, second = logits[0].topk(2).values.tolist()
            tokens.append(int((logits[0] == best).nonzero()[0]))
            gaps.append(best - second)
            if tokens[-1] in stops:
                break
            rows = tokens[-1:]
        return tokens, gaps

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.config.rms_eps)
        return weight * h.to(self.dtype)

    def _angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [rows, head_dim / 2] of position times frequency, in fp32 like the usual."""
        c, scaling = self.config, self.config.rope_scaling
        inverse = inverse_frequencies(c.head_dim, c.rope_theta, scaling)
        angles = positions.float()[:, None] * torch.from_numpy(inverse).float()
        multiplier = 1.0 if scaling is None else scaling.multiplier
        cos, sin = angles.cos() * multiplier, angles.sin() * multiplier
        return cos.to(self.dtype), sin.to(self.dtype)


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[rows, heads * d] -> [heads, rows, d]."""
    return x.view(x.shape[0], heads, -1).transpose(0, 1)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half-split rotary embedding of [heads, rows, d]: element j turns with element j + d / 2."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(d)) v -> [heads, rows, d]; groups of query heads share a key head."""
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = (q @ k.transpose(1, 2)) * q.shape[-1] ** -0.5
    scores = scores.float().masked_fill(~seen, float("-inf"))
    return scores.softmax(-1).to(v.dtype) @ v
