"""The drafter as a torch module: the oracle of the device code, and what is trained.

Parameters carry the names of published checkpoints. The target's embedding and output matrices are
not parameters: they are shared and frozen. One call may hold many blocks over one sequence, as in
training; a block sees features of positions before its anchor, and its own rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from megadecode.drafter.config import DrafterConfig


class DrafterModule(nn.Module):
    """`embed` and `head` are the target's matrices, [vocab, hidden]."""

    def __init__(self, config: DrafterConfig, embed: torch.Tensor, head: torch.Tensor) -> None:
        super().__init__()
        for name, matrix in (("embed", embed), ("head", head)):
            if matrix.shape != (config.vocab, config.hidden):
                raise ValueError(
                    f"{name} has shape {list(matrix.shape)}; drafter {config.name!r} needs "
                    f"{[config.vocab, config.hidden]}"
                )
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden, config.rms_eps)
        self.layers = nn.ModuleList(_Layer(config, layer) for layer in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, config.rms_eps)
        # Not in the state dict: checkpoints hold no embedding of their own.
        self.register_buffer("embed", embed.detach(), persistent=False)
        self.register_buffer("head", head.detach(), persistent=False)
        self._table: torch.Tensor | None = None

    def load(self, tensors: Mapping[str, object]) -> DrafterModule:
        """Take the values of all tensors, by published name; the module itself."""
        self.load_state_dict({n: torch.as_tensor(t) for n, t in tensors.items()}, strict=True)
        return self

    def forward(
        self, features: torch.Tensor, tokens: torch.Tensor, anchors: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states [blocks, block rows, hidden], after the final norm.

        features: [positions, taps, hidden], the target's, of positions 0, 1, ...
        tokens: [blocks, block rows] ids; row 0 is the anchor's token, the others are MASK.
        anchors: [blocks], the position of each block's row 0; at most `positions`.
        All four may have one more axis in front: several sequences at once.
        """
        if features.dim() == 3:
            made: torch.Tensor = self(features[None], tokens[None], anchors[None])
            return made[0]
        blocks, rows = tokens.shape[1:]
        context = self.hidden_norm(self.fc(features.flatten(2)))
        x = F.embedding(tokens, self.embed).flatten(1, 2) * self.config.input_embedding_scale
        at = (anchors[..., None] + torch.arange(rows, device=tokens.device)).flatten(1)
        block = torch.arange(blocks * rows, device=tokens.device) // rows
        before = torch.arange(context.shape[1], device=tokens.device)
        # No anchor lies behind the context, so the table's length is known without the device.
        table = self._turn(context.shape[1] + rows, x)
        turn, context_turn = table[at], table[None, before]
        masks: dict[tuple[int | None, bool], torch.Tensor] = {}
        for layer in self.layers:
            kind = self.config.window_of(layer.number), self.config.causal(layer.number)
            if kind not in masks:
                masks[kind] = self.visible(layer.number, at, block, anchors, before)
            x = layer(x, context, turn, context_turn, masks[kind])
        return self.norm(x).unflatten(1, (blocks, rows))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., vocab] of hidden states [..., hidden]; -inf for tokens that are never drafted."""
        logits = F.linear(hidden, self.head) * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        if not self.config.draft_tokens:
            return logits
        drafted = torch.tensor(self.config.draft_tokens, device=logits.device)
        never = torch.ones(self.config.vocab, dtype=torch.bool, device=logits.device)
        return logits.masked_fill(never.index_fill(0, drafted, False), -torch.inf)

    def draft(self, features: torch.Tensor, anchor: int, n: int) -> torch.Tensor:
        """Logits [drafted, vocab]: row i is the drafted marginal of position n + 1 + i.

        features: [n, taps, hidden] of all committed positions; anchor: the newest token, which
        stands at position n and has no features yet.
        """
        if len(features) != n or n < 1:
            raise ValueError(
                f"drafting at position {n} needs features of {n} positions, 1 at least"
            )
        tokens = torch.full((1, self.config.block_size), self.config.mask_token_id)
        tokens[0, 0] = anchor
        hidden = self(features, tokens.to(features.device), torch.tensor([n]).to(features.device))
        return self.logits(hidden[0, self.config.first_row :])

    def visible(
        self,
        layer: int,
        at: torch.Tensor,
        block: torch.Tensor,
        anchors: torch.Tensor,
        before: torch.Tensor,
    ) -> torch.Tensor:
        """[..., rows, context + rows] bool: which keys each row sees in a layer.

        at: [..., rows] positions; block: [rows] the block of a row; before: [context] positions.
        """
        own = (block[None, :] == block[:, None]).expand(*at.shape, len(block))
        seen = torch.cat([before < anchors[..., block, None], own], -1)
        window, causal = self.config.window_of(layer), self.config.causal(layer)
        if window is not None and window >= len(before) + self.config.block_size:
            window = None  # it covers every distance there is
        if window is None and not causal:
            return seen
        keys = torch.cat([before.expand(*at.shape[:-1], -1), at], -1)
        distance = at[..., :, None] - keys[..., None, :]
        if causal:
            seen &= distance >= 0
        if window is not None:
            seen &= distance.abs() < window
        return seen

    def reserve(self, positions: int) -> None:
        """Make the rotary table that long at once. It is not replaced by a longer one then, which
        a captured graph could not follow."""
        self._turn(positions, self.fc.weight)

    def _turn(self, positions: int, like: torch.Tensor) -> torch.Tensor:
        """[positions at least, 2, head_dim / 2] cosines and sines, in fp32 at least."""
        kind = torch.promote_types(like.dtype, torch.float32)
        table = self._table
        if table is None or len(table) < positions or table.dtype != kind:
            size = 1 << (positions - 1).bit_length()
            table = torch.from_numpy(self.config.rotations(size)).to(like.device, kind)
        self._table = table.to(like.device)
        return self._table


class _Layer(nn.Module):
    def __init__(self, config: DrafterConfig, number: int) -> None:
        super().__init__()
        self.number = number
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(config)
        self.input_layernorm = nn.RMSNorm(config.hidden, config.rms_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden, config.rms_eps)

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor,
        turn: torch.Tensor,
        context_turn: torch.Tensor,
        seen: torch.Tensor,
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, turn, context_turn, seen)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Attention(nn.Module):
    """Keys and values of context and block rows come from the same projections."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim, self.scale = config.head_dim, config.attention_scale
        q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden, q_rows, bias=False)
        self.k_proj = nn.Linear(config.hidden, kv_rows, bias=False)
        self.v_proj = nn.Linear(config.hidden, kv_rows, bias=False)
        self.o_proj = nn.Linear(q_rows, config.hidden, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, config.rms_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, config.rms_eps)

    def forward(
        self,
        rows: torch.Tensor,
        context: torch.Tensor,
        turn: torch.Tensor,
        context_turn: torch.Tensor,
        seen: torch.Tensor,
    ) -> torch.Tensor:
        q = _rotate(self.q_norm(self._heads(self.q_proj(rows))), turn)
        source = torch.cat([context, rows], 1)
        k = self.k_norm(self._heads(self.k_proj(source)))
        k = _rotate(k, torch.cat([context_turn.expand(len(k), -1, -1, -1), turn], 1))
        v = self._heads(self.v_proj(source))
        # Repeated by hand: torch's fast kernels know no groups of heads where there is a mask.
        group = q.shape[1] // k.shape[1]
        k, v = (x[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for x in (k, v))
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen[:, None], scale=self.scale
        )
        merged: torch.Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return merged

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """[sequences, rows, heads * d] -> [sequences, heads, rows, d]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class _Mlp(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def _rotate(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Half-split rotary embedding of [sequences, heads, rows, d] by [sequences, rows, 2, d / 2]."""
    a, b = x.chunk(2, -1)
    cos, sin = turn[:, None].unbind(3)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
