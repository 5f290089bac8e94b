"""The kernels of the GPU tests:  python -m tests.gpu.kernels DIR [name ...]   builds them anywhere.

Then, where the GPU is:

    MEGADECODE_CUBINS=DIR python -m pytest --confcutdir=tests/gpu tests/gpu
"""

import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable
from functools import partial

from cute_kernels.gpu.config import SHAPES, Config, product
from cute_kernels.gpu.prompt_plan import PARTS

# enough layers to pass every buffer copy on; a smaller vocabulary keeps weights small
LAYERS = {"llama-3.1-8b": 2, "qwen3-8b": 2}
VOCAB = {"llama-3.2-1b": 16384, "llama-3.1-8b": 16384, "qwen3-8b": 16376, "smollm2-135m": 8192}
TURNSTILES = (2, 32, 132)


def small(name: str, **changes) -> Config:
    """A preset at full width with few layers."""
    s = SHAPES[name]
    shape = dataclasses.replace(s, layers=LAYERS.get(name, 4), vocab=VOCAB.get(name, s.vocab))
    return product(shape, **changes)


def matrices(name: str) -> Config:
    """The same without attention: o reads q."""
    return small(name, attention=False, prompt=False)


def scripted() -> dict[str, Config]:
    """Kernels that are compared with torch, by file name."""
    whole = {f"decode-{name}": small(name) for name in SHAPES}
    return {f"matrices-{name}": matrices(name) for name in SHAPES} | whole


def drafting() -> dict[str, Config]:
    """Kernels whose DRAFT steps are compared with torch, by file name. SmolLM2's has room for its
    own drafter: five taps, the whole vocabulary."""
    found = {f"draft-{name}": small(name) for name in ("llama-3.2-1b", "qwen3-8b", "odd-960")}
    own = dataclasses.replace(SHAPES["smollm2-135m"], layers=6)
    least = dataclasses.replace(SHAPES["odd-768"], layers=2)  # every_step.py
    return {"draft-smollm2-135m": product(own), "draft-odd-768": product(least)} | found


def drafting_timed() -> dict[str, Config]:
    """Two of them with the times of every phase: experiments/gpu_draft_phases.py."""
    names = ("draft-smollm2-135m", "draft-llama-3.2-1b")
    return {f"{name}-phases": dataclasses.replace(drafting()[name], timing=True) for name in names}


def prompts() -> dict[str, tuple[Config, Callable]]:
    """The prompt segment ("all") and its parts, by file name."""
    from cute_kernels.gpu.prompt_kernel import make_prompt

    return {
        f"prompt-{name}-{part or 'all'}": (c, partial(make_prompt, c, part))
        for name in SHAPES
        for c in [small(name)]
        for part in ("", *PARTS)
    }


def timed() -> dict[str, Config]:
    """Whole models, whose steps are timed: experiments/gpu_steps.py."""
    models = ("smollm2-135m", "llama-3.2-1b", "llama-3.1-8b", "qwen3-8b")
    out = {f"timed-{name}": product(name) for name in models}
    for name in models[:2]:
        out[f"timed-{name}-phases"] = product(name, timing=True)
        out[f"timed-{name}-matrices"] = product(name, attention=False, prompt=False)
    return out


def probe_makers() -> dict:
    from cute_kernels.gpu import echo, probes

    makers = {f"turnstile-{n}": (lambda n=n: probes.make_turnstile(n)) for n in TURNSTILES}
    makers["echo"] = lambda: echo.make_echo(132)
    makers["barrier"] = lambda: probes.make_barrier(132)
    makers["ring"] = lambda: probes.make_ring_race(132, dependent=True)
    makers["ring-independent"] = lambda: probes.make_ring_race(132, dependent=False)
    return makers


def main(folder: pathlib.Path, names: list[str]) -> None:
    from cute_kernels.gpu import build

    folder.mkdir(parents=True, exist_ok=True)
    cache = folder.parent / "cache"
    makers = {
        name: partial(build.build, name, make, "sm_90a", cache)
        for name, make in probe_makers().items()
    }
    for name, (c, make) in prompts().items():
        makers[name] = partial(build.build, f"{name} {c}", make, c.arch, cache)
    for name, c in (scripted() | drafting() | drafting_timed() | timed()).items():
        makers[name] = partial(build.build_kernel, c, "script", cache)
    for name in names or makers:
        start = time.perf_counter()
        a = makers[name]()
        (folder / f"{name}.cubin").write_bytes(a.cubin)
        (folder / f"{name}.json").write_text(json.dumps(a.manifest))
        m = a.manifest
        print(
            f"{name:28s} {time.perf_counter() - start:5.1f} s  {m['reg']} registers,"
            f" {m['stack']} B stack, {m['smem']} B shared",
            flush=True,
        )


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
