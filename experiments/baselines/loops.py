"""The rivals: who runs the parts of a step, and what lies between them.

`eager`            every part launched from Python, the tree on the host
`graph_host_tree`  two captured graphs; the tree, its mask and the walk in Python between them
`graph_device_tree` one graph from commit to verify; the walk in Python
`graph_whole_step` the whole step is one graph; the host replays and reads tokens
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from experiments.baselines.core import Core, Setup
from experiments.baselines.graphs import Captured
from experiments.baselines.trees import accept, ancestor_mask, best_first

TURN = 8
"""Steps between two turns of the scheduler in the host's loop."""


@dataclass
class Generated:
    """tokens: new ones, at most as many as asked for. steps: verify steps. step_tokens: tokens
    that each committed. seconds: from the first token to the last."""

    tokens: list[int]
    steps: int
    step_tokens: list[int]
    seconds: float


@dataclass
class Clock:
    """Where the host's time went, seconds by stage; off unless `on`."""

    on: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = 0.0

    def start(self) -> None:
        if self.on:
            self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        if self.on:
            now = time.perf_counter()
            self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
            self._last = now


class Baseline:
    """One sequence, greedy. `step` gives the tokens that one verify step commits."""

    name = ""
    captured = True

    def __init__(self, setup: Setup) -> None:
        self.setup, self.core = setup, self.open_core(setup)
        self.length = 0
        self.clock = Clock()
        self.dynamic = setup.attention == "sdpa"
        capture = self.captured and self.core.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if capture else None

    def open_core(self, setup: Setup) -> Core:
        return Core(setup)

    def force(self, forced: int | None) -> None:
        """Accept so many drafted tokens from now on (None: those that are right). What a graph
        decides by itself is captured anew."""
        self.setup = self.core.setup = dataclasses.replace(self.setup, forced=forced)
        if self._pool is not None:
            self._pool = torch.cuda.graph_pool_handle()
        for graph in self.graphs():
            graph.forget(self._pool)

    def graph(self, *parts: str) -> Captured:
        """The named parts of the core, one after another, as one graph."""
        core = self.core

        def work(keys: int) -> None:
            for part in parts:
                if part in ("draft", "verify"):
                    getattr(core, part)(keys)
                else:
                    getattr(core, part)()

        return Captured(work, self._pool)

    def graphs(self) -> list[Captured]:
        """What is captured ahead of a request."""
        raise NotImplementedError

    def step(self) -> list[int]:
        """The next step's tokens."""
        raise NotImplementedError

    def keys(self) -> int:
        """What a graph is chosen by: how many keys attention reads, where that is fixed."""
        return self.core.keys(self.length) if self.dynamic else 0

    def prepare(self, first: int, last: int) -> None:
        """Capture for contexts of first .. last positions."""
        core = self.core
        lengths = range(first, last + 1) if self.dynamic else (first,)
        for keys in sorted({core.keys(n) if self.dynamic else 0 for n in lengths}):
            for graph in self.graphs():
                core._begin(first)
                graph.prepare(keys)

    def begin(self, length: int) -> None:
        """The host's side of a request whose context is in the caches."""
        self.length = length

    def start(self, prompt: Sequence[int], new_tokens: int) -> int:
        """Take a prompt; the first token."""
        self.prepare(len(prompt), min(len(prompt) + new_tokens, self.setup.ctx) + self.core.most)
        first = self.core.prefill(prompt)
        self.begin(len(prompt))
        return first

    def pretend(self, length: int, steps: int) -> None:
        """Take a random context of so many positions, for the times of `steps` steps."""
        self.prepare(length, length + steps * self.core.most)
        self.core.pretend(length)
        self.begin(length)

    def generate(
        self, prompt: Sequence[int], new_tokens: int, stop_ids: Sequence[int] = ()
    ) -> Generated:
        """Up to so many new tokens, a stop token included. ValueError if they do not fit."""
        if len(prompt) + new_tokens > self.setup.ctx:
            raise ValueError(
                f"{len(prompt)} + {new_tokens} tokens do not fit a context of {self.setup.ctx}"
            )
        tokens = [self.start(prompt, new_tokens)]
        counts: list[int] = []
        begun = time.perf_counter()
        while len(tokens) < new_tokens and not any(t in stop_ids for t in tokens):
            made = self.step()
            counts.append(len(made))
            tokens += made
        seconds = time.perf_counter() - begun
        self.finish()
        ends = [i + 1 for i, token in enumerate(tokens) if token in stop_ids]
        return Generated(tokens[: min([new_tokens, *ends])], len(counts), counts, seconds)

    def finish(self) -> None:
        """Wait for whatever still runs."""
        if self.core.device.type == "cuda":
            torch.cuda.synchronize()


