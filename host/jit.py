"""The one way this project compiles numba code: nogil, and cached by content.

numba's own cache looks at the time stamp of the file that holds the function, not at what the
function calls, so an edit of a callee in another file would go unseen. Here the cache folder's name
is a digest of every source file that can end up in compiled code, so a stale entry cannot be found.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import llvmlite
import numba
from numba.core import config
from numba.core.types.misc import unliteral

from host.cache import cache_home

F = TypeVar("F", bound=Callable[..., Any])

#: Checks every array index in compiled code; slow, for hunting faults. Part of the cache key.
BOUNDS_CHECK = os.environ.get("MEGADECODE_BOUNDSCHECK", "") not in ("", "0")

_ROOT = Path(__file__).resolve().parent.parent
_COMPILED_SOURCES = ("host/*.py", "cute_kernels/*.py", "cute_kernels/cpu/**/*.py")
_KEPT_CACHES = 4


@cache
def cache_folder() -> Path:
    """`<cache home>/numba/<digest>` for the sources, numba and options of this process."""
    digest = hashlib.sha256()
    for text in (numba.__version__, llvmlite.__version__, f"boundscheck={BOUNDS_CHECK}"):
        digest.update(text.encode() + b"\0")
    for pattern in _COMPILED_SOURCES:
        for path in sorted(_ROOT.glob(pattern)):
            digest.update(path.relative_to(_ROOT).as_posix().encode() + b"\0")
            digest.update(path.read_bytes() + b"\0")
    folder = cache_home() / "numba" / digest.hexdigest()[:20]
    _prune(folder)
    with contextlib.suppress(OSError):  # not there yet
        os.utime(folder)  # the time of the last use, by which `_prune` goes
    return folder


def _prune(current: Path) -> None:
    """Keep the newest few caches; an old one is only ever a waste of space."""
    try:
        others = [p for p in current.parent.iterdir() if p.is_dir() and p != current]
        others.sort(key=lambda p: p.stat().st_mtime, reverse=True)
    except OSError:
        return
    for old in others[_KEPT_CACHES - 1 :]:
        shutil.rmtree(old, ignore_errors=True)


def jit(function: F) -> F:
    """Compile `function` with numba: nopython, nogil, numpy division, disk cache by content."""
    before = config.CACHE_DIR
    config.CACHE_DIR = str(cache_folder())
    try:
        compiled: F = numba.njit(
            function, nogil=True, cache=True, error_model="numpy", boundscheck=BOUNDS_CHECK
        )
    finally:
        config.CACHE_DIR = before
    _forget_literals(compiled)
    return compiled


def _forget_literals(compiled: Any) -> None:
    """Make `f(0)` and `f(n)` inside compiled code call one and the same specialisation.

    numba types a constant argument as a literal and compiles the callee, and all it calls, once
    more for it: that doubled the time to compile the CPU device.
    """
    of_types = compiled.get_call_template

    def get_call_template(args: Any, kws: Any) -> Any:
        plain = {name: unliteral(kind) for name, kind in kws.items()}
        return of_types(tuple(unliteral(kind) for kind in args), plain)

    compiled.get_call_template = get_call_template
