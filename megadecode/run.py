"""`megadecode.run`: one prompt, one answer."""

from __future__ import annotations

import os
import threading
from typing import Any

from megadecode.engine import Engine, Prompt
from megadecode.request import Generation
from megadecode.sampling import SamplingParams

_lock = threading.Lock()
_kept: tuple[tuple[Any, ...], Engine] | None = None


def run(
    prompt: Prompt,
    model: str | os.PathLike[str] = "smollm2-135m",
    ctx: int = 65536,
    device: str = "auto",
    *,
    chat: bool = True,
    **sampling: Any,
) -> Generation:
    """Generate an answer to `prompt`.

    `prompt` is text (one user turn; raw text with `chat=False`), chat messages, or token ids;
    `sampling` are the fields of `SamplingParams`. The engine is kept for the next call with the
    same model, ctx and device, and replaced by a call with others; use `Engine` to own one.
    Raises what `Engine` and `Engine.submit` raise.
    """
    params = SamplingParams.of(sampling)
    key = (os.fspath(model), ctx, device)
    global _kept
    with _lock:
        if _kept is None or _kept[0] != key:
            _close_kept()
            _kept = (key, Engine(model, ctx, slots=4, device=device))
        request = _kept[1].submit(prompt, params, chat=chat)
    return request.result()


def _close_kept() -> None:
    """End the engine that `run` keeps, if there is one."""
    global _kept
    if _kept is not None:
        _kept[1].close()
        _kept = None