def pinned(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(like.shape, dtype=like.dtype, pin_memory=like.device.type == "cuda")


class HostTree(Baseline):
    """The seeds' loop: draft graph, candidates to the host, a heap in Python, mask and buffers to
    the device, verify graph, the walk in Python. Every TURN steps the scheduler has a turn, of
    `scheduler_s` seconds. Copies go through pinned memory, one each way and segment."""

    name = "graph_host_tree"
    scheduler_s = 0.0

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        core = self.core
        self._draft = self.graph("commit", "draft") if core.nodes else self.graph("commit")
        self._verify = self.graph("verify")
        self._ranked, self._plan = pinned(core.ranked), pinned(core.plan)
        self._accepted, self._decided = pinned(core.accepted), pinned(core.decided)
        n = core.rows
        numbers = self._plan[: 16 * n].view(torch.int64).numpy()
        self._tokens, self._depths = numbers[:n], numbers[n:]
        self._mask = self._plan[16 * n :].view(n, n).numpy()
        k = core.depth * core.width
        shape = core.depth, core.width
        self._ids = self._ranked[: 8 * k].view(torch.int64).view(shape).numpy()
        self._logprobs = self._ranked[8 * k :].view(torch.float32).view(shape).numpy()
        self._steps = 0

    def graphs(self) -> list[Captured]:
        return [self._draft, self._verify]

    def begin(self, length: int) -> None:
        super().begin(length)
        self._accepted.copy_(self.core.accepted)
        self.anchor = int(self._accepted[1])

    def step(self) -> list[int]:
        core, clock, keys = self.core, self.clock, self.keys()
        if self._steps % TURN == 0 and self.scheduler_s:
            time.sleep(self.scheduler_s)
        self._steps += 1
        clock.start()
        core.accepted.copy_(self._accepted, non_blocking=True)
        self._draft(keys)
        clock.lap("launch draft")
        tokens, parents, depths = [self.anchor], [-1], [0]
        if core.nodes:
            self._ranked.copy_(core.ranked, non_blocking=True)
            self.finish()
            clock.lap("draft")
            logprobs, ids = self._logprobs.tolist(), self._ids.tolist()
            clock.lap("unpack")
            tokens, parents, depths = best_first(logprobs, ids, self.anchor, core.nodes)
            clock.lap("heap")
        self._mask[:] = ancestor_mask(parents)
        clock.lap("mask")
        self._tokens[:], self._depths[:] = tokens, depths
        self.carry(parents)
        core.plan.copy_(self._plan, non_blocking=True)
        clock.lap("marshal")
        self._verify(keys)
        self._decided.copy_(core.decided, non_blocking=True)
        clock.lap("launch verify")
        self.finish()
        clock.lap("verify")
        decided = self._decided.tolist()
        path = self._walk(tokens, parents, depths, decided)
        made = [tokens[row] for row in path[1:]] + [decided[path[-1]]]
        self._take(path, decided[path[-1]])
        clock.lap("accept")
        return made

    def carry(self, parents: list[int]) -> None:
        """What else the verify graph reads from the host's memory."""

    def _walk(
        self, tokens: list[int], parents: list[int], depths: list[int], decided: list[int]
    ) -> list[int]:
        if self.setup.forced is None:
            return accept(tokens, parents, decided)
        fits = [row for row, depth in enumerate(depths) if depth <= self.setup.forced]
        row, path = max(fits, key=lambda row: (depths[row], -row)), []
        while row >= 0:
            path.append(row)
            row = parents[row]
        return path[::-1]

    def _take(self, path: list[int], bonus: int) -> None:
        """What the next graph commits."""
        numbers = self._accepted.numpy()
        numbers[0], numbers[1] = len(path), bonus
        numbers[2:] = range(self.core.most)
        numbers[2 : 2 + len(path)] = path
        self.anchor, self.length = bonus, self.length + len(path)


class Eager(HostTree):
    """The same without graphs: every kernel launched from Python."""

    name = "eager"
    captured = False


class DeviceTreeLoop(HostTree):
    """Draft, tree and verify in one graph; tokens and choices come back, the host walks."""

    name = "graph_device_tree"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        if not self.core.nodes:
            raise ValueError("graph_device_tree needs a drafter")
        self._all = self.graph("commit", "draft", "plant", "verify")
        self._parents = pinned(self.core.parents)

    def graphs(self) -> list[Captured]:
        return [self._all]

    def step(self) -> list[int]:
        core, clock, keys = self.core, self.clock, self.keys()
        clock.start()
        core.accepted.copy_(self._accepted, non_blocking=True)
        self._all(keys)
        self._plan.copy_(core.plan, non_blocking=True)
        self._parents.copy_(core.parents, non_blocking=True)
        self._decided.copy_(core.decided, non_blocking=True)
        clock.lap("launch")
        self.finish()
        clock.lap("device")
        tokens, decided = self._tokens.tolist(), self._decided.tolist()
        path = self._walk(tokens, [-1, *self._parents.tolist()[1:]], self._depths.tolist(), decided)
        made = [tokens[row] for row in path[1:]] + [decided[path[-1]]]
        self._take(path, decided[path[-1]])
        clock.lap("accept")
        return made


class WholeStep(Baseline):
    """The whole step is one graph. `ahead` replays are in flight before the host reads the oldest
    one's tokens: the device waits for the host only where the host is slower than a step."""

    name = "graph_whole_step"
    ahead = 2

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        core = self.core
        front = ("draft", "plant") if core.nodes else ()
        self._all = self.graph(*front, "verify", "accept", "commit")
        self._outs = [pinned(core.out) for _ in range(self.ahead)]
        self._events: list[torch.cuda.Event] = []
        if core.device.type == "cuda":
            self._events = [torch.cuda.Event() for _ in range(self.ahead)]
        self._sent = self._read = 0

    def graphs(self) -> list[Captured]:
        return [self._all]

    def begin(self, length: int) -> None:
        super().begin(length)
        self._sent = self._read = 0

    def graph_key(self, bound: int) -> int:
        """Which graph a step of a context of at most `bound` positions takes."""
        return self.core.keys(bound) if self.dynamic else 0

    def _send(self) -> None:
        # With replays in flight the length is known as a bound only.
        bound = self.length + (self._sent - self._read) * self.core.most
        self._all(self.graph_key(bound))
        place = self._sent % self.ahead
        self._outs[place].copy_(self.core.out, non_blocking=True)
        if self._events:
            self._events[place].record()
        self._sent += 1

    def step(self) -> list[int]:
        clock = self.clock
        clock.start()
        room = self.setup.ctx - self.length
        # Never further than the caches reach, whatever the steps in flight commit.
        while self._sent - self._read < self.ahead and (
            self._sent == self._read or (self._sent - self._read + 1) * self.core.most <= room
        ):
            self._send()
        clock.lap("launch")
        place = self._read % self.ahead
        if self._events:
            self._events[place].synchronize()
        clock.lap("device")
        count, *tokens = self._outs[place].tolist()
        self._read += 1
        self.length += count
        clock.lap("read")
        return tokens[:count]

    def prepare(self, first: int, last: int) -> None:
        super().prepare(first, min(last + self.ahead * self.core.most, self.core.capacity))


KINDS: dict[str, type[Baseline]] = {
    kind.name: kind for kind in (Eager, HostTree, DeviceTreeLoop, WholeStep)
}
