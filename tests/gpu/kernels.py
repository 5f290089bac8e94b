"""The kernels of the GPU tests:  python -m tests.gpu.kernels DIR   builds them on any machine.

Then, where the GPU is:

    MEGADECODE_CUBINS=DIR python -m pytest --confcutdir=tests/gpu tests/gpu
"""

import dataclasses
import json
import pathlib
import sys

from cute_kernels.gpu.config import LLAMA_1B, SMOLLM2, Config

# two layers are enough to pass every buffer copy on; the small vocabulary keeps weights small
SMALL_LLAMA = dataclasses.replace(LLAMA_1B, layers=4, vocab=16384)
SMALL_SMOL = dataclasses.replace(SMOLLM2, layers=5, vocab=4096)
SMOL = dict(warps=6, down_split=1, stage_bytes=9216, stages=16, red_buffers=2)
STEPS = {
    "step-llama-8": Config(SMALL_LLAMA, rows=8),
    "step-llama-16": Config(SMALL_LLAMA),
    "step-smol-72": Config(SMALL_SMOL, ctas=72, **SMOL),
    "step-smol-132": Config(SMALL_SMOL, ctas=132, **SMOL),
    "step-llama-pair": Config(SMALL_LLAMA, exchange="cluster", down_split=2, passes=2, stages=12),
    "step-smol-cluster": Config(
        SMALL_SMOL, ctas=120, exchange="cluster", **{**SMOL, "down_split": 4}
    ),
    "step-smol-global": Config(SMALL_SMOL, ctas=128, **{**SMOL, "down_split": 4}),
}
ONE_LAYER = dataclasses.replace(LLAMA_1B, layers=1, vocab=16384)
ONE_SMOL = dataclasses.replace(SMOLLM2, layers=1, vocab=4096)
ATTENTION = {
    "attention-llama": Config(ONE_LAYER, ctas=128, attention=True, stages=12, setmaxnreg=True),
    "attention-smol": Config(
        ONE_SMOL, attention=True, splits=32, **{**SMOL, "stage_bytes": 16384, "stages": 11}
    ),
}
TURNSTILES = (2, 32, 132)


def probe_makers() -> dict:
    from cute_kernels.gpu import echo, probes

    makers = {f"turnstile-{n}": (lambda n=n: probes.make_turnstile(n)) for n in TURNSTILES}
    makers["echo"] = lambda: echo.make_echo(132)
    makers["barrier"] = lambda: probes.make_barrier(132)
    makers["ring"] = lambda: probes.make_ring_race(132, dependent=True)
    makers["ring-independent"] = lambda: probes.make_ring_race(132, dependent=False)
    return makers


def main(folder: pathlib.Path) -> None:
    from cute_kernels.gpu import build

    folder.mkdir(parents=True, exist_ok=True)
    cache = folder.parent / "cache"
    artefacts = {n: build.build(n, m, "sm_90a", cache) for n, m in probe_makers().items()}
    artefacts |= {n: build.build_step(c, cache) for n, c in (STEPS | ATTENTION).items()}
    for name, a in artefacts.items():
        (folder / f"{name}.cubin").write_bytes(a.cubin)
        (folder / f"{name}.json").write_text(json.dumps(a.manifest))
        print(f"{name}: {a.manifest['reg']} registers")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
