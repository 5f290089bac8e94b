"""What a drafter is worth: tau along the engine's own walk, over texts the target has written.

tau is committed tokens over verify steps, both summed over texts; the first token of an answer,
which comes of the prompt, is in neither. Anchors are those that the policy's own rejections lead
to, which is worse for a drafter than random ones. The drafter is run in fp32, whatever it was
trained in: rounded logits are full of ties.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megadecode.drafter.module import DrafterModule
from megadecode.training.corpus import loop_start
from megadecode.training.walk import Policy, accepted, policies, true_rows, walk

Features = Callable[[Sequence[int]], torch.Tensor]
"""A text's token ids -> the target's features of all positions, [positions, taps, hidden]."""

RANKS = (1, 4, 16)
"""Recall is given for the likeliest 1, 4 and 16 candidates."""

_LOGIT_BYTES = {"cpu": 1 << 27, "cuda": 1 << 30}
_ANCHORS = {"cpu": 64, "cuda": 256}


@dataclass(frozen=True)
class Text:
    """A prompt and what the target answered.

    ids: prompt and answer; prompt_tokens: how many of them are the prompt. `context` is a label,
    the length class of the prompt in tokens. `max_new_tokens` is the limit the answer was written
    under: near it an engine drafts less deep.
    """

    ids: tuple[int, ...]
    prompt_tokens: int
    max_new_tokens: int
    domain: str = "chat"
    context: int = 512
    temperature: float = 0.0
    seed: int = 0

    @property
    def answer(self) -> tuple[int, ...]:
        return self.ids[self.prompt_tokens :]


def read_texts(path: str | Path) -> list[Text]:
    """The texts of a file with one JSON object per line, as `write_texts` writes it."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [Text(**(values | {"ids": tuple(values["ids"])})) for values in map(json.loads, lines)]


def write_texts(path: str | Path, texts: Iterable[Text]) -> None:
    """One JSON object per line: the fields of `Text`."""
    lines = [json.dumps(asdict(text)) + "\n" for text in texts]
    Path(path).write_text("".join(lines), encoding="utf-8")


