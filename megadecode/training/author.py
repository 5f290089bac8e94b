"""The target writes its own corpus: user turns, answers to them, texts rewritten, long contexts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from megadecode.errors import ModelError
from megadecode.models.tokenizer import Tokenizer
from megadecode.training.corpus import LOOP_GRAM, Sample, is_held_out, loop_start
from megadecode.training.frame import Frame
from megadecode.training.lockstep import Lockstep
from megadecode.training.target import TorchTarget
from megadecode.training.tasks import OPENINGS, made_up_text, with_text

Progress = Callable[[str, int, int], None]
"""What is being written, prompts done, prompts in all."""

TURN_TOKENS = 64
SHORT_TURN = 4
TURNS_CONTEXT, SHORT_CONTEXT, REWRITE_CONTEXT = 128, 512, 1024
KV_BYTES = {"cuda": 16 << 30, "cpu": 1 << 30}
"""Of one batch's keys and values; batches of all context classes stay allocated side by side."""
AHEAD = 4
"""Batches of fresh prompts that are sorted by length together: a batch then has little to wait."""


@dataclass(frozen=True)
class Plan:
    """How much is written.

    answers: to fresh user turns; chat, code and lists in the shares `mix`. rewrites: answers that
    treat a given text of a few hundred tokens. long: context class in tokens -> answers behind
    prompts of nearly that length: half behind earlier turns, half treating a long given text.
    answer_tokens: the longest answer. sampled: share of answers at temperatures 0.6 to 1, the
    others are greedy. seconds: after so long no new batch is begun.
    """

    answers: int = 60_000
    rewrites: int = 12_000
    long: dict[int, int] = field(default_factory=lambda: {2048: 1024, 4096: 512, 8192: 256})
    answer_tokens: int = 320
    sampled: float = 0.3
    mix: dict[str, float] = field(default_factory=lambda: {"chat": 0.5, "code": 0.25, "list": 0.25})
    seconds: float = float("inf")


@dataclass(frozen=True)
class Prompt:
    """Ids to be answered, with the spans of earlier answers in them."""

    ids: list[int]
    spans: list[tuple[int, int]]
    domain: str
    held_out: bool
    turn: list[int]


