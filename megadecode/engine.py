"""The engine: a model, a device, and requests that go through the wire between them."""

from __future__ import annotations

import logging
import operator
import os
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from cute_kernels.cpu.slots import AUTO
from cute_kernels.cpu.tree import MAX_NODES
from cute_kernels.plan import Shape
from host.ring import read_word
from host.wire import Word
from megadecode.cpu_device import (
    CHUNK_ROWS,
    MAX_SLOTS,
    MAX_WORKERS,
    WEIGHT_TYPES,
    CpuOptions,
    CpuParts,
    default_workers,
    start,
)
from megadecode.drafter.find import choose_drafter
from megadecode.drafter.io import Drafter
from megadecode.errors import EMPTY, ParameterError, PromptError
from megadecode.models.tokenizer import Tokenizer
from megadecode.models.weights import Weights
from megadecode.options import check_device, seconds, size
from megadecode.options import device_options as check_options
from megadecode.request import Chunk, Request
from megadecode.sampling import SamplingParams
from megadecode.trace import PhaseFigures, phase_figures

PAGE = 64
logger = logging.getLogger("megadecode")
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]] | np.ndarray


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A look at the engine. Pages are of 64 positions; `steps` counts from the first launch;
    `pauses` are the times the loop stood still because nobody took its completions; `launches`
    are starts of the loop, one more than it has parked."""

    state: str
    inflight: int
    pending: int
    free_slots: int
    free_pages: int
    pages: int
    steps: int
    pauses: int
    launches: int


_said: set[str] = set()


def _say_once(message: str) -> None:
    """A warning that a process gets to see once."""
    if message not in _said:
        _said.add(message)
        logger.warning(message)


class Engine(AbstractContextManager["Engine"]):
    """A model on a device, decoding until it is closed. Thread-safe.

    Args:
        model: a known name, the path of a GGUF file, or any `megadecode.models.weights.Weights`.
        ctx: positions a request may use, prompt and generated tokens together.
        slots: requests decoded at the same time, 1 to 16; further ones wait their turn.
        device: `auto` or `cpu`.
        draft: `auto`, a drafter that belongs to the model if there is one; `off`; or a drafter or
            the path of one. It never changes what is generated, only how fast.
        budget: nodes to verify per slot and step, the root not counted: 0 to 255, or `auto`, chosen
            step by step from measured times and acceptance.
        shape: `tree`, or `chain` (the budget is then its length).
        weights: `fp32` or `bf16`, the precision the weights are kept in.
        workers: threads of the CPU device; by default one per usable core.
        kv_tokens: KV positions shared by all slots; by default one full context and 2,048
            positions for each further slot. Memory is taken as it is first used.
        chunk_rows: prompt tokens per step, a multiple of 64.
        park_after_s: seconds of idleness after which the loop gives its cores back; the next
            request starts it again. Negative: never.

    Raises:
        ModelError, ParameterError, DeviceUnavailable: with what was wrong and what to do.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Weights = "smollm2-135m",
        ctx: int = 65536,
        slots: int = 16,
        device: str = "auto",
        *,
        draft: str | os.PathLike[str] | Drafter = "auto",
        budget: str | int = "auto",
        shape: str = "tree",
        weights: str = "fp32",
        workers: int | None = None,
        kv_tokens: int | None = None,
        chunk_rows: int = CHUNK_ROWS,
        park_after_s: float = 5.0,
        **device_options: Any,
    ) -> None:
        self.ctx = size("ctx", ctx, 2, 2**24)
        self.slots = size("slots", slots, 1, MAX_SLOTS)
        check_device(device)
        if weights not in WEIGHT_TYPES:
            raise ParameterError(f"weights is {weights!r}; choose {' or '.join(WEIGHT_TYPES)}")
        self.weights = weights
        if workers is None:
            workers = default_workers()
        workers = size("workers", workers, 1, MAX_WORKERS)
        chunk_rows = size("chunk_rows", chunk_rows, PAGE, 4096)
        if chunk_rows % PAGE:
            raise ParameterError(f"chunk_rows is {chunk_rows}; it must be a multiple of {PAGE}")
        if budget != "auto":
            budget = size("budget", budget, 0, MAX_NODES)
        if shape not in ("tree", "chain"):
            raise ParameterError(f"shape is {shape!r}; choose tree or chain")
        if kv_tokens is None:
            kv_tokens = self.ctx + MAX_NODES + (self.slots - 1) * min(self.ctx, 2048)
        self.pages = -(-(size("kv_tokens", kv_tokens, 1, 2**31) + 1) // PAGE)
        park_after_s = seconds("park_after_s", park_after_s)
        further = check_options(device_options)
        loaded, self.tokenizer = _load(model)
        self.config = loaded.config.for_context(self.ctx)
        self.drafter = choose_drafter(draft, loaded) if budget != 0 else None
        if self.drafter is None and draft != "off" and budget != 0:
            _say_once(f"no drafter belongs to {self.config.name}: decoding plainly")
        self._warned = False
        self._parts: CpuParts = start(
            self.config,
            loaded.tensor,
            CpuOptions(
                ctx=self.ctx,
                slots=self.slots,
                pages=self.pages,
                workers=workers,
                weights=weights,
                chunk_rows=chunk_rows,
                park_after_s=park_after_s,
                budget=AUTO if isinstance(budget, str) else budget,
                chain=shape == "chain",
                **further,
            ),
            self.drafter,
        )
        self._link = self._parts.link
        # The loop runs in memory of this process: it must have left it before the process ends,
        # or before this object's arrays go. `finalize` sees to both.
        self._finalizer = weakref.finalize(self, self._link.close)

    # -- requests ---------------------------------------------------------------------------------

    def encode(self, prompt: Prompt, *, chat: bool = True) -> np.ndarray:
        """The token ids of a prompt, `[n]` int32.

        A string is one user turn of a chat, or raw text with `chat=False`; a sequence of mappings
        is a conversation; a sequence of integers is taken as token ids.
        """
        if isinstance(prompt, str):
            if not prompt:
                self._refuse_empty()
            tokenizer = self._need_tokenizer()
            if chat:
                ids = tokenizer.chat([{"role": "user", "content": prompt}])
            else:
                ids = tokenizer.prompt(prompt)
            if not ids:
                raise PromptError("no token of the vocabulary stands for any byte of the prompt")
            return np.array(ids, np.int32)
        if isinstance(prompt, np.ndarray) and prompt.ndim:
            return self._token_ids(prompt) if len(prompt) else self._refuse_empty()
        if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
            raise PromptError(
                f"a prompt is text, chat messages or token ids, not {type(prompt).__name__}"
            )
        if len(prompt) == 0:
            self._refuse_empty()
        if isinstance(prompt[0], Mapping):
            return np.array(self._need_tokenizer().chat(prompt), np.int32)  # type: ignore[arg-type]
        return self._token_ids(prompt)

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
        served; nothing reaches the device then.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ParameterError(f"params is {params!r}; give a SamplingParams")
        if timeout is not None and not isinstance(timeout, int | float):
            raise ParameterError(f"timeout is {timeout!r}; it must be a number of seconds, or None")
        ids = self.encode(prompt, chat=chat)
        stops = params.stop_ids(self.config.stop_ids, self.config.vocab)
        self._check_fits(len(ids), params.max_new_tokens)
        if params.stop:
            self._need_tokenizer()
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
            timeout_s=timeout,
        )
        return request

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, chat: bool = True
    ) -> Iterator[Chunk]:
        """Chunks of one request as they come. Leaving the iterator early aborts the request."""
        request = self.submit(prompt, params, chat=chat)
        try:
            yield from request
        finally:
            request.abort()

    # -- the device -------------------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        """Whether the device can no longer be used: it hung, or the engine is closed."""
        return self._link.lost is not None

    def stats(self) -> EngineStats:
        """A look at slots, pages and counters, as of the last turn of the loop."""
        control = self._parts.wire.control
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
        )

    def trace(self, *, reset: bool = False) -> list[PhaseFigures]:
        """Time per phase since the start or the last reset, against bytes read and operations."""
        parts = self._parts
        drafter = None
        if self.drafter is not None:
            drafter = Shape(*parts.drafter.dims, taps=len(self.drafter.config.taps))
        figures = phase_figures(
            parts.trace.copy(),
            Shape(*parts.target.dims),
            2 if self.weights == "bf16" else 4,
            drafter,
        )
        if reset:
            parts.trace[:] = 0
        return figures

    def ping(self, timeout: float = 5.0) -> float:
        """Seconds until the device has answered a no-op request."""
        return self._link.ping(timeout)

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

    def _refuse_empty(self) -> NoReturn:
        raise PromptError(EMPTY)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise PromptError(
                f"model {self.config.name!r} has no tokenizer; give the prompt as token ids"
            )
        return self.tokenizer

    def _text_stream(self) -> Any:
        if self.tokenizer is None:
            return None
        from megadecode.models.stream import TextStream

        return TextStream(self.tokenizer)

    def _token_ids(self, prompt: Sequence[Any] | np.ndarray) -> np.ndarray:
        if not isinstance(prompt, np.ndarray):
            for at, token in enumerate(prompt):
                if isinstance(token, bool | np.bool_) or not hasattr(token, "__index__"):
                    raise PromptError(
                        f"token ids must be integers; position {at} holds {token!r:.80}"
                    )
            prompt = np.array([operator.index(token) for token in prompt], object)
        elif prompt.ndim != 1 or prompt.dtype.kind not in "iu":
            raise PromptError(
                f"token ids must be integers in one dimension; the array is {prompt.dtype} of "
                f"shape {prompt.shape}"
            )
        wrong = np.flatnonzero((prompt < 0) | (prompt >= self.config.vocab))
        if wrong.size:
            raise PromptError(
                f"token id {prompt[wrong[0]]} at position {wrong[0]} is outside the vocabulary of "
                f"{self.config.vocab} tokens"
            )
        return np.ascontiguousarray(prompt, np.int32)

    def _check_fits(self, prompt_tokens: int, max_new_tokens: int) -> None:
        if prompt_tokens + 1 > self.ctx:
            raise PromptError(
                f"the prompt has {prompt_tokens} tokens; with ctx={self.ctx} at most "
                f"{self.ctx - 1} fit. Shorten it or give the engine a larger ctx"
            )
        total = min(prompt_tokens + max_new_tokens, self.ctx)
        pages = -(-(total + self._parts.loop.limits.reserve_rows) // PAGE)
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
                stacklevel=3,
            )


def _load(model: str | os.PathLike[str] | Weights) -> tuple[Weights, Tokenizer | None]:
    if isinstance(model, str | os.PathLike):
        from megadecode.models.gguf_file import load
        from megadecode.models.store import resolve

        path: Path = resolve(model)
        loaded = load(path)
        return loaded, loaded.tokenizer()
    make = getattr(model, "tokenizer", None)
    return model, make() if callable(make) else None
