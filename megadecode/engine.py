"""The engine: a model, a device, and requests that go through the wire between them."""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from host.ring import read_word
from host.wire import Word
from megadecode import presets
from megadecode.async_request import AsyncRequest
from megadecode.device import AUTO_BUDGET, Parts, Settings, default_slots, prepare
from megadecode.drafter.find import choose_drafter
from megadecode.drafter.io import Drafter
from megadecode.errors import ParameterError, PromptError
from megadecode.limits import (
    MAX_CHUNK_ROWS,
    MAX_CTX,
    MAX_KV_TOKENS,
    MAX_NODES,
    MAX_SLOTS,
    PAGE,
)
from megadecode.models.tokenizer import Tokenizer
from megadecode.models.weights import Weights
from megadecode.options import choice, flag, path_or_name, positive_s, seconds, size, wait_s
from megadecode.prompt import Prompt, encode, need_tokenizer, numbered, pair_up
from megadecode.request import Chunk, Generation, Request, Stream
from megadecode.sampling import SamplingParams
from megadecode.split import StepSplit
from megadecode.trace import PhaseFigures

logger = logging.getLogger("megadecode")


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A look at the engine. Pages are of 64 positions; `steps` counts from the first launch;
    `pauses` are the times the loop stood still because nobody took its completions; `launches`
    are starts of the loop, one more than it has parked. `acceptance` says where drafts come from:
    `drafter`, or `scripted` for measuring; None without. `split`: where a step's time goes, on a
    device that counts it (a GPU); the CPU device has `Engine.trace`."""

    state: str
    inflight: int
    pending: int
    free_slots: int
    free_pages: int
    pages: int
    steps: int
    pauses: int
    launches: int
    acceptance: str | None = None
    split: StepSplit | None = None


_said: set[str] = set()


def _say_once(message: str) -> None:
    """A warning that a process gets to see once."""
    if message not in _said:
        _said.add(message)
        logger.warning(message)


class Engine(AbstractContextManager["Engine"]):
    """A model on a device, decoding until it is closed. Thread-safe.

    Args:
        model: a known name, the path of a GGUF file or of a Hugging Face folder, the id of a
            model on the hub (`org/name`), or any `megadecode.models.weights.Weights`.
            The shapes of `megadecode.presets` come with random weights and take token ids only.
        ctx: positions a request may use, prompt and generated tokens together.
        slots: requests decoded at the same time, 1 to 16; further ones wait their turn. None: the
            device's choice, 16 on the CPU.
        device: `auto` or `cpu`, or `cuda`: one request at a time.
        draft: `auto`, a drafter that belongs to the model if there is one; `off`; or a drafter or
            the path of one; of a shape of `megadecode.presets`, `random`, for measuring. It never
            changes what is generated, only how fast.
        budget: nodes to verify per slot and step, the root not counted: 0 to 255 (127 on a GPU),
            or `auto`: on the CPU chosen step by step from measured times and acceptance, on a GPU
            a number that was measured to be good, 7 or 15.
        shape: `tree`, or `chain` (the budget is then its length).
        weights: `fp32` or `bf16`, the precision the weights are kept in; None: the device's choice,
            fp32 on the CPU.
        kv_tokens: KV positions shared by all slots; by default one full context and 2,048
            positions for each further slot. Memory is taken as it is first used.
        chunk_rows: prompt tokens per step, a multiple of 64; None: the device's choice, 256 on the
            CPU.
        park_after_s: seconds of idleness after which the loop gives its cores back; the next
            request starts it again. Negative: never.
        device_options: of the CPU device, `workers`: its threads, 1 to 16, by default one per
            usable core; and sizes of its rings and pools.

    Raises:
        ModelError, ParameterError, DeviceUnavailable: with what was wrong and what to do.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Weights = "smollm2-135m",
        ctx: int = 65536,
        slots: int | None = None,
        device: str = "auto",
        *,
        draft: str | os.PathLike[str] | Drafter = "auto",
        budget: str | int = "auto",
        shape: str = "tree",
        weights: str | None = None,
        kv_tokens: int | None = None,
        chunk_rows: int | None = None,
        park_after_s: float = 5.0,
        **device_options: Any,
    ) -> None:
        self.ctx = size("ctx", ctx, 2, MAX_CTX)
        self.slots = size("slots", default_slots(device) if slots is None else slots, 1, MAX_SLOTS)
        if chunk_rows is not None:
            chunk_rows = size("chunk_rows", chunk_rows, PAGE, MAX_CHUNK_ROWS)
            if chunk_rows % PAGE:
                raise ParameterError(f"chunk_rows is {chunk_rows}; it must be a multiple of {PAGE}")
        nodes = AUTO_BUDGET if budget == "auto" else size("budget", budget, 0, MAX_NODES)
        if kv_tokens is None:
            kv_tokens = self.ctx + MAX_NODES + (self.slots - 1) * min(self.ctx, 2048)
        self.pages = -(-(size("kv_tokens", kv_tokens, 1, MAX_KV_TOKENS) + 1) // PAGE)
        settings = Settings(
            ctx=self.ctx,
            slots=self.slots,
            pages=self.pages,
            weights=weights,
            chunk_rows=chunk_rows,
            park_after_s=seconds("park_after_s", park_after_s),
            budget=nodes,
            chain=choice("shape", shape, "tree", "chain") == "chain",
        )
        if not isinstance(draft, Drafter):
            draft = path_or_name("draft", draft)
        if not hasattr(model, "tensor"):
            model = path_or_name("model", model)
        start = prepare(device, settings, device_options)
        loaded, self.tokenizer = _load(model, device)
        self.config = loaded.config.for_context(self.ctx)
        self.drafter = choose_drafter(draft, loaded) if budget != 0 else None
        if self.drafter is None and draft != "off" and budget != 0:
            _say_once(f"no drafter belongs to {self.config.name}: decoding plainly")
        self._warned = False
        self._parts: Parts = start(self.config, loaded.tensor, self.drafter)
        self._link = self._parts.link
        # The loop runs in memory of this process: it must have left it before the process ends,
        # or before this object's arrays go. `finalize` sees to both.
        self._finalizer = weakref.finalize(self, self._link.close)

    # -- requests ---------------------------------------------------------------------------------

    def encode(self, prompt: Prompt, *, chat: bool = True) -> np.ndarray:
        """The token ids of a prompt, `[n]` int32.

        A string is one user turn of a chat, or raw text with `chat=False`; a sequence of mappings
        is a conversation; a sequence of integers is taken as token ids. Raises PromptError.
        """
        return encode(prompt, self.config, self.tokenizer, chat=flag("chat", chat))

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        chat: bool = True,
        timeout: float | None = None,
    ) -> Request:
        """Queue a request and return its handle at once.

        Waits only while as many requests as the engine can hold are in flight, up to `timeout`
        seconds, then raises QueueFull. Raises PromptError or ParameterError for what can never be
        served; nothing reaches the device then. Raises DeviceError when the device was lost.
        """
        limit = wait_s("timeout", timeout)
        return self._send(*self._check(prompt, params, chat), limit)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, chat: bool = True
    ) -> Iterator[Chunk]:
        """Chunks of one request as they come. Leaving the iterator early aborts the request.

        Raises what `submit` raises, at the call.
        """
        return Stream(self.submit(prompt, params, chat=chat))

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat: bool = True,
    ) -> list[Generation]:
        """Answers to many prompts, in their order, as many at a time as there are slots.

        `params` are one for all, or one per prompt. All prompts are checked before the first is
        sent: PromptError or ParameterError then names the one that is wrong, and none is decoded.
        Leaving early, by an interrupt or an error of the device, aborts what is still in flight.
        """
        checked = []
        for number, job in enumerate(pair_up(prompts, params)):
            with numbered(number):
                checked.append(self._check(*job, chat))
        requests: list[Request] = []
        try:
            for ready in checked:
                requests.append(self._send(*ready, None))
            return [request.result() for request in requests]
        finally:
            for request in requests:
                request.abort()  # nothing, once it has ended

    def agenerate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, chat: bool = True
    ) -> AsyncRequest:
        """A request for asyncio: await it for its Generation, or iterate it for its chunks.

        It starts when it is first awaited or iterated; cancelling the task that waits for it, or
        leaving the iteration early, aborts it. It is no coroutine: `asyncio.ensure_future` and
        `gather` take it, `asyncio.create_task` wants one around it. Raises PromptError or
        ParameterError at the call, DeviceError where it is awaited.
        """
        job = self._check(prompt, params, chat)
        return AsyncRequest(lambda: self._send(*job, 0.0))

    def _check(
        self, prompt: Prompt, params: SamplingParams | None, chat: bool
    ) -> tuple[np.ndarray, SamplingParams, list[int]]:
        """Everything about a request that can be judged before it is sent: its ids, parameters and
        stop ids."""
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ParameterError(f"params is {params!r}; give a SamplingParams")
        ids = self.encode(prompt, chat=chat)
        stops = params.stop_ids(self.config.stop_ids, self.config.vocab)
        self._check_fits(len(ids), params.max_new_tokens)
        self._parts.refuse(params)
        if params.stop:
            need_tokenizer(self.tokenizer, self.config)
        return ids, params, stops

    def _send(
        self, ids: np.ndarray, params: SamplingParams, stops: list[int], timeout_s: float | None
    ) -> Request:
        request = Request(
            len(ids),
            self._text_stream(),
            stops=params.stop,
            min_new_tokens=params.min_new_tokens,
            alternatives=params.logprobs,
        )
        request._abort = self._link.abort
        request._owner = self
        self._link.submit(
            ids,
            params.max_new_tokens,
            params.record(stops),
            request,
            bias=params.bias_arrays(),
            timeout_s=timeout_s,
        )
        return request

    # -- the device -------------------------------------------------------------------------------

    @property
    def weights(self) -> str:
        """The type that the weights are kept in."""
        return self._parts.weights

    @property
    def is_lost(self) -> bool:
        """Whether the device can no longer be used: it hung, or the engine is closed."""
        return self._link.lost is not None

    def stats(self) -> EngineStats:
        """A look at slots, pages and counters, as of the last turn of the loop."""
        control = self._link.wire.control
        started = self._link.launches > 0

        def word(which: Word, before_launch: int) -> int:
            return int(read_word(control, which)) if started else before_launch

        return EngineStats(
            state=self._link.state().name.lower(),
            inflight=self._link.inflight,
            pending=word(Word.PENDING, 0),
            free_slots=word(Word.FREE_SLOTS, self.slots),
            free_pages=word(Word.FREE_PAGES, self.pages),
            pages=self.pages,
            steps=word(Word.STEP, 0),
            pauses=word(Word.PAUSES, 0),
            launches=self._link.launches,
            acceptance=self._parts.acceptance,
            split=self._parts.split(),
        )

    def trace(self, *, reset: bool = False) -> list[PhaseFigures]:
        """Time per phase since the start or the last reset, against bytes read and operations.

        Empty on a GPU: its steps' parts are in `stats().split`."""
        return self._parts.figures(reset=flag("reset", reset))

    def read_gb_per_s(self) -> float:
        """What the device reads from its memory at best, measured now with the loop parked."""
        with self.parked():
            return self._parts.read_gb_per_s()

    def ping(self, timeout: float = 5.0) -> float:
        """Seconds until the device has answered a no-op request."""
        return self._link.ping(positive_s("timeout", timeout))

    def park(self) -> None:
        """Make the loop leave the device at the next step boundary and wait until it has.

        Requests in flight keep their place; `submit` or `unpark` starts the loop again.
        """
        self._link.park()

    def unpark(self) -> None:
        """Start a parked loop again."""
        self._link.unpark()

    def parked(self) -> AbstractContextManager[None]:
        """Keep the loop off the device for the body of a `with`."""
        return self._link.parked()

    def close(self) -> None:
        """Abort what is in flight and end the loop. Idempotent; `with Engine(...)` calls it."""
        self._finalizer()

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- inside -----------------------------------------------------------------------------------

    def _text_stream(self) -> Any:
        if self.tokenizer is None:
            return None
        from megadecode.models.stream import TextStream

        return TextStream(self.tokenizer)

    def _check_fits(self, prompt_tokens: int, max_new_tokens: int) -> None:
        if prompt_tokens + 1 > self.ctx:
            raise PromptError(
                f"the prompt has {prompt_tokens} tokens; with ctx={self.ctx} at most "
                f"{self.ctx - 1} fit. Shorten it or give the engine a larger ctx"
            )
        total = min(prompt_tokens + max_new_tokens, self.ctx)
        pages = -(-(total + self._parts.reserve_rows) // PAGE)
        if pages > self.pages:
            raise PromptError(
                f"the request needs {pages} KV pages of {PAGE} positions, the engine has "
                f"{self.pages}; ask for fewer tokens or give the engine more kv_tokens"
            )
        if total > self.config.context_tokens and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.config.name} was trained for {self.config.context_tokens} positions; this "
                f"request may reach {total}, and text beyond the trained length is often poor",
                stacklevel=4,
            )


def _load(model: str | os.PathLike[str] | Weights, device: str) -> tuple[Weights, Tokenizer | None]:
    if model in presets.NAMES:
        return presets.Preset(str(model), where="cuda" if device == "cuda" else "cpu"), None
    if isinstance(model, str | os.PathLike):
        from megadecode.models.load import load_model

        loaded = load_model(model)
        return loaded, loaded.tokenizer()
    make = getattr(model, "tokenizer", None)
    return model, make() if callable(make) else None
