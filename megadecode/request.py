"""A request's life on the host: its handle, its chunks and its result."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from host.errors import DeviceError
from host.wire import FinishReason
from megadecode.options import wait_s
from megadecode.stop_strings import StopStrings


class TextDecoder(Protocol):
    """Turns token ids into text piece by piece; see `megadecode.models.stream.TextStream`."""

    def push(self, ids: list[int]) -> str: ...

    def finish(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Stats:
    """Figures of one request.

    `prompt_tokens` read; `tokens` emitted, in `steps` decode or verify steps (prefill chunks not
    counted); `accepted[k]` of these steps committed k tokens, so that tau is `tokens / steps`.
    `ttft_s`: from submit to the first token, 0.0 without one. `tok_s`: tokens after the first per
    second of the time between the first and the last, by the device's clock; prefill is not in it.
    0.0 for fewer than two tokens. `host_round_trips`: times the device had to hear from the host:
    once to get the request, and once for every time it stood still because nobody took its
    completions.
    """

    tokens: int
    steps: int
    ttft_s: float
    tok_s: float
    host_round_trips: int
    accepted: tuple[int, ...] = ()
    prompt_tokens: int = 0

    @property
    def tau(self) -> float:
        """Tokens committed per step."""
        return self.tokens / self.steps if self.steps else 0.0


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of a request.

    `text` is what the tokens say, special tokens left out. `token_ids` are all emitted tokens, a
    stop token included, and `logprobs` the log-probability of each under the target, before bias
    and temperature. `top_logprobs` are as many (id, log-probability) alternatives per token as were
    asked for, the likeliest first. `finish_reason` is one of `stop`, `length`, `abort`, `error`;
    with `error`, `error` says what happened, with `stop`, `stop_reason` is the token id or the stop
    string that did it. At a stop string, text ends before it, and ids and log-probabilities with
    the token that completed it.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    stats: Stats
    error: str | None = None
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    stop_reason: int | str | None = None


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

    def __init__(
        self,
        prompt_tokens: int,
        decoder: TextDecoder | None,
        *,
        stops: Sequence[str] = (),
        min_new_tokens: int = 0,
        alternatives: int = 0,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.request_id = -1
        self._decoder = decoder
        self._abort: Callable[[int], None] | None = None
        self._owner: object = None  # the engine, which must live as long as the request
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []
        self._stops = StopStrings(stops) if stops else None
        self._min_new_tokens = min_new_tokens
        self._pairs_per_token = 1 + alternatives
        self._pairs: list[tuple[int, float]] = []  # of a token that is not complete yet
        self._top: list[list[tuple[int, float]]] = []
        self._accepted: dict[int, int] = {}  # step -> tokens it committed
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
        limit = wait_s("timeout", timeout)
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, limit):
                raise TimeoutError(f"the request has not ended within {limit:g} s")
            if self._lost is not None:
                raise self._lost
            assert self._generation is not None
            return self._generation

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until there is a chunk to read or the request has ended, up to `timeout` seconds;
        whether there is or it has."""
        limit = wait_s("timeout", timeout)
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._unread) or self.done, limit)

    def __iter__(self) -> Iterator[Chunk]:
        """Chunks as they come, until the request has ended."""
        while True:
            with self._changed:
                self.wait()
                chunk, _ = self.take()
                if chunk is None:
                    if self._lost is not None:
                        raise self._lost
                    return
            yield chunk

    def take(self) -> tuple[Chunk | None, bool]:
        """What has come since the last look, or None, and whether that was all. Never waits."""
        with self._changed:
            if not self._unread:
                return None, self.done
            batch = list(self._unread)
            self._unread.clear()
            chunk = Chunk("".join(text for _, text in batch), [i for ids, _ in batch for i in ids])
            return chunk, self.done

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Have `listener()` called at every change from now on, by a thread that must not wait;
        and once now, for what has been missed."""
        with self._changed:
            self._listeners.append(listener)
        listener()

    def remove_listener(self, listener: Callable[[], None]) -> None:
        """No call of it begins after this returns."""
        with self._changed:
            self._listeners.remove(listener)

    def _notify(self) -> None:
        """Something has come; the lock is held."""
        self._changed.notify_all()
        for listener in self._listeners:
            listener()

    # -- called by the link's poller --------------------------------------------------------------

    def on_pairs(
        self, ids: list[int], logprobs: list[float], accepted: int, step: int, stamp_ns: int
    ) -> None:
        with self._changed:
            self._accepted[step] = accepted
            self._pairs += zip(ids, logprobs)
            per = self._pairs_per_token
            new: list[int] = []
            text: list[str] = []
            while len(self._pairs) >= per and not self._is_stopped():
                (token, logprob), *top = self._pairs[:per]
                del self._pairs[:per]
                new.append(token)
                self._ids.append(token)
                self._logprobs.append(logprob)
                self._top.append([pair for pair in top if pair[0] >= 0])
                text.append(self._read(token))
            if not new:
                return
            self._first_ns = self._first_ns or stamp_ns
            self._last_ns = stamp_ns
            self._text.append("".join(text))
            self._unread.append((new, self._text[-1]))
            stopped = self._is_stopped()
            self._notify()
        if stopped and self._abort is not None:
            self._abort(self.request_id)

    def _is_stopped(self) -> bool:
        return self._stops is not None and self._stops.hit is not None

    def _read(self, token: int) -> str:
        """The text that may be shown now that this token has come."""
        if self._decoder is None:
            return ""
        text = self._decoder.push([token])
        if self._stops is None:
            return text
        if len(self._ids) < self._min_new_tokens:
            return self._stops.finish() + text
        return self._stops.push(text)

    def on_end(self, reason: FinishReason, details: list[int], stamp_ns: int) -> None:
        new_tokens, steps, pauses, position = details
        rest = ""
        with self._changed:
            arrived = len(self._ids) + len(self._pairs) // self._pairs_per_token
            if self._is_stopped():
                reason = FinishReason.STOP
                arrived = new_tokens
            elif self._decoder is not None:
                rest = self._decoder.finish()
                if self._stops is not None:
                    rest = self._stops.push(rest) + self._stops.finish()
            if rest:
                self._text.append(rest)
                self._unread.append(([], rest))
            decode_s = (self._last_ns - self._first_ns) / 1e9
            error = None
            if reason == FinishReason.ERROR:
                error = f"the target's logits hold NaN or +inf at position {position}"
            if new_tokens != arrived:
                error = f"the device emitted {new_tokens} tokens, {arrived} arrived"
                reason = FinishReason.ERROR
            tokens = len(self._ids)
            histogram = [0] * (1 + max(self._accepted.values(), default=0))
            for accepted in self._accepted.values():
                histogram[accepted] += 1
            self._owner = None
            self._generation = Generation(
                text="".join(self._text),
                token_ids=list(self._ids),
                logprobs=list(self._logprobs),
                finish_reason=reason.name.lower(),
                stats=Stats(
                    tokens=tokens,
                    steps=steps,
                    ttft_s=(self._first_ns - self._submitted_ns) / 1e9 if self._first_ns else 0.0,
                    tok_s=(tokens - 1) / decode_s if tokens > 1 and decode_s > 0 else 0.0,
                    host_round_trips=1 + pauses,
                    accepted=tuple(histogram),
                    prompt_tokens=self.prompt_tokens,
                ),
                error=error,
                top_logprobs=list(self._top) if self._pairs_per_token > 1 else [],
                stop_reason=self._stop_reason(reason),
            )
            self._notify()

    def _stop_reason(self, reason: FinishReason) -> int | str | None:
        if reason != FinishReason.STOP:
            return None
        return self._stops.hit if self._stops and self._stops.hit is not None else self._ids[-1]

    def on_lost(self, error: DeviceError) -> None:
        with self._changed:
            self._owner = None
            self._lost = error
            self._notify()


class Stream(Iterator[Chunk]):
    """Chunks of a request; it is aborted when nobody is left to read them."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._chunks = iter(request)

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def close(self) -> None:
        """Abort the request if it has not ended."""
        self._request.abort()

    def __del__(self) -> None:
        self.close()
