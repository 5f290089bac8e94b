"""From a model to a drafter in a folder: corpus, held-out texts, training, judgement.

The folder holds `corpus.npz`, `held-out.jsonl`, `checkpoint.pt` while training, and in the end
`drafter.safetensors` and `training.json`. What is already there is used: a run that was
stopped goes on where it was.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megadecode.drafter import fingerprint
from megadecode.drafter.module import DrafterModule
from megadecode.errors import ModelError
from megadecode.models.gguf_file import LoadedModel
from megadecode.training.author import Author, Plan
from megadecode.training.corpus import DOMAINS, Corpus
from megadecode.training.evaluate import Text, evaluate, read_texts, write_texts
from megadecode.training.held_out import HeldOutChain
from megadecode.training.recipe import Recipe
from megadecode.training.target import TorchTarget
from megadecode.training.texts import held_out_prompts, write_answers
from megadecode.training.trainer import Report, Trainer

Said = Callable[[str, float, float, str], None]
"""Called with what is being done, how much of how much is done, and figures in words."""


@dataclass(frozen=True)
class Settings:
    """Everything about a run that is not the model.

    device: of torch. rows: sequences written at once, at most. per_cell: held-out texts of each
    domain and context. save_every: seconds between checkpoints. seconds: of training, where the
    clock ends it. fused: compile elementwise code.
    mask_token_id: a token whose embedding stands for a drafted position.
    """

    plan: Plan = field(default_factory=Plan)
    recipe: Recipe = field(default_factory=Recipe)
    device: str = "cpu"
    rows: int = 2048
    per_cell: int = 24
    watched: int = 64
    save_every: float = 120.0
    seconds: float | None = None
    report_every: int = 100
    fused: bool = False
    mask_token_id: int = 0


def train_drafter(
    model: LoadedModel, folder: str | os.PathLike[str], settings: Settings, said: Said
) -> Path:
    """Train a drafter for `model` in `folder`; the path of its file. Raises ModelError."""
    where = Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    target = TorchTarget(model, settings.device)
    corpus, texts = _corpus(model, target, where, settings, said)
    compiled = TorchTarget(model, settings.device, fused=True) if settings.fused else target
    trainer = Trainer(
        compiled, corpus, settings.recipe, settings.mask_token_id, fused=settings.fused
    )
    watched = _train(trainer, corpus, where / "checkpoint.pt", settings, said)
    trainer.write(where / "drafter.safetensors")
    tables = judge(trainer.module, target, texts, said)
    record = {
        "name": trainer.config.name,
        "recipe": settings.recipe.to_dict(),
        "drafter": trainer.config.to_dict(),
        "corpus": about(corpus),
        "steps": trainer.step,
        "seconds": round(trainer.seconds, 1),
        "device": device_name(target.device),
        "torch": torch.__version__,
        "history": [asdict(report) for report in trainer.history],
        "chain_tau": watched,
        "tables": tables,
    }
    (where / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (where / "checkpoint.pt").unlink(missing_ok=True)
    return where / "drafter.safetensors"


def _corpus(
    model: LoadedModel, target: TorchTarget, where: Path, settings: Settings, said: Said
) -> tuple[Corpus, list[Text]]:
    """The folder's corpus and held-out texts, written first where they are missing."""
    file, held_out, mine = where / "corpus.npz", where / "held-out.jsonl", fingerprint(model)
    if file.exists() and held_out.exists():
        corpus = Corpus.load(file)
        if corpus.about.get("fingerprint") != mine:
            raise ModelError(
                f"{file} was written by another model than {model.config.name!r}; give another "
                f"folder, or delete it"
            )
        return corpus, read_texts(held_out)
    author = Author(target, model.tokenizer(), settings.recipe.seed, settings.rows)
    plan, began = settings.plan, time.monotonic()

    def progress(what: str, done: int, total: int) -> None:
        said(what, done, total, f"{done} of {total} answers")

    samples = list(author.samples(plan, progress))
    corpus = Corpus.of(
        samples,
        {
            "target": model.config.name, "fingerprint": mine, "plan": asdict(plan),
            "seed": settings.recipe.seed, "seconds": round(time.monotonic() - began, 1),
        },
    )  # fmt: skip
    corpus.save(file)
    new_tokens = plan.answer_tokens
    contexts = [context for context, count in plan.long.items() if count]
    prompts = held_out_prompts(author, settings.per_cell, contexts, new_tokens)
    texts = write_answers(author, prompts, new_tokens)
    write_texts(held_out, texts)
    return corpus, texts


def _train(
    trainer: Trainer, corpus: Corpus, checkpoint: Path, settings: Settings, said: Said
) -> dict[int, float]:
    """Train to the end, from the checkpoint if there is one; the chain's tau by step."""
    if checkpoint.exists():
        trainer.load(checkpoint)
    chain = HeldOutChain(trainer, corpus, settings.watched)
    taus: dict[int, float] = {}
    saved = time.monotonic()

    def report(made: Report) -> None:
        nonlocal saved
        limit = settings.seconds
        ended = made.step == made.steps or (limit is not None and made.seconds >= limit)
        if time.monotonic() - saved > settings.save_every or ended:
            trainer.save(checkpoint)
            if (tau := chain.tau()) is not None:
                taus[made.step] = round(tau, 4)
            saved = time.monotonic()
        figures = f"loss {made.loss:.3f}, first token {made.hits:.1%}"
        if taus:
            figures += f", held-out chain {taus[max(taus)]:.2f}"
        done, total = (made.step, made.steps) if limit is None else (made.seconds, limit)
        said("training", done, total, figures)

    trainer.run(every=settings.report_every, report=report, seconds=settings.seconds)
    return taus


def judge(
    module: DrafterModule, target: TorchTarget, texts: list[Text], said: Said
) -> list[dict[str, Any]]:
    """The tables of `evaluate` over held-out texts."""

    def features(ids: Any) -> torch.Tensor:
        tokens = torch.tensor([list(ids)], device=target.device)
        return target.forward(tokens, module.config.taps)[1][0]

    return evaluate(
        module, texts, features,
        progress=lambda done: said("judging", done, len(texts), f"{done} of {len(texts)} texts"),
    )  # fmt: skip


def about(corpus: Corpus) -> dict[str, Any]:
    """A corpus in counts."""
    return {
        "answers": len(corpus),
        "tokens": len(corpus.tokens),
        "answer_tokens": corpus.answer_tokens,
        "held_out": int(corpus.held_out.sum()),
        "by_domain": {d: int((corpus.domain == i).sum()) for i, d in enumerate(DOMAINS)},
        "longest": int(np.max(corpus.lengths)),
        **{key: corpus.about[key] for key in ("seed", "seconds") if key in corpus.about},
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
