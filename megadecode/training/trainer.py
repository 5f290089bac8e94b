"""DFlash training (arXiv 2602.06036): features on the fly, many blocks a sequence in one pass."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.func import functional_call

from megadecode.drafter import DrafterConfig, fingerprint
from megadecode.drafter.io import single_file_metadata
from megadecode.drafter.module import DrafterModule
from megadecode.errors import ModelError
from megadecode.training.batches import Batches
from megadecode.training.corpus import Corpus
from megadecode.training.head_loss import head_loss, logits_gradient
from megadecode.training.recipe import Recipe
from megadecode.training.start import start_module
from megadecode.training.target import TorchTarget

CHUNK_ROWS = 2048


@dataclass(frozen=True)
class Report:
    """What a stretch of steps came to. loss: mean over the stretch; hits: share of first drafted
    tokens that were right; seconds: since training began, checkpoints and resumes left out."""

    step: int
    steps: int
    loss: float
    hits: float
    rate: float
    seconds: float


class Trainer:
    """One drafter in training. Master weights are fp32, arithmetic is in the target's dtype.

    Everything random comes of the recipe's seed and the step's number: a run that is resumed
    repeats what it would have done.
    """

    def __init__(
        self, target: TorchTarget, corpus: Corpus, recipe: Recipe, mask_token_id: int
    ) -> None:
        self.target, self.recipe = target, recipe
        self.config: DrafterConfig = recipe.config(
            target.config, mask_token_id, fingerprint(target.weights)
        )
        torch.manual_seed(recipe.seed)
        self.module = DrafterModule(self.config, target.embed, target.head).to(target.device)
        start_module(self.module, target, recipe.start)
        self.batches = Batches(
            corpus, seed=recipe.seed, block_size=recipe.block_size, mask_id=mask_token_id,
            decay=recipe.slot_decay, tokens=recipe.tokens, blocks=recipe.blocks,
            device=target.device, shortest=recipe.shortest,
        )  # fmt: skip
        self.optimizer = torch.optim.AdamW(
            self.module.parameters(), lr=recipe.rate, betas=recipe.betas,
            weight_decay=recipe.weight_decay, fused=target.device.type == "cuda",
        )  # fmt: skip
        self.gradient = torch.compile(logits_gradient) if target.fused else logits_gradient
        self.step, self.seconds = 0, 0.0
        self.history: list[Report] = []

    def run(
        self,
        until: int | None = None,
        *,
        every: int = 100,
        report: Callable[[Report], None] | None = None,
        deadline: float = float("inf"),
    ) -> None:
        """Train up to step `until` (default: the recipe's last). A report is made every so many
        steps, and at the end. deadline: of time.monotonic(), behind which no step begins."""
        until = self.recipe.steps if until is None else min(until, self.recipe.steps)
        began, before = time.monotonic(), self.seconds
        losses, hits, count = 0.0, 0.0, 0
        while self.step < until and time.monotonic() < deadline:
            loss, hit = self.advance()
            losses, hits, count = losses + loss, hits + hit, count + 1
            if self.step % every == 0 or self.step == until:
                mean_loss, mean_hits = float(losses) / count, float(hits) / count  # waits
                self.seconds = before + time.monotonic() - began
                rate = self.recipe.rate_at(self.step - 1)
                made = Report(
                    self.step, self.recipe.steps, mean_loss, mean_hits, rate, self.seconds
                )
                self.history.append(made)
                losses, hits, count = 0.0, 0.0, 0
                if not mean_loss < float("inf"):
                    raise ModelError(f"the loss is {mean_loss} at step {self.step}: lower the rate")
                if report:
                    report(made)

    def advance(self) -> tuple[torch.Tensor, torch.Tensor]:
        """One step; its loss and how often the first drafted token was right, on the device."""
        batch = self.batches.at(self.step)
        _, features = self.target.forward(batch.sequences, self.config.taps)
        hidden = self.draft(features, batch.tokens, batch.anchors)
        loss, right = head_loss(
            hidden.flatten(0, 2), self.target.head, batch.labels.flatten(),
            batch.weights.flatten(), self.gradient, CHUNK_ROWS,
        )  # fmt: skip
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), self.recipe.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate_at(self.step)
        self.optimizer.step()
        self.step += 1
        first = batch.weights[..., 0] > 0
        hits = (right.view_as(batch.labels)[..., 0] & first).sum() / first.sum().clamp_min(1)
        return loss.detach(), hits

    def draft(
        self, features: torch.Tensor, tokens: torch.Tensor, anchors: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states [S, A, b - 1, hidden] of the rows that predict, in the target's dtype."""
        weights = {name: p.to(self.target.dtype) for name, p in self.module.named_parameters()}
        hidden: torch.Tensor = functional_call(self.module, weights, (features, tokens, anchors))
        return hidden[:, :, self.config.first_row :]

    def save(self, path: str | os.PathLike[str]) -> None:
        """A checkpoint that `load` goes on from; written whole or not at all."""
        where = Path(path)
        part = where.with_name(where.name + ".part")
        state = {
            "recipe": self.recipe.to_dict(), "fingerprint": self.config.target_fingerprint,
            "module": self.module.state_dict(), "optimizer": self.optimizer.state_dict(),
            "step": self.step, "seconds": self.seconds,
            "history": [vars(made) for made in self.history],
        }  # fmt: skip
        torch.save(state, part)
        os.replace(part, where)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from a checkpoint of the same recipe and target. Raises ModelError."""
        state: dict[str, Any] = torch.load(path, map_location=self.target.device)
        for name, mine in (
            ("fingerprint", self.config.target_fingerprint), ("recipe", self.recipe.to_dict()),
        ):  # fmt: skip
            if state[name] != mine:
                raise ModelError(
                    f"{path}: its {name} is {state[name]}; this run's is {mine}. Train into "
                    f"another folder, or with the checkpoint's settings"
                )
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.history = [Report(**made) for made in state["history"]]

    def write(self, path: str | os.PathLike[str]) -> None:
        """The drafter as one bfloat16 safetensors file."""
        where = Path(path)
        part = where.with_name(where.name + ".part")
        tensors = {n: t.bfloat16().cpu().contiguous() for n, t in self.module.state_dict().items()}
        save_file(tensors, part, single_file_metadata(self.config))
        os.replace(part, where)
