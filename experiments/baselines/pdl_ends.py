"""The two ends of a graph of phases, in Triton: embeddings in, choices out."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PARTS = 16  # programs per row that look for its largest logit


@triton.jit
def _embed(tokens, embed, x, residual, HIDDEN: tl.constexpr, PADDED: tl.constexpr):
    """A row's embedding as activations (pack.to_fragments) and as the fp32 residual."""
    row = tl.program_id(0)
    h = tl.arange(0, PADDED)
    ok = h < HIDDEN
    token = tl.load(tokens + row).to(tl.int64)
    v = tl.load(embed + token * HIDDEN + h, mask=ok)
    chunk, step, t, e = h // 32, h % 32 // 16, h % 16 // 4, h % 4
    at = ((((chunk * 2 + row // 8) * 8 + row % 8) * 4 + t) * 2 + step) * 4 + e
    tl.store(x + at, v, mask=ok)
    tl.store(residual + (h // 8 * 16 + row) * 8 + h % 8, v.to(tl.float32), mask=ok)


@triton.jit
def _largest(logits, best, where, columns, stride, part, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    row, p = tl.program_id(0), tl.program_id(1)
    most, at = float("-inf"), 0
    for i in range(p * part, tl.minimum((p + 1) * part, columns), BLOCK):
        c = i + tl.arange(0, BLOCK)
        v = tl.load(logits + row * stride + c, mask=c < columns, other=float("-inf"))
        largest, place = tl.max(v, 0, return_indices=True)
        at = tl.where(largest > most, i + place, at)
        most = tl.maximum(most, largest)
    tl.store(best + row * PARTS + p, most)
    tl.store(where + row * PARTS + p, at)


@triton.jit
def _choose(best, where, chosen, PARTS: tl.constexpr):
    row, p = tl.program_id(0), tl.arange(0, PARTS)
    _, part = tl.max(tl.load(best + row * PARTS + p), 0, return_indices=True)
    tl.store(chosen + row, tl.load(where + row * PARTS + part).to(tl.int64))


def embed_rows(
    tokens: torch.Tensor, embed: torch.Tensor, x: torch.Tensor, residual: torch.Tensor
) -> None:
    """tokens [16]; embed bf16 [vocab, hidden]; x bf16 [16 hidden]; residual fp32 [16 hidden]."""
    hidden = embed.shape[1]
    _embed[(len(tokens),)](
        tokens, embed, x, residual, HIDDEN=hidden, PADDED=triton.next_power_of_2(hidden)
    )


class Choose:
    """The likeliest token of each row of logits fp32 [rows, stride], the first of equals."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self.part = -(-columns // PARTS)
        self.best = torch.zeros(rows, PARTS, device="cuda")
        self.where = torch.zeros(rows, PARTS, dtype=torch.int32, device="cuda")
        self.chosen = torch.zeros(rows, dtype=torch.int64, device="cuda")

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        _largest[(self.rows, PARTS)](
            logits, self.best, self.where, self.columns, logits.stride(0), self.part,
            PARTS=PARTS, BLOCK=1024,
        )  # fmt: skip
        _choose[(self.rows,)](self.best, self.where, self.chosen, PARTS=PARTS)
        return self.chosen