def candidates(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids int32 and logprobs fp32 [rows, count], widths int32 [rows], as `build_tree` takes them.

    In (logit descending, id ascending) order; a row with a NaN or +inf has width 0.
    """
    logits = logits.float()
    values, ids = logits.topk(min(count, logits.shape[-1]), dim=-1)
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    logprobs = values - logits.logsumexp(-1, keepdim=True)
    sound = ~(logits.isnan() | logits.isposinf()).any(-1)
    widths = torch.where(sound, (values > -torch.inf).sum(-1), 0)
    return ids.int(), logprobs, widths.int()


@dataclass
class Drafts:
    """A drafter's candidates at several anchors; arrays as in `true_rows`."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    widths: NDArray[np.int32]


@torch.inference_mode()
def draft_at(
    module: DrafterModule,
    features: torch.Tensor,
    ids: Sequence[int],
    anchors: Sequence[int],
    count: int,
) -> Drafts:
    """The `count` best candidates at each anchor, a position of the text `ids`.

    features: [positions, taps, hidden] of at least the positions before the last anchor.
    """
    config, device = module.config, module.fc.weight.device
    tokens = torch.full((len(anchors), config.block_size), config.mask_token_id)
    tokens[:, 0] = torch.tensor([ids[a] for a in anchors])
    at = torch.tensor(list(anchors))
    features = features.to(device, module.fc.weight.dtype)
    per_row = 4 * config.vocab
    rows = max(_LOGIT_BYTES.get(device.type, 1 << 27) // per_row // config.drafted, 1)
    at_a_time = _ANCHORS.get(device.type, 64)
    parts = []
    for first in range(0, len(anchors), at_a_time):
        some = slice(first, first + at_a_time)
        context = features[: int(at[some].max())]
        hidden = module(context, tokens[some].to(device), at[some].to(device))
        for block in hidden[:, config.first_row :].split(rows):
            parts.append(candidates(module.logits(block), count))
    found = [torch.cat(part).cpu().numpy() for part in zip(*parts)]
    return Drafts(*found)


def truths(text: Text, drafted: int) -> NDArray[np.int32]:
    """[anchors, drafted]: what follows each anchor of a text, -1 behind its end."""
    answer = np.array([*text.answer, *[-1] * drafted], np.int32)
    anchors = len(text.answer) - 1
    return np.lib.stride_tricks.sliding_window_view(answer[1:], drafted)[:anchors].copy()


@dataclass
class Scored:
    """One text's figures."""

    text: Text
    commits: dict[str, list[int]]  # per policy, tokens of each verify step
    hits: NDArray[np.int64]  # [ranks, drafted] true tokens among the first so many candidates
    chances: NDArray[np.int64]  # [drafted] anchors at which the position has a true token
    loops: bool  # whether the answer repeats itself


def score(
    module: DrafterModule, features: torch.Tensor, text: Text, kinds: Sequence[Policy]
) -> Scored:
    """Draft at every anchor the text has, and walk it with every policy."""
    drafted = module.config.drafted
    steps = len(text.answer) - 1
    anchors = range(text.prompt_tokens, text.prompt_tokens + steps)
    most = max(min(kind.budget, module.config.vocab) for kind in kinds if not kind.chain)
    drafts = draft_at(module, features, text.ids, anchors, max(most, max(RANKS)))
    truth = truths(text, drafted)
    depth = np.minimum(drafted, text.max_new_tokens - 2 - np.arange(steps)).astype(np.int32)
    arguments = (drafts.ids, drafts.logprobs, drafts.widths, truth, depth)
    tree = true_rows(*arguments, budget=most)
    chain = true_rows(*arguments, budget=drafted, chain=True)
    commits = {
        kind.name: walk(accepted(chain if kind.chain else tree, kind.budget)) for kind in kinds
    }
    known = truth >= 0
    right = (drafts.ids == truth[..., None]) & known[..., None]
    right &= np.arange(drafts.ids.shape[2]) < drafts.widths[..., None]
    hits = np.stack([right[..., :rank].any(-1).sum(0) for rank in RANKS])
    return Scored(text, commits, hits, known.sum(0), loop_start(text.answer) is not None)


def summary(scored: Sequence[Scored], kinds: Sequence[Policy]) -> dict[str, Any]:
    """Pooled figures of some texts.

    texts, tokens; `tau` by policy, `tau_se`: its standard error from the spread between texts;
    `recall`: by rank, then by drafted position: how often the text's token was among the likeliest
    so many, over all anchors of the text, whether or not earlier positions were right.
    """
    tau, error = {}, {}
    for kind in kinds:
        tokens = np.array([sum(s.commits[kind.name]) for s in scored], float)
        steps = np.array([len(s.commits[kind.name]) for s in scored], float)
        ratio = tokens.sum() / max(steps.sum(), 1)
        spread = tokens - ratio * steps
        tau[kind.name] = round(float(ratio), 4)
        error[kind.name] = round(float(np.sqrt((spread**2).sum()) / max(steps.sum(), 1)), 4)
    hits = np.sum([s.hits for s in scored], axis=0)
    chances = np.maximum(np.sum([s.chances for s in scored], axis=0), 1)
    recall = {str(r): np.round(row / chances, 4).tolist() for r, row in zip(RANKS, hits)}
    return {
        "texts": len(scored),
        "tokens": sum(len(s.text.answer) for s in scored),
        "tau": tau,
        "tau_se": error,
        "recall": recall,
    }


def tables(scored: Sequence[Scored], kinds: Sequence[Policy]) -> list[dict[str, Any]]:
    """One table per temperature for all texts, per domain, per context, and per both.

    Each has domain and context (None: all), temperature, the `summary` of its texts, and under
    `looping` that of texts that repeat themselves, which count nowhere else.
    """
    found = []
    for temperature in sorted({s.text.temperature for s in scored}):
        mine = [s for s in scored if s.text.temperature == temperature]
        for domain in (None, *sorted({s.text.domain for s in mine})):
            for context in (None, *sorted({s.text.context for s in mine})):
                some = [
                    s
                    for s in mine
                    if domain in (None, s.text.domain) and context in (None, s.text.context)
                ]
                if not some:
                    continue
                looping = [s for s in some if s.loops]
                kept = [s for s in some if not s.loops]
                found.append(
                    {
                        "domain": domain,
                        "context": context,
                        "temperature": temperature,
                        **(summary(kept, kinds) if kept else {"texts": 0}),
                        "looping": summary(looping, kinds) if looping else {"texts": 0},
                    }
                )
    return found


def evaluate(
    module: DrafterModule,
    texts: Sequence[Text],
    features: Features,
    kinds: Sequence[Policy] | None = None,
    *,
    progress: Callable[[int], None] | None = None,
) -> list[dict[str, Any]]:
    """`tables` of a drafter over some texts; see `summary` for the figures.

    `module` is left as it is and run as an fp32 copy on its own device.
    """
    kinds = policies() if kinds is None else kinds
    exact = copy.deepcopy(module).float().eval()
    scored = []
    for number, text in enumerate(texts):
        if len(text.answer) > 1:
            scored.append(score(exact, features(text.ids[:-1]), text, kinds))
        if progress:
            progress(number + 1)
    return tables(scored, kinds)


def overall(found: Sequence[dict[str, Any]], temperature: float = 0.0) -> dict[str, float]:
    """tau by policy over all texts of a temperature, from `tables`."""
    for table in found:
        where = (table["domain"], table["context"], table["temperature"])
        if where == (None, None, temperature) and table["texts"]:
            return dict(table["tau"])
    return {}
