"""DFlash training (arXiv 2602.06036): features on the fly, many blocks a sequence in one pass."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import nn
from torch.func import functional_call

from megadecode.drafter import DrafterConfig, fingerprint
from megadecode.drafter.io import single_file_metadata
from megadecode.drafter.module import DrafterModule
from megadecode.errors import ModelError
from megadecode.training.batches import Batches
from megadecode.training.corpus import Corpus
from megadecode.training.features import Features
from megadecode.training.graph_step import GraphStep, Step
from megadecode.training.head_loss import head_loss, logits_gradient
from megadecode.training.recipe import Recipe
from megadecode.training.start import start_module
from megadecode.training.target import TorchTarget

CHUNK_ROWS = 2048
SIZE = 512
"""Tokens of the texts that held-out tau is watched on."""


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

    fused: compile and capture what can be, on a GPU. samples: train on these only. features: of
    the same target and corpus, from another trainer.

    Everything random comes of the recipe's seed and the step's number: a run that is resumed
    repeats what it would have done.
    """

    def __init__(
        self,
        target: TorchTarget,
        corpus: Corpus,
        recipe: Recipe,
        mask_token_id: int,
        *,
        fused: bool = False,
        samples: NDArray[np.int64] | None = None,
        features: Features | None = None,
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
            device=target.device, shortest=recipe.shortest, long_weight=recipe.long_weight,
            samples=samples,
        )  # fmt: skip
        self.module.reserve(max(*self.batches.buckets, SIZE) + recipe.block_size)
        on_gpu = target.device.type == "cuda"
        self.features = features or Features(
            target, self.batches, self.config.taps,
            keep=Features.fit(target, self.batches, self.config.taps),
        )  # fmt: skip
        # On a GPU the rate is a tensor: a captured step reads it.
        self.optimizer = torch.optim.AdamW(
            self.module.parameters(),
            lr=torch.tensor(recipe.rate, device=target.device) if on_gpu else recipe.rate,
            betas=recipe.betas, weight_decay=recipe.weight_decay, fused=on_gpu, capturable=on_gpu,
        )  # fmt: skip
        self._update: Step = self.update
        if fused and on_gpu:
            self._update = GraphStep(self.update, self.optimizer.zero_grad)
        self.gradient = torch.compile(logits_gradient) if fused else logits_gradient
        self.step, self.seconds = 0, 0.0
        self.history: list[Report] = []

    def run(
        self,
        until: int | None = None,
        *,
        every: int = 100,
        report: Callable[[Report], None] | None = None,
        seconds: float | None = None,
    ) -> None:
        """Train up to step `until` (default: the recipe's last). A report is made every so many
        steps, and at the end. seconds: the rate follows the clock, earlier stretches
        counted in, and the run ends with it; it then depends on the machine, and `until` is where
        it ends at the latest."""
        until = self.recipe.steps if until is None else min(until, self.recipe.steps)
        began, before = time.monotonic(), self.seconds
        losses, hits, count = 0.0, 0.0, 0
        ended = False
        while self.step < until and not ended:
            passed = before + time.monotonic() - began
            done = None if seconds is None else passed / seconds
            ended = done is not None and done >= 1
            loss, hit = self.advance(done)
            losses, hits, count = losses + loss, hits + hit, count + 1
            if self.step % every == 0 or self.step == until or ended:
                mean_loss, mean_hits = float(losses) / count, float(hits) / count  # waits
                self.seconds = before + time.monotonic() - began
                rate = self.recipe.rate_at(self.step - 1, done)
                made = Report(
                    self.step, self.recipe.steps, mean_loss, mean_hits, rate, self.seconds
                )
                self.history.append(made)
                losses, hits, count = 0.0, 0.0, 0
                if not mean_loss < float("inf"):
                    raise ModelError(f"the loss is {mean_loss} at step {self.step}: lower the rate")
                if report:
                    report(made)

    def advance(self, done: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """One step; its loss and how often the first drafted token was right, on the device.

        done: see `Recipe.rate_at`.
        """
        batch = self.batches.at(self.step)
        rate = self.recipe.rate_at(self.step, done)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        loss, hits = self._update(
            self.features.of(batch), batch.tokens, batch.anchors, batch.labels, batch.weights
        )
        self.step += 1
        return loss, hits

    def update(
        self,
        features: torch.Tensor,
        tokens: torch.Tensor,
        anchors: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a step does to weights and optimiser, without a look at any value."""
        hidden = self.draft(features, tokens, anchors)
        loss, right = head_loss(
            hidden.flatten(0, 2), self.target.head, labels.flatten(), weights.flatten(),
            self.gradient, CHUNK_ROWS,
        )  # fmt: skip
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), self.recipe.clip)
        self.optimizer.step()
        first = weights[..., 0] > 0
        hits = (right.view_as(labels)[..., 0] & first).sum() / first.sum().clamp_min(1)
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
