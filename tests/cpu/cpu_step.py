"""Run steps of the CPU device's phases by hand, and the same model in plain numpy."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cute_kernels.cpu import attention, pack, phases
from cute_kernels.cpu.state import PAGE, make_batch
from megadecode.config import ModelConfig

TINY = ModelConfig(
    name="tiny", layers=2, hidden=96, heads=6, kv_heads=2, head_dim=32, ffn=208, vocab=203,
    context_tokens=4096,
)  # fmt: skip

LAYER_PHASES = ("qkv", "attend", "merge", "out_proj", "gate_up", "down")
PHASES = {
    "embed": phases.embed,
    "qkv": phases.qkv,
    "attend": attention.attend,
    "merge": attention.merge,
    "out_proj": phases.out_proj,
    "gate_up": phases.gate_up,
    "down": phases.down,
    "head": phases.head,
}


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights by canonical name, at the scale of a trained model's."""
    rng = np.random.default_rng(seed)
    c = config

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def gain(size: int = c.hidden) -> np.ndarray:
        return (1 + 0.2 * rng.standard_normal(size)).astype(np.float32)

    tensors = {
        "embed": matrix(c.vocab, c.hidden),
        "head": matrix(c.vocab, c.hidden),
        "final_norm": gain(),
    }
    for i in range(c.layers):
        tensors |= {
            f"layers.{i}.attn_norm": gain(),
            f"layers.{i}.ffn_norm": gain(),
            f"layers.{i}.q": 2 * matrix(c.heads * c.head_dim, c.hidden),
            f"layers.{i}.k": 2 * matrix(c.kv_heads * c.head_dim, c.hidden),
            f"layers.{i}.v": matrix(c.kv_heads * c.head_dim, c.hidden),
            f"layers.{i}.o": matrix(c.hidden, c.heads * c.head_dim),
            f"layers.{i}.gate": matrix(c.ffn, c.hidden),
            f"layers.{i}.up": matrix(c.ffn, c.hidden),
            f"layers.{i}.down": matrix(c.hidden, c.ffn),
        }
        for part in ("q", "k") if c.qk_norm else ():
            tensors[f"layers.{i}.{part}_norm"] = gain(c.head_dim)
        for part in ("q", "k", "v") if c.qkv_bias else ():
            rows = len(tensors[f"layers.{i}.{part}"])
            tensors[f"layers.{i}.{part}_bias"] = 0.5 * rng.standard_normal(rows, dtype=np.float32)
    return tensors


@dataclass
class Segment:
    """Consecutive rows of one slot: tokens at positions from `start` on.

    With `parents` (-1, then lower rows), the rows of a draft tree whose root is at `start`.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    parents: Sequence[int] | None = None

    def paths(self) -> list[list[int]]:
        """For each row, the rows from the tree's root to itself; `[0]` for rows of no tree."""
        if self.parents is None:
            return [[0]] * len(self.tokens)
        paths: list[list[int]] = []
        for row, parent in enumerate(self.parents):
            paths.append([*paths[parent], row] if row else [0])
        return paths


