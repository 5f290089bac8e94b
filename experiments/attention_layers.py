"""What attention costs:  python -m experiments.attention_layers DIR   prints one short table.

us per layer of one slot, a layer waiting for the words of the one before it, from two launches of
different length (so that launch and first-step costs cancel), median of 9. Bytes: KV that a layer
must read. Kernels: python -m tests.gpu.attention_kernels DIR.
"""

import pathlib
import statistics
import sys

import torch

from cute_kernels.gpu.load import Kernel
from tests.gpu.attention_case import Case, chain
from tests.gpu.attention_kernels import ATTENTION, LAYERS, TIMED

MODELS = ("smollm2-135m", "llama-3.2-1b", "llama-3.1-8b", "qwen3-8b", "odd-960", "odd-768")
CONTEXTS = (16, 1024, 8192)
ROWS = (1, 16)
CLOCK_MHZ = 1755  # of the SMs under this load, about


def launch_us(case: Case, layers: int) -> float:
    case.layers = layers
    case.prepare()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    case.launch()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def layer_us(case: Case) -> float:
    times = [launch_us(case, LAYERS) - launch_us(case, LAYERS // 4) for _ in range(9)]
    return statistics.median(times) / (LAYERS - LAYERS // 4)


STAMPS = ("inputs", "blocks", "barrier", "published", "parts/tail", "both", "row out", "seen")


def where(kernel: Kernel, name: str, context: int, rows: int) -> None:
    """us between the stamps of the last layer, in the CTA of split 0 of the first kv head: of the
    warp that merges and of the warp that does the tail."""
    case = Case(kernel, TIMED[name], context, chain(rows), 1, LAYERS)
    spans = []
    for _ in range(9):
        launch_us(case, LAYERS)
        spans.append(case.stamps[0, :, :9].diff().cpu())
    spans = torch.stack(spans).double().median(0).values / CLOCK_MHZ
    for half, row in enumerate(spans.tolist()):
        text = " ".join(f"{n} {v:.2f}" for n, v in zip(STAMPS, row, strict=True))
        print(f"  {name} {context} rows {rows} half {half}: {text}")


def main(folder: pathlib.Path) -> None:
    torch.zeros(1, device="cuda")  # the context that kernels are loaded into
    print(f"{'':16s}" + "".join(f"{n:>7d} r{r:<2d}" for n in CONTEXTS for r in ROWS))
    for model in MODELS:
        name = f"attention-{model}"
        kernel, row = Kernel.read(folder / name), []
        for context in CONTEXTS:
            for rows in ROWS:
                case = Case(kernel, ATTENTION[name], context, chain(rows), 1, LAYERS)
                row.append(f"{layer_us(case):10.2f}")
        print(f"{model:16s}" + " ".join(row), flush=True)
    for name in TIMED:
        for context, rows in ((16, 1), (1024, 1), (1024, 16)):
            where(Kernel.read(folder / name), name, context, rows)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
