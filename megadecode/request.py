"""A request's life on the host: its handle, its chunks and its result."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from host.errors import DeviceError
from host.wire import FinishReason


class TextDecoder(Protocol):
    """Turns token ids into text piece by piece; see `megadecode.models.stream.TextStream`."""

    def push(self, ids: list[int]) -> str: ...

    def finish(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Stats:
    """Figures of one request.

    `tokens` emitted, in `steps` decode steps (prefill chunks not counted). `ttft_s`: from submit to
    the first token, 0.0 without one. `tok_s`: tokens after the first per second of the time
    between the first and the last, by the device's clock; prefill is not in it. 0.0 for fewer than
    two tokens. `host_round_trips`: times the device had to hear from the host: once to get the
    request, and once for every time it stood still because nobody took its completions.
    """

    tokens: int
    steps: int
    ttft_s: float
    tok_s: float
    host_round_trips: int


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of a request.

    `text` is what the tokens say, special tokens left out. `token_ids` are all emitted tokens, a
    stop token included, and `logprobs` the log-probability of each. `finish_reason` is one of
    `stop`, `length`, `abort`, `error`; with `error`, `error` says what happened.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    stats: Stats
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one or more steps brought: whole characters of text, and the tokens."""

    text: str
    token_ids: list[int]


class Request:
    """Handle of a submitted request. Iterate it for chunks; `result()` waits for the end.

    Chunks are kept until they are read, and reading is nobody's duty: the engine never waits for
    it. Several threads may wait for the result; chunks go to whoever iterates.
    """

    def __init__(self, prompt_tokens: int, decoder: TextDecoder | None) -> None:
        self.prompt_tokens = prompt_tokens
        self.request_id = -1
        self._decoder = decoder
        self._abort: Callable[[int], None] | None = None
        self._changed = threading.Condition()
        self._unread: deque[tuple[list[int], str]] = deque()
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._text: list[str] = []
        self._submitted_ns = time.monotonic_ns()
        self._first_ns = self._last_ns = 0
        self._generation: Generation | None = None
        self._lost: DeviceError | None = None

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self._generation is not None or self._lost is not None

    def abort(self) -> None:
        """Ask for an early end. The request still ends once, with what it has by then."""
        if self._abort is not None and not self.done:
            self._abort(self.request_id)

    def result(self, timeout: float | None = None) -> Generation:
        """Wait for the end, up to `timeout` seconds.

        Raises TimeoutError, or DeviceError when the device was lost.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"the request has not ended within {timeout:g} s")
            if self._lost is not None:
                raise self._lost
            assert self._generation is not None
            return self._generation

    def __iter__(self) -> Iterator[Chunk]:
        """Chunks as they come, until the request has ended."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._unread) or self.done)
                batch = list(self._unread)
                self._unread.clear()
                if not batch:
                    if self._lost is not None:
                        raise self._lost
                    return
            yield Chunk("".join(text for _, text in batch), [i for ids, _ in batch for i in ids])

    # -- called by the link's poller --------------------------------------------------------------

    def on_tokens(self, ids: list[int], logprobs: list[float], stamp_ns: int) -> None:
        text = self._decoder.push(ids) if self._decoder else ""
        with self._changed:
            self._ids += ids
            self._logprobs += logprobs
            self._text.append(text)
            self._first_ns = self._first_ns or stamp_ns
            self._last_ns = stamp_ns
            self._unread.append((ids, text))
            self._changed.notify_all()

    def on_end(self, reason: FinishReason, details: list[int], stamp_ns: int) -> None:
        new_tokens, steps, pauses, position = details
        rest = self._decoder.finish() if self._decoder else ""
        with self._changed:
            if rest:
                self._text.append(rest)
                self._unread.append(([], rest))
            decode_s = (self._last_ns - self._first_ns) / 1e9
            error = None
            if reason == FinishReason.ERROR:
                error = f"the target's logits hold NaN or +inf at position {position}"
            if new_tokens != len(self._ids):
                error = f"the device emitted {new_tokens} tokens, {len(self._ids)} arrived"
                reason = FinishReason.ERROR
            self._generation = Generation(
                text="".join(self._text),
                token_ids=self._ids,
                logprobs=self._logprobs,
                finish_reason=reason.name.lower(),
                stats=Stats(
                    tokens=new_tokens,
                    steps=steps,
                    ttft_s=(self._first_ns - self._submitted_ns) / 1e9 if self._first_ns else 0.0,
                    tok_s=(new_tokens - 1) / decode_s if new_tokens > 1 and decode_s > 0 else 0.0,
                    host_round_trips=1 + pauses,
                ),
                error=error,
            )
            self._changed.notify_all()

    def on_lost(self, error: DeviceError) -> None:
        with self._changed:
            self._lost = error
            self._changed.notify_all()
