"""Held-out texts to judge drafters on: by domain, by context, greedy and as an engine samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from megadecode.training.author import REWRITE_CONTEXT, SHORT_CONTEXT, Author, Prompt
from megadecode.training.evaluate import Text
from megadecode.training.lockstep import Lockstep
from megadecode.training.noise import choose

FRESH_DOMAINS = ("chat", "code", "list")


def held_out_prompts(
    author: Author, per_cell: int, contexts: Iterable[int], new_tokens: int
) -> list[tuple[Prompt, int]]:
    """(prompt, context class): of the shortest class `per_cell` of each domain, of longer ones
    `per_cell` in all. Fewer where the author has not written enough on the held-out side."""
    found = []
    for domain in FRESH_DOMAINS:
        turns = [turn for turn, _, of in author.pool[True] if of == domain][:per_cell]
        for turn in turns:
            ids = author.frame.conversation([], turn)
            found.append((Prompt(ids, [], domain, True, turn), SHORT_CONTEXT))
    room = REWRITE_CONTEXT if author.target.config.context_tokens >= REWRITE_CONTEXT else 0
    if room:
        prompts = author.rewrite_prompts(per_cell, room, new_tokens, held_out=True)
        found += [(prompt, SHORT_CONTEXT) for prompt in prompts]
    for context in contexts:
        prompts = author.long_prompts(per_cell, context, new_tokens, held_out=True)
        found += [(prompt, context) for prompt in prompts]
    return found


def write_answers(
    author: Author,
    prompts: Sequence[tuple[Prompt, int]],
    new_tokens: int,
    temperatures: Sequence[float] = (0.0, 1.0),
) -> list[Text]:
    """The target's answers to each prompt at each temperature, with the engine's own noise."""
    target, texts = author.target, []
    for context in sorted({context for _, context in prompts}):
        some = [prompt for prompt, label in prompts if label == context]
        capacity = max(len(prompt.ids) for prompt in some) + new_tokens
        rows = min(len(some), author.rows_of(capacity))
        seeds = torch.zeros(rows, dtype=torch.int64, device=target.device)

        def sample(
            logits: torch.Tensor,
            temperature: torch.Tensor,
            position: torch.Tensor,
            seeds: torch.Tensor = seeds,
        ) -> torch.Tensor:
            return choose(logits, temperature[:, 0], seeds, position.expand(len(seeds)))

        lockstep = Lockstep(target, rows, capacity, author.frame.stop_id, sample)
        for temperature in temperatures:
            for first in range(0, len(some), rows):
                batch = some[first : first + rows]
                mine = list(range(first, first + len(batch)))
                seeds[: len(batch)] = torch.tensor(mine, device=target.device)
                answers = lockstep.write(
                    [p.ids for p in batch], new_tokens, [temperature] * len(batch)
                )
                texts += [
                    Text(
                        (*prompt.ids, *answer), len(prompt.ids), new_tokens, prompt.domain,
                        context, temperature, seed,
                    )
                    for prompt, answer, seed in zip(batch, answers, mine)
                ]  # fmt: skip
    return texts
