"""The whole persistent kernel without a GPU, of models small enough for it; torch on the CPU in the
place of torch on a GPU."""

from __future__ import annotations

import ctypes
import pathlib
from types import SimpleNamespace
from typing import Any

import torch

from cute_kernels.gpu import build
from cute_kernels.gpu.config import Config, Shape
from tests.emulator.device import compile_c

TINY = {
    "narrow": Config(
        Shape("tiny-64", 192, 384, 3, 1, 64, 520, 2), ctas=4, warps=6, splits=4, stages=9,
        red_buffers=2, probe_from=9,
    ),
    "wide": Config(
        Shape("tiny-128", 256, 1024, 2, 1, 128, 520, 2, qk_norm=True, tied=False), ctas=4, warps=8,
        down_split=2, splits=4, stages=10, setmaxnreg=True, ask_at_once=5,
    ),
}  # fmt: skip
"""Of the two forms that are built: short phases; teams that share K, and registers moved."""

MAKERS = (
    "arange",
    "empty",
    "full",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "tensor",
    "zeros",
)


class EmulatedKernel:
    """`cute_kernels.gpu.load.Kernel` of a scripted kernel; every launch interleaves otherwise."""

    def __init__(self, c: Config, folder: pathlib.Path) -> None:
        from cute_kernels.gpu.kernel import make_kernel

        at = folder / f"{c.shape.name}-{build.source_hash()}.ptx"
        if not at.exists():
            folder.mkdir(parents=True, exist_ok=True)
            launch, args, _ = make_kernel(c, "script")
            at.write_text(build.compile_kernel(launch, args, c.arch)[0])
        # by the time of its own thread: other work on the machine brings no deadline nearer
        library = compile_c(at.read_text(), folder, clock="CLOCK_THREAD_CPUTIME_ID")
        self.c, self.library, self.launches = c, library, 0

    def launch(self, values: list[int], types: str, stream: int = 0) -> None:
        """Until the kernel has left."""
        assert types == "q"
        self.launches += 1
        never = ctypes.c_int(0)
        status = self.library.run_grid(
            self.c.ctas, self.c.block, values[0], ctypes.byref(never), self.launches
        )
        if status:
            raise RuntimeError(f"the emulated kernel ended with status {status}")


def pretend(monkeypatch: Any) -> None:
    """What asks torch for a GPU gets the CPU."""

    def on_the_cpu(make: Any) -> Any:
        def made(*args: Any, **how: Any) -> Any:
            if "cuda" in str(how.get("device", "")):
                how["device"] = "cpu"
            return make(*args, **how)

        return made

    for name in MAKERS:
        monkeypatch.setattr(torch, name, on_the_cpu(getattr(torch, name)))
    generator, to = torch.Generator, torch.Tensor.to
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": generator("cpu"))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *_, **__: self)
    monkeypatch.setattr(torch.nn.Module, "cuda", lambda self, *_, **__: self)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, *a, **how: to(self, *(x for x in a if x != "cuda"), **how)
    )
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
