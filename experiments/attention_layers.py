"""What attention costs:  python -m experiments.attention_layers DIR RESULT.json

us per layer of one slot, a layer waiting for the words of the one before it, from two launches of
different length (so that launch and first-step costs cancel), median of 9. One hand-off to the next
layer is in every figure. Kernels: python -m tests.gpu.attention_kernels DIR, anywhere.

Predicted for llama-3.2-1b before the first run: 4.8 us at 1,024 positions and 1 row, 5.6 at 16
rows, 2.8 at 16 positions. One H200 said 4.4, 6.5 and 2.8 and, by the stamps, that merging waits
1.4 us for the row's tail.
"""

import json
import pathlib
import statistics
import sys

import torch

from cute_kernels.gpu.load import Kernel
from experiments.provenance import provenance
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


def where(kernel: Kernel, name: str, context: int, rows: int) -> dict[str, list[float]]:
    """us between the stamps of the last layer, in the CTA of split 0 of the first kv head: of the
    warp that merges and of the warp that does the tail."""
    case = Case(kernel, TIMED[name], context, chain(rows), 1, LAYERS)
    spans = []
    for _ in range(9):
        launch_us(case, LAYERS)
        spans.append(case.stamps[0, :, :9].diff().cpu())
    us = torch.stack(spans).double().median(0).values / CLOCK_MHZ
    return {n: [round(v, 2) for v in both] for n, both in zip(STAMPS, us.T.tolist(), strict=True)}


def main(folder: pathlib.Path, target: pathlib.Path) -> None:
    results: dict = {"provenance": provenance(), "us": {}, "stamps": {}}
    torch.zeros(1, device="cuda")  # the context that kernels are loaded into
    columns = [(n, r) for n in CONTEXTS for r in ROWS]
    print(f"{'us a layer':16s}" + "".join(f"{n:>7d} r{r:<2d}" for n, r in columns))
    for model in MODELS:
        name, row = f"attention-{model}", {}
        kernel = Kernel.read(folder / name)
        for context, rows in columns:
            case = Case(kernel, ATTENTION[name], context, chain(rows), 1, LAYERS)
            row[f"context {context}, rows {rows}"] = round(layer_us(case), 2)
        results["us"][model] = row
        print(f"{model:16s}" + " ".join(f"{v:10.2f}" for v in row.values()), flush=True)
    for name in TIMED:
        for context, rows in ((16, 1), (1024, 1), (1024, 16)):
            spans = where(Kernel.read(folder / name), name, context, rows)
            results["stamps"][f"{name}, context {context}, rows {rows}"] = spans
            print(f"{name} {context} r{rows}:", *(f"{n} {a}/{b}" for n, (a, b) in spans.items()))
    target.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