class Step:
    """The state of a small device; `run` is one step over segments of rows."""

    def __init__(
        self,
        config: ModelConfig = TINY,
        tensors: dict[str, np.ndarray] | None = None,
        *,
        rows: int = 256,
        slots: int = 4,
        pages: int = 24,
        workers: int = 2,
        dtype: str = "fp32",
        poison: bool = True,
        seed: int = 1,
    ) -> None:
        self.config, self.workers = config, workers
        self.tensors = random_tensors(config) if tensors is None else tensors
        self.dims = pack.dims_of(config)
        self.weights = pack.pack_weights(config, self.tensors.__getitem__, pages * PAGE, dtype)
        self.kv = pack.allocate_kv(config, slots * pages)
        if poison:
            self.kv.k[:] = np.nan
            self.kv.v[:] = np.nan
        self.acts = pack.allocate_acts(config, rows, rows, slots, pages, workers)
        if poison:
            for array in self.acts:
                array[:] = -7 if array.dtype == np.int32 else np.nan
        order = np.random.default_rng(seed).permutation(slots * pages)
        self.batch = make_batch(
            rows=rows,
            head_rows=rows,
            slots=slots,
            pages_per_slot=pages,
            items=pack.attention_items(config, rows, slots, pages),
        )
        self.batch.pages[:] = order.reshape(slots, pages)
        self.counters = np.zeros(16 * 8, np.int64)

    def load(self, segments: Sequence[Segment], head_rows: Sequence[int] | None = None) -> None:
        """Write the row table."""
        b, row = self.batch, 0
        for i, s in enumerate(segments):
            n = len(s.tokens)
            b.segment[i] = s.slot, row, n
            b.token[row : row + n] = s.tokens
            b.slot[row : row + n] = s.slot
            b.position[row : row + n] = np.arange(s.start, s.start + n)
            for r, path in enumerate(s.paths(), row):
                b.path[r] = -7  # what is beyond the row itself must not be looked at
                b.path[r, : len(path)] = path
                b.depth[r] = len(path) - 1
                if s.parents is not None:
                    b.position[r] = s.start + len(path) - 1
            row += n
        chosen = range(row) if head_rows is None else head_rows
        b.head_row[: len(chosen)] = chosen
        b.count[:3] = row, len(chosen), len(segments)
        attention.build_attention_work(self.dims, b)

    def phase(self, name: str, layer: int = 0, threads: bool = False) -> None:
        """One phase on all workers, one after the other or on threads."""
        self.counters[:] = 0

        def work(worker: int) -> None:
            PHASES[name](
                self.dims, self.weights, self.kv, self.batch, self.acts, layer, worker,
                self.counters, 3,
            )  # fmt: skip

        if not threads:
            for worker in range(self.workers):
                work(worker)
            return
        team = [threading.Thread(target=work, args=(i,)) for i in range(self.workers)]
        for thread in team:
            thread.start()
        for thread in team:
            thread.join()

    def run(
        self,
        segments: Sequence[Segment],
        head_rows: Sequence[int] | None = None,
        threads: bool = False,
    ) -> np.ndarray:
        """A whole step; the logits `[head rows, vocab]`."""
        self.load(segments, head_rows)
        self.phase("embed", 0, threads)
        for layer in range(self.config.layers):
            for name in LAYER_PHASES:
                self.phase(name, layer, threads)
        self.phase("head", 0, threads)
        return self.acts.logits[: self.batch.count[1], : self.config.vocab].copy()


def reference(
    config: ModelConfig, tensors: dict[str, np.ndarray], tokens: Sequence[int], dtype: type
) -> np.ndarray:
    """Logits `[tokens, vocab]` of the model in numpy, all arithmetic in `dtype`."""
    c = config
    w = {name: value.astype(dtype) for name, value in tensors.items()}
    if c.tied_embeddings:
        w["head"] = w["embed"]
    n, half, group = len(tokens), c.head_dim // 2, c.heads // c.kv_heads
    angle = np.arange(n)[:, None] * c.rope_theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)

    def norm(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + dtype(c.rms_eps)) * gain

    def rotate(x: np.ndarray) -> np.ndarray:
        a, b = x[..., :half], x[..., half:]
        return np.concatenate(
            [a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]], -1
        )

    x = w["embed"][np.asarray(tokens)]
    masked = np.arange(n)[None, :] > np.arange(n)[:, None]
    for i in range(c.layers):
        at = f"layers.{i}."
        y = norm(x, w[at + "attn_norm"])
        q, k, v = (
            (y @ w[at + part].T + w.get(f"{at}{part}_bias", dtype(0))).reshape(n, -1, c.head_dim)
            for part in ("q", "k", "v")
        )
        if c.qk_norm:
            q, k = norm(q, w[at + "q_norm"]), norm(k, w[at + "k_norm"])
        q, k = rotate(q), rotate(k)
        out = np.empty_like(q)
        for h in range(c.heads):
            s = q[:, h] @ k[:, h // group].T / dtype(np.sqrt(c.head_dim))
            s[masked] = -np.inf
            p = np.exp(s - s.max(-1, keepdims=True))
            out[:, h] = (p / p.sum(-1, keepdims=True)) @ v[:, h // group]
        x = x + out.reshape(n, -1) @ w[at + "o"].T
        y = norm(x, w[at + "ffn_norm"])
        gate, up = y @ w[at + "gate"].T, y @ w[at + "up"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[at + "down"].T
    return norm(x, w["final_norm"]) @ w["head"].T
