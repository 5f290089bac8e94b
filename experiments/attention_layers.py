"""What attention costs:  python -m experiments.attention_layers DIR RESULT.json [model ...]

us per layer of one slot, a layer waiting for the words of the one before it, from two launches of
different length (so that launch and first-step costs cancel), median of 9. One hand-off to the next
layer is in every figure. KV is random and every layer's its own. Kernels: python -m
tests.gpu.attention_kernels DIR, anywhere.

Canonical order is compared with what one would write without it: all cached keys in masked blocks,
the step's own rows as one block more, everything merged in one go. That form is the drafter's
attention, causal and without a window, over a chain of rows (it also norms heads and writes no
pages). "4-8", "8-9": the canonical form with that many copies in flight, while running ahead and
while the ring starves.
"""

import json
import pathlib
import statistics

import torch

from cute_kernels.gpu.load import Kernel
from experiments.common import of_kernels
from experiments.provenance import provenance
from tests.gpu.attention_case import Case, chain
from tests.gpu.attention_kernels import ALL, FIGURES, FLIGHTS, LAYERS, TIMED
from tests.gpu.draft_attention_case import DraftCase

CONTEXTS = (16, 1024, 4096, 16384, 65536)
ROWS = (1, 16)
SM_MHZ = 1755  # of the SMs under this load, about


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


def kv_bytes(name: str, context: int) -> int:
    """Of a layer."""
    s = ALL[name].shape
    return 2 * s.kv_heads * s.head_dim * 2 * context


def row_of_figures(kernels: dict[str, Kernel], model: str, context: int, rows: int) -> dict:
    """us a layer of every form, GB/s of the canonical one."""
    out = {}
    name = f"attention-{model}"
    case = Case(kernels[name], ALL[name], context, chain(rows), 1, LAYERS)
    for label in ("", *(f"-{f}" for f in FLIGHTS)):
        case.kernel, case.c = kernels[name + label], ALL[name + label]
        out[label[1:] or "canonical"] = round(layer_us(case), 2)
    name = f"draft-{model}"
    del case
    case = DraftCase(kernels[name], ALL[name], context, rows, [(0, 1)] * LAYERS, 1)
    out["one merge"] = round(layer_us(case), 2)
    out["GB/s"] = round(kv_bytes(name, context) / out["canonical"] / 1e3)
    out["of one merge"] = round(out["canonical"] / out["one merge"], 3)
    return out


STAMPS = ("inputs", "blocks", "barrier", "published", "parts/tail", "both", "row out", "seen")


def where(kernel: Kernel, name: str, context: int, rows: int) -> dict[str, list[float]]:
    """us between the stamps of the last layer, in the CTA that merges row 0 of the first kv head:
    of the first warp, which merges, and of the last, which does the tail."""
    case = Case(kernel, TIMED[name], context, chain(rows), 1, LAYERS)
    spans = []
    for _ in range(9):
        launch_us(case, LAYERS)
        spans.append(case.stamps[case.c.splits - 1, :, :9].diff().cpu())
    us = torch.stack(spans).double().median(0).values / SM_MHZ
    return {n: [round(v, 2) for v in both] for n, both in zip(STAMPS, us.T.tolist(), strict=True)}


def main(folder: pathlib.Path, target: pathlib.Path, models: list[str]) -> None:
    results: dict = {"provenance": provenance(), "layers": {}, "stamps": {}}
    torch.zeros(1, device="cuda")  # the context that kernels are loaded into
    heading = True
    for model in models:
        names = [f"draft-{model}", f"attention-{model}"]
        names += [f"attention-{model}-{f}" for f in FLIGHTS]
        kernels = {n: Kernel.read(folder / n) for n in names}
        for context in CONTEXTS:
            for rows in ROWS:
                figures = row_of_figures(kernels, model, context, rows)
                if heading:
                    print(f"{'us a layer':36s}", *(f"{n:>12s}" for n in figures))
                    heading = False
                label = f"{model}, context {context}, rows {rows}"
                results["layers"][label] = figures
                print(f"{label:36s}", *(f"{v:12}" for v in figures.values()), flush=True)
    for name in [f"attention-{model}-t" for model in models]:
        for context, rows in ((16, 1), (1024, 1), (1024, 16)):
            spans = where(Kernel.read(folder / name), name, context, rows)
            results["stamps"][f"{name}, context {context}, rows {rows}"] = spans
            print(f"{name} {context} r{rows}:", *(f"{n} {a}/{b}" for n, (a, b) in spans.items()))
    target.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    asked = of_kernels(__doc__, "attention_layers", "names")
    main(asked.folder, asked.result, asked.names or list(FIGURES))
