"""`megadecode.run`: one prompt, one answer."""

from __future__ import annotations

import os
import threading
from typing import Any

from host.errors import DeviceError
from megadecode.engine import Engine
from megadecode.options import flag, path_or_name
from megadecode.prompt import Prompt
from megadecode.request import Generation
from megadecode.sampling import SamplingParams

_lock = threading.Lock()
_kept: _Kept | None = None


class _Kept:
    """The engine that `run` keeps, and how many calls use it now."""

    def __init__(self, key: tuple[Any, ...], engine: Engine) -> None:
        self.key, self.engine = key, engine
        self.users = 0
        self.replaced = False


def run(
    prompt: Prompt,
    model: str | os.PathLike[str] = "smollm2-135m",
    ctx: int = 65536,
    device: str = "auto",
    *,
    chat: bool = True,
    draft: str | os.PathLike[str] = "auto",
    budget: str | int = "auto",
    **sampling: Any,
) -> Generation:
    """Generate an answer to `prompt`.

    `prompt` is text (one user turn; raw text with `chat=False`), chat messages, or token ids;
    `sampling` are the fields of `SamplingParams`. The engine is kept for the next call with the
    same model, ctx, device and draft options, and replaced by a call with others once nobody uses
    it any more; use `Engine` to own one. Raises what `Engine` and `Engine.submit` raise.
    """
    params = SamplingParams(**sampling)
    flag("chat", chat)
    key = (path_or_name("model", model), ctx, device, path_or_name("draft", draft), budget)
    with _lock:
        kept = _take(key)
        kept.users += 1
    try:
        return kept.engine.submit(prompt, params, chat=chat).result()
    except DeviceError:
        with _lock:
            _replace(kept)  # a lost engine serves nobody again
        raise
    finally:
        with _lock:
            kept.users -= 1
            if kept.replaced and kept.users == 0:
                kept.engine.close()


def _take(key: tuple[Any, ...]) -> _Kept:
    """The kept engine for `key`, made if need be; the lock is held."""
    global _kept
    if _kept is not None and (_kept.key != key or _kept.engine.is_lost):
        _replace(_kept)
    if _kept is None:
        model, ctx, device, draft, budget = key
        _kept = _Kept(key, Engine(model, ctx, device=device, draft=draft, budget=budget))
    return _kept


def _replace(kept: _Kept) -> None:
    """Stop keeping an engine; it is closed when its last user is done. The lock is held."""
    global _kept
    kept.replaced = True
    if _kept is kept:
        _kept = None
    if kept.users == 0:
        kept.engine.close()


def close_kept() -> None:
    """End the engine that `run` keeps, if there is one."""
    with _lock:
        if _kept is not None:
            _replace(_kept)