class Author:
    """Writes with one target and one tokenizer. Equal seeds and plans on equal devices give equal
    corpora, unless the clock cuts them short."""

    def __init__(
        self, target: TorchTarget, tokenizer: Tokenizer, seed: int, rows: int = 2048
    ) -> None:
        self.target, self.tokenizer, self.most_rows = target, tokenizer, rows
        self.frame = Frame.of(tokenizer)
        self.rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        # Answers that later texts and earlier turns are taken from, the held-out side apart.
        self.pool: dict[bool, list[tuple[list[int], list[int], str]]] = {False: [], True: []}
        self._asked: set[bytes] = set()
        self._waiting: list[Prompt] = []
        self._locksteps: dict[int, Lockstep] = {}

    def samples(self, plan: Plan, progress: Progress | None = None) -> Iterator[Sample]:
        """Write the plan batch by batch; kinds alternate, so that a cut leaves a mixture."""
        began = time.monotonic()
        kinds = {"answers": (plan.answers, SHORT_CONTEXT)}
        kinds["rewrites"] = (plan.rewrites, REWRITE_CONTEXT)
        kinds |= {str(context): (count, context) for context, count in plan.long.items()}
        done = dict.fromkeys(kinds, 0)
        total = sum(count for count, _ in kinds.values())
        while time.monotonic() - began < plan.seconds:
            left = [kind for kind, (count, _) in kinds.items() if done[kind] < count]
            if not left:
                return
            # The kind that lags most behind, its next batch counted: one batch may be much of a
            # kind's share, and the longer the texts, the more time it takes.
            batch = {kind: min(self.rows_of(kinds[kind][1]), kinds[kind][0]) for kind in left}
            kind = min(left, key=lambda k: (done[k] + batch[k]) / kinds[k][0])
            kind = kind if self.pool[False] else "answers"  # these feed the others
            count, context = kinds[kind]
            most = min(count - done[kind], self.rows_of(context))
            if kind == "answers":
                prompts = self._fresh(most, plan.mix)
            elif kind == "rewrites":
                prompts = self.rewrite_prompts(most, context, plan.answer_tokens)
            else:
                prompts = self.long_prompts(most, context, plan.answer_tokens)
            done[kind] += most
            heat = self.rng.uniform(0.6, 1.0, len(prompts))
            heat[self.rng.random(len(prompts)) >= plan.sampled] = 0.0
            yield from self.answer(prompts, context, plan.answer_tokens, heat.tolist())
            if progress:
                progress("writing", sum(done.values()), total)

    def answer(
        self,
        prompts: Sequence[Prompt],
        context: int,
        new_tokens: int,
        temperature: Sequence[float],
    ) -> list[Sample]:
        """Samples with the target's answers; prompt and answer fit `context` tokens. A looping
        answer is cut before its third time around; short complete ones go to the pool."""
        lockstep = self.lockstep(context)
        rows = lockstep.rows
        samples = []
        for first in range(0, len(prompts), rows):
            some = slice(first, first + rows)
            texts = lockstep.write([p.ids for p in prompts[some]], new_tokens, temperature[some])
            for prompt, text, heat in zip(prompts[some], texts, temperature[some]):
                loop = loop_start(text)
                if loop is None and text[-1] == self.frame.stop_id and not prompt.spans:
                    self.pool[prompt.held_out].append((prompt.turn, text, prompt.domain))
                if loop is not None:
                    text = text[: loop + LOOP_GRAM - 1]
                ids, start = prompt.ids + text, len(prompt.ids)
                spans = [*prompt.spans, (start, len(ids))]
                samples.append(Sample(ids, spans, prompt.domain, heat, prompt.held_out))
        return samples

    def _fresh(self, count: int, mix: dict[str, float]) -> list[Prompt]:
        """`count` new prompts of one user turn each, of nearly one length."""
        while len(self._waiting) < count:
            want = AHEAD * count
            while len(self._waiting) < want:
                before = len(self._waiting)
                self._waiting += self._sampled_turns(mix)
                if len(self._waiting) == before:
                    raise ModelError(
                        f"{self.target.config.name!r} writes no user turns that end within "
                        f"{TURN_TOKENS} tokens and are new: no corpus can be made with it"
                    )
            self._waiting.sort(key=lambda p: len(p.ids), reverse=True)
        taken, self._waiting = self._waiting[-count:], self._waiting[:-count]
        return taken

    def _sampled_turns(self, mix: dict[str, float]) -> list[Prompt]:
        """A batch of sampled user turns, without those that do not end, are hardly there or were
        asked before."""
        frame, lockstep, prompts = self.frame, self.lockstep(TURNS_CONTEXT), []
        share = np.array(list(mix.values()))
        starts = []
        for domain in self.rng.choice(list(mix), lockstep.rows, p=share / share.sum()):
            opening = OPENINGS[domain][self.rng.integers(len(OPENINGS[domain]))]
            starts.append((self.tokenizer.encode(opening, specials=False), str(domain)))
        given = [frame.opening + start for start, _ in starts]
        new_tokens = min(TURN_TOKENS, TURNS_CONTEXT - max(map(len, given)))
        for (start, domain), text in zip(
            starts, lockstep.write(given, new_tokens, [1.0] * len(given))
        ):
            if text[-1] != frame.stop_id:
                continue
            turn = self._encoded(self.tokenizer.decode(start + text))
            if turn is not None and len(turn) >= SHORT_TURN:
                prompts += self._new_prompt(turn, [], domain, is_held_out(turn))
        return prompts

    def rewrite_prompts(
        self, count: int, context: int, new_tokens: int, held_out: bool | None = None
    ) -> list[Prompt]:
        """Prompts that give one answer of the pool, or made-up lines, and say what to do with it;
        prompt and answer fit `context` tokens."""

        def make(side: bool) -> list[Prompt]:
            return self._given_text(context, new_tokens, side)

        return self._filled(count, make, held_out)

    def long_prompts(
        self, count: int, context: int, new_tokens: int, held_out: bool | None = None
    ) -> list[Prompt]:
        """Prompts that with their answer nearly fill `context` tokens: a conversation of several
        turns, or a long given text."""

        def make(side: bool) -> list[Prompt]:
            if self.rng.integers(2):
                return self._conversation(context - new_tokens, side)
            return self._given_text(context, new_tokens, side, fill=True)

        return self._filled(count, make, held_out)

    def _filled(
        self,
        count: int,
        make: Callable[[bool], list[Prompt]],
        held_out: bool | None = None,
    ) -> list[Prompt]:
        """`count` prompts, or fewer where the pool gives no more; texts of one side of the pool
        make prompts of that side, so that nothing held out is ever trained on."""
        prompts: list[Prompt] = []
        for _ in range(4 * count):
            side = bool(self.rng.random() < 1 / 16) if held_out is None else held_out
            if len(prompts) < count and self.pool[side]:
                prompts += make(side)
        return prompts

    def _given_text(
        self, context: int, new_tokens: int, held_out: bool, fill: bool = False
    ) -> list[Prompt]:
        room = context - new_tokens - len(self.frame.opening) - len(self.frame.reply) - 32
        parts: list[str] = []
        tokens = 0
        while not parts or fill:
            if self.rng.random() < 0.15:
                part = made_up_text(self.rng, int(self.rng.integers(4, 16)))
            else:
                part = self.tokenizer.decode(self._drawn(held_out)[1])
            tokens += len(self.tokenizer.encode(part, specials=False)) + 2
            if tokens > room:
                break
            parts.append(part)
        turn = self._encoded(with_text(self.rng, "\n\n".join(parts))) if parts else None
        if turn is None or len(turn) > room + 32:
            return []
        return self._new_prompt(turn, [], "rewrite", held_out)

    def _conversation(self, room: int, held_out: bool) -> list[Prompt]:
        turn, _, domain = self._drawn(held_out)
        earlier: list[tuple[list[int], list[int]]] = []
        tokens = len(self.frame.conversation([], turn))
        while True:
            asked, answered, _ = self._drawn(held_out)
            tokens += len(asked) + len(answered) + len(self.frame.reply + self.frame.between)
            if tokens > room:
                break
            earlier.append((asked, answered))
        return self._new_prompt(turn, earlier, domain, held_out) if earlier else []

    def _drawn(self, held_out: bool) -> tuple[list[int], list[int], str]:
        pool = self.pool[held_out]
        return pool[self.rng.integers(len(pool))]

    def _new_prompt(
        self,
        turn: list[int],
        earlier: list[tuple[list[int], list[int]]],
        domain: str,
        held_out: bool,
    ) -> list[Prompt]:
        """One prompt, or none if it was asked before."""
        ids = self.frame.conversation(earlier, turn)
        key = np.asarray(ids, "<u4").tobytes()
        if key in self._asked:
            return []
        self._asked.add(key)
        spans, at = [], len(self.frame.opening)
        for asked, answered in earlier:
            at += len(asked) + len(self.frame.reply)
            spans.append((at, at + len(answered)))
            at += len(answered) + len(self.frame.between)
        return [Prompt(ids, spans, domain, held_out, turn)]

    def _encoded(self, text: str) -> list[int] | None:
        """A turn's ids; None for text that is empty or broken."""
        text = text.strip()
        return self.tokenizer.encode(text, specials=False) if text and "�" not in text else None

    def rows_of(self, capacity: int) -> int:
        """Sequences of that capacity in one batch, by memory."""
        per_row = self.target.config.kv_bytes_per_token * self.target.dtype.itemsize // 4 * capacity
        room = KV_BYTES.get(self.target.device.type, KV_BYTES["cpu"])
        return max(1, min(self.most_rows, room // per_row))

    def lockstep(self, context: int) -> Lockstep:
        """The batch of that capacity, made once: its captured steps are used again."""
        if context > max(self.target.config.context_tokens, TURNS_CONTEXT):
            raise ModelError(
                f"texts of {context} tokens do not fit {self.target.config.name!r}, which was made "
                f"for {self.target.config.context_tokens}"
            )
        if context not in self._locksteps:
            self._locksteps[context] = Lockstep(
                self.target, self.rows_of(context), context, self.frame.stop_id
            )
        return self._locksteps[context]
