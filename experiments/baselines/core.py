"""The parts of a speculative step over static buffers; the rivals differ in who runs them.

    draft   the drafter's context and block, its best candidates
    plant   the tree, by tensor operations
    verify  the target over the tree's rows, and its choices
    accept  the walk, by tensor operations
    commit  keys and values of the accepted rows to their places, features, length

Greedy. The state is that of `megadecode`: `length` positions have target keys; the anchor is the
newest token and has none yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from experiments.baselines.attention import STRETCH, Attention, make_attention
from experiments.baselines.network import Draft, Target
from experiments.baselines.trees import DeviceTree, Planted
from megadecode.drafter.io import Drafter
from megadecode.models.weights import Weights

CHUNK = 1024
"""Prompt rows of one forward pass."""


@dataclass(frozen=True)
class Setup:
    """What all rivals of a comparison share. rows: N = tree nodes + 1; 1: no drafter.

    splits, scalar: of the verify attention in Triton, see split_kv.py. forced: accept exactly so
    many drafted tokens, where the tree is as deep: for times that do not depend on the text.
    """

    weights: Weights
    drafter: Drafter | None
    rows: int = 16
    ctx: int = 2048
    attention: str = "sdpa"
    fused: bool = False
    chain: bool = False
    splits: int = 0
    scalar: bool = False
    forced: int | None = None
    device: str = "cpu"
    dtype: torch.dtype | None = None


class Core:
    """Weights, caches and buffers of one sequence."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.device = device = torch.device(setup.device)
        dtype = setup.dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        c = setup.weights.config
        drafter = setup.drafter if setup.rows > 1 else None
        depth = drafter.config.drafted if drafter else 0
        nodes = min(setup.rows - 1, depth) if setup.chain else setup.rows - 1
        if nodes > 0 and drafter is None:
            raise ValueError(f"{setup.rows} rows need a drafter")
        self.rows, self.nodes = nodes + 1, nodes
        self.depth = min(depth, nodes)
        self.width = 1 if setup.chain else nodes
        self.most = self.depth + 1  # tokens that a step commits at most
        block = drafter.config.block_size if drafter else 0
        # Behind the context: a step's rows or the block's, and a place that nobody reads.
        room = setup.ctx + max(self.rows, block) + self.most + 1
        self.capacity = -(-room // STRETCH) * STRETCH
        self.trash = self.capacity - 1
        self.target = Target(setup.weights, device, dtype, self.capacity, setup.fused)
        self.draft_model = (
            Draft(drafter, self.target, self.capacity, setup.fused) if drafter else None
        )
        self.taps: Sequence[int] = drafter.config.taps if drafter else ()
        self.attend = make_attention(
            setup.attention, self.rows, c.heads, c.kv_heads, c.head_dim, device,
            splits=setup.splits, scalar=setup.scalar,
        )  # fmt: skip
        self.draft_attends: dict[int | None, Attention] = {}
        if drafter:
            self._draft_attention(drafter, device)
        self._buffers(dtype, c.hidden)

    def _draft_attention(self, drafter: Drafter, device: torch.device) -> None:
        d = drafter.config
        for layer in range(d.layers):
            if d.causal(layer):
                raise ValueError(f"drafter {d.name!r}: causal layers are not built here")
            window = d.window_of(layer)
            if window is not None and window >= self.capacity:
                window = None
            self.draft_attends.setdefault(
                window,
                make_attention(
                    self.setup.attention,
                    d.block_size,
                    d.heads,
                    d.kv_heads,
                    d.head_dim,
                    device,
                    window,
                ),
            )
        if len(self.draft_attends) > 1:
            raise ValueError(f"drafter {d.name!r}: layers of different windows are not built here")
        self.block_mask = torch.ones(d.block_size, d.block_size, dtype=torch.uint8, device=device)
        self.masks = torch.full((d.block_size - 1,), d.mask_token_id, device=device)

    def _buffers(self, dtype: torch.dtype, hidden: int) -> None:
        device, n = self.device, self.rows

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.length = zeros(1)
        # What is accepted: tokens committed, the new anchor, the path's rows.
        self.accepted = zeros(2 + self.most)
        self.count, self.anchor, self.path = self.accepted.split((1, 1, self.most))
        # The tree's rows as verified, one copy from the host: tokens, depths, mask.
        self.plan = zeros(16 * n + n * n, dtype=torch.uint8)
        numbers = self.plan[: 16 * n].view(torch.int64)
        self.tokens, self.depths = numbers[:n], numbers[n:]
        self.mask = self.plan[16 * n :].view(n, n)
        self.mask.copy_(torch.eye(n, device=device))
        self.parents, self.paths = zeros(n), zeros(n, self.most)
        self.planted = Planted(self.tokens, self.depths, self.mask, self.parents, self.paths)
        if self.nodes:
            self.tree = DeviceTree(
                self.depth, self.nodes, self.width, self.setup.chain, self.planted
            )
        # The best candidates, one copy to the host: log-probabilities, ids.
        k = self.depth * self.width
        self.ranked = zeros(12 * k, dtype=torch.uint8)
        self.ids = self.ranked[: 8 * k].view(torch.int64).view(self.depth, self.width)
        self.logprobs = self.ranked[8 * k :].view(torch.float32).view(self.depth, self.width)
        self.decided = zeros(n)
        self.out = zeros(1 + self.most)  # count, tokens
        self.features = zeros(n, len(self.taps) * hidden, dtype=dtype)
        self.fresh = zeros(self.most, len(self.taps) * hidden, dtype=dtype)
        self.steps_of_path = torch.arange(self.most, device=device)

    # -- a request
    def keys(self, length: int) -> int:
        """How many keys torch's attention reads with so long a context."""
        need = length + max(self.rows, len(self.masks) + 1 if self.draft_model else 0)
        return min(-(-need // STRETCH) * STRETCH, self.capacity)

    @torch.no_grad()
    def prefill(self, prompt: Sequence[int]) -> int:
        """Fill the caches with a prompt; the first token behind it, which is the anchor now."""
        if len(prompt) < 1 or len(prompt) > self.setup.ctx:
            raise ValueError(f"a prompt has 1 to {self.setup.ctx} tokens here, not {len(prompt)}")
        ids = torch.tensor(prompt, device=self.device)
        for start in range(0, len(prompt), CHUNK):
            part = ids[start : start + CHUNK]
            at = torch.arange(start, start + len(part), device=self.device)
            attend = _Causal(start, self.target.config.kv_heads)
            hidden, features = self.target.forward(part, at, at, attend, self.taps, prompt=True)
            if self.draft_model:
                self.draft_model.absorb(features, at, at, prompt=True)
        first = self.target.decide(hidden[-1:])
        self._begin(len(prompt))
        self.anchor.copy_(first)
        return int(first)

    def pretend(self, length: int, seed: int = 0) -> int:
        """A context of random keys and values, for times; the anchor."""
        generator = torch.Generator(self.device).manual_seed(seed)
        stacks = [self.target.stack] + ([self.draft_model.stack] if self.draft_model else [])
        for stack in stacks:
            for cache in (stack.keys, stack.values):
                for layer in cache:
                    layer.normal_(generator=generator)
        self._begin(length)
        self.anchor.fill_(7)
        return 7

    def _begin(self, length: int) -> None:
        self.length.fill_(length)
        self.count.zero_()
        self.path.copy_(self.steps_of_path)

    # -- a step
    @torch.no_grad()
    def draft(self, keys: int) -> None:
        """Reads features, count and anchor; fills `ids` and `logprobs`."""
        model = self.draft_model
        assert model is not None
        new = self.steps_of_path
        positions = self.length - self.count + new
        slots = torch.where(new < self.count, positions, self.trash)
        model.absorb(self.fresh, positions.clamp(0, self.trash), slots)
        attend = next(iter(self.draft_attends.values()))
        attend.begin(keys, self.length, self.block_mask, self.fresh)
        logits = model.block(self.anchor, self.masks, self.length, attend)[: self.depth].float()
        best = logits.topk(self.width)
        self.ids.copy_(model.ids[best.indices])
        self.logprobs.copy_(best.values - logits.logsumexp(-1, keepdim=True))

    def plant(self) -> None:
        """The tree of the candidates, into tokens, depths, mask, parents and paths."""
        self.tree(self.logprobs, self.ids, self.anchor)

    @torch.no_grad()
    def verify(self, keys: int) -> None:
        """The target over the tree's rows; fills `decided` and `features`."""
        if not self.draft_model:
            self.tokens.copy_(self.anchor)
        self.attend.begin(keys, self.length, self.mask, self.target.embed)
        slots = self.length + torch.arange(self.rows, device=self.device)
        hidden, features = self.target.forward(
            self.tokens, self.length + self.depths, slots, self.attend, self.taps
        )
        self.decided.copy_(self.target.decide(hidden))
        if self.taps:
            self.features.copy_(features)

    def accept(self) -> None:
        """The path that the target's choices follow: count, path, the new anchor and `out`."""
        match = self.tokens == self.decided[self.parents]
        match[:1] = True
        wrong = self.mask.bool() & ~match
        reached = torch.where(wrong.any(1), -1, self.depths)
        if self.setup.forced is not None:
            reached = torch.where(self.depths <= self.setup.forced, self.depths, -1)
        best = reached.argmax().view(1)
        a = self.depths[best]
        new = self.steps_of_path
        path = torch.where(new <= a, self.paths[best][0], new)
        after = self.tokens[path.roll(-1)] if self.most > 1 else self.decided[path]
        tokens = torch.where(new < a, after, self.decided[best])
        self.count.copy_(a + 1)
        self.path.copy_(path)
        self.anchor.copy_(self.decided[best])
        self.out[:1] = a + 1
        self.out[1:] = tokens

    def commit(self) -> None:
        """Accepted rows' keys and values to their places, features by path, the new length."""
        if self.draft_model:
            there = self.length + self.steps_of_path
            here = self.length + self.path
            stack = self.target.stack
            for cache in (stack.keys, stack.values):
                cache[:, :, there] = cache[:, :, here]
            self.fresh.copy_(self.features[self.path])
        self.length += self.count


class _Causal:
    """Attention of a prompt's chunk behind what is cached."""

    def __init__(self, past: int, kv_heads: int) -> None:
        self.past, self.kv_heads = past, kv_heads

    def __call__(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        rows, heads, _ = q.shape
        end, group = self.past + rows, heads // self.kv_heads
        k, v = (
            x[:, None, :end].expand(-1, group, -1, -1).flatten(0, 1)[None] for x in (keys, values)
        )
        mask = None
        if self.past:  # not a mask of numbers: the fast kernels know this one
            from torch.nn.attention.bias import causal_lower_right  # takes seconds to import

            mask = causal_lower_right(rows, end)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k, v, attn_mask=mask, is_causal=mask is None
        )
        return out[0].transpose(0, 1).reshape(rows, -1)
