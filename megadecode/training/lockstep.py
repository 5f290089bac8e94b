"""Many sequences written at once by the target, in lockstep: fast enough to make a corpus.

Every row stands at the same position, so that one step is the same work whatever the rows say: on a
GPU it is captured once per stretch of positions and replayed. Rows whose prompt is longer than the
others' are fed their own tokens until it ends; rows that are done write on, and are cut afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from megadecode.training.target import TorchTarget

STRETCH = 128
"""Positions that share a captured step, which reads the keys up to the stretch's end."""
PREFILL_TOKENS = 16384
LOOK_EVERY = 32
MIN_P = 0.02
"""Sampled tokens are at least this likely beside the likeliest: a small model's tail is noise."""

Chooser = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Lockstep:
    """`rows` sequences of up to `capacity` tokens that end at `stop_id`.

    choose: logits [rows, vocab], temperature [rows, 1] and the new token's position [1] to ids
    [rows], all on the device.
    """

    def __init__(
        self,
        target: TorchTarget,
        rows: int,
        capacity: int,
        stop_id: int,
        choose: Chooser | None = None,
    ) -> None:
        self.target, self.rows, self.stop_id = target, rows, stop_id
        self.capacity = -(-capacity // STRETCH) * STRETCH
        device = target.device
        self.cache = target.cache(rows, self.capacity)
        self.tokens = torch.zeros(rows, self.capacity + 1, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(rows, 1, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self._places = torch.arange(self.capacity, device=device)
        target.angles(self.at, self.capacity + 1)
        self._tables = target.tables  # captured steps read them: they must outlive a longer pair
        fast = torch.compile(gumbel_choose) if target.fused else gumbel_choose
        self._choose: Chooser = choose or fast
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def write(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: Sequence[float]
    ) -> list[list[int]]:
        """What follows each prompt, in order: up to `new_tokens`, a stop token included.

        temperature: one for each prompt; 0 is greedy. Prompts of similar length cost least. Chance
        comes of the device's default generator. ValueError if they do not fit.
        """
        longest = max(map(len, prompts))
        end = longest + new_tokens
        if len(prompts) > self.rows or end > self.capacity or min(map(len, prompts)) < 1:
            raise ValueError(
                f"{len(prompts)} prompts of up to {longest} tokens, and {new_tokens} more, do not "
                f"fit {self.rows} rows of {self.capacity}; an empty prompt never does"
            )
        # Idle rows repeat the first prompt.
        padded = [*prompts, *[prompts[0]] * (self.rows - len(prompts))]
        heat = [*temperature, *[temperature[0]] * (self.rows - len(prompts))]
        block = torch.zeros(self.rows, longest, dtype=torch.int64)
        for row, prompt in enumerate(padded):
            block[row, : len(prompt)] = torch.as_tensor(prompt)
        self.tokens[:, :longest] = block.to(self.tokens.device)
        self.lengths.copy_(torch.tensor([len(prompt) for prompt in padded]))
        self.temperature.copy_(torch.tensor(heat, dtype=torch.float32)[:, None])
        first = self._prefill(min(map(len, prompts)) - 1)
        for at in range(first, end - 1):
            self._advance(at)
            if at % LOOK_EVERY == 0 and self._all_done(at + 2):
                break
        written = self.tokens[:, :end].tolist()
        return [
            self._cut(row[len(prompt) : len(prompt) + new_tokens])
            for row, prompt in zip(written, prompts)
        ]

    def _cut(self, tokens: list[int]) -> list[int]:
        if self.stop_id in tokens:
            return tokens[: tokens.index(self.stop_id) + 1]
        return tokens

    def _prefill(self, count: int) -> int:
        """Fill the cache with the first `count` positions of every row; the next position."""
        rows = max(1, PREFILL_TOKENS // max(count, 1))
        for first in range(0, self.rows if count else 0, rows):
            part = self.cache.part(first, min(first + rows, self.rows))
            part.rows = 0
            self.target.forward(self.tokens[first : first + rows, :count], cache=part)
        self.at.fill_(count)
        return count

    def _advance(self, at: int) -> None:
        """One step at position `at`, where all rows stand."""
        keys = (at // STRETCH + 1) * STRETCH
        if self.target.device.type != "cuda":
            self._step(keys)
        elif keys in self._graphs:
            self._graphs[keys].replay()
        else:  # the first of its stretch runs as it is, and so warms up what is then captured
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._step(keys)
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            # One memory pool: the steps are never replayed at the same time.
            pool = next((graph.pool() for graph in self._graphs.values()), None)
            self._graphs[keys] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graphs[keys], pool=pool):
                self._step(keys)

    @torch.no_grad()
    def _step(self, keys: int) -> None:
        """Read the tokens at `at`, write those at `at + 1` and go on; all on the device."""
        target, c = self.target, self.target.config
        x = F.embedding(self.tokens.index_select(1, self.at)[:, 0], target.embed)
        cos, sin = (table[self.at][:, None] for table in self._tables)
        # A group of query heads stands as rows before its one key head. Plain products: torch's
        # attention kernels read one row's thousands of keys one after another.
        hidden_keys = self._places[:keys] > self.at
        for number, layer in enumerate(target.layers):
            q, k, v = target.heads_of(layer, x, cos, sin)
            self.cache.keys[number].index_copy_(2, self.at, k[:, :, None])
            self.cache.values[number].index_copy_(2, self.at, v[:, :, None])
            grouped = q.reshape(self.rows, c.kv_heads, c.group, c.head_dim) * c.head_dim**-0.5
            scores = grouped @ self.cache.keys[number, :, :, :keys].transpose(2, 3)
            shares = scores.float().masked_fill(hidden_keys, -math.inf).softmax(-1)
            attended = shares.to(target.dtype) @ self.cache.values[number, :, :, :keys]
            x = target.after_attention(layer, x, attended.reshape(self.rows, -1))
        hidden = F.rms_norm(x, (c.hidden,), target.final_norm, c.rms_eps)
        after = self.at + 1
        chosen = self._choose(target.logits(hidden), self.temperature, after)
        given = self.tokens.index_select(1, after)[:, 0]
        self.tokens.index_copy_(1, after, torch.where(after < self.lengths, given, chosen)[:, None])
        self.at += 1

    def _all_done(self, end: int) -> bool:
        places = torch.arange(end, device=self.tokens.device)
        stopped = (self.tokens[:, :end] == self.stop_id) & (places >= self.lengths[:, None])
        return bool(stopped.any(1).all())


def gumbel_choose(
    logits: torch.Tensor, temperature: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """[rows] token ids of logits [rows, vocab]: greedy where temperature [rows, 1] is 0, elsewhere
    a sample of the tokens that are likely enough (Gumbel-max)."""
    sampled = temperature > 0
    scaled = logits.float() / torch.where(sampled, temperature, 1.0)
    noise = -torch.log(-torch.log(torch.rand_like(scaled).clamp_(1e-9, 1 - 1e-7)))
    likely = scaled >= scaled.amax(-1, keepdim=True) + math.log(MIN_P)
    score = torch.where(likely, scaled + torch.where(sampled, noise, 0.0), -math.inf)
    return score.argmax(-1)
