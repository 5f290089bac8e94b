"""Cross-entropy through a frozen output matrix, a chunk of rows at a time.

The logits of all drafted rows of a step would fill gigabytes. As the matrix takes
no gradient, each chunk's gradient with respect to its rows is computed at once, and no logits
outlive their chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

CHUNK_ROWS = 4096

Gradient = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def logits_gradient(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weighted losses [rows], whether the label is a likeliest token [rows], and the losses'
    gradient with respect to the logits [rows, vocab], in the logits' dtype."""
    scores = logits.float()
    top = scores.amax(-1)
    total = torch.exp(scores - top[:, None]).sum(-1).log() + top
    picked = scores.gather(-1, labels[:, None])[:, 0]
    tokens = torch.arange(logits.shape[-1], device=logits.device)
    hit = tokens[None, :] == labels[:, None]
    gradient = (torch.exp(scores - total[:, None]) - hit.float()) * weights[:, None]
    return (total - picked) * weights, picked >= top, gradient.to(logits.dtype)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        gradient: Gradient,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        back = torch.empty_like(hidden)
        loss = torch.zeros((), device=hidden.device)
        hits = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        for first in range(0, len(hidden), chunk):
            some = slice(first, first + chunk)
            losses, hits[some], of_logits = gradient(
                hidden[some] @ head.T, labels[some], weights[some]
            )
            loss += losses.sum()
            torch.mm(of_logits, head, out=back[some])
        ctx.save_for_backward(back)
        ctx.mark_non_differentiable(hits)
        return loss, hits

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> tuple[torch.Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        return back * outputs[0], None, None, None, None, None


def head_loss(
    hidden: torch.Tensor,
    head: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    gradient: Gradient = logits_gradient,
    chunk: int = CHUNK_ROWS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """sum_i weights_i * CE(head hidden_i, labels_i), and whether each label was the likeliest.

    hidden: [rows, hidden]; head: [vocab, hidden], frozen; labels: [rows] ids; weights: [rows] fp32.
    """
    loss, hits = _HeadLoss.apply(hidden, head, labels, weights, gradient, chunk)
    return loss, hits
