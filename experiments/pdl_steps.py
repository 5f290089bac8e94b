"""A verify step of the persistent kernel against a graph of the same phases with dependent launch.

    python -m tests.gpu.kernels DIR timed-smollm2-135m timed-llama-3.2-1b     # anywhere
    python -m experiments.baselines.pdl_kernels DIR                           # anywhere
    python -m experiments.pdl_steps DIR                                       # needs a GPU; no DSL

Same weights, same pages, same rows: the logits of both are compared bit for bit first. us of a step
from tokens to choices: of the kernel by its own clock, of graphs by events, in a graph of two steps
(a replay a pair of steps) and of twenty. `plain edges`: the same graph without dependent launch.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch

from cute_kernels.gpu.config import product
from cute_kernels.gpu.load import Kernel
from cute_kernels.gpu.script import decode_step
from experiments.baselines.pdl_plan import MODELS
from experiments.common import need_gpu, parser, save

CASES = ((1024, 1), (1024, 16), (8192, 16))  # context, rows


def main() -> None:
    """Command line."""
    made = parser(__doc__, "pdl_steps")
    made.add_argument("folder", type=Path, help="kernels built beforehand")
    made.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    args = made.parse_args()
    need_gpu("pdl_steps", "kernels, see its docstring")
    torch.zeros(1, device="cuda")
    result: dict[str, Any] = {"models": {}}
    for name in args.models:
        result["models"][name] = measure(args.folder, name, 3 if args.quick else 7)
        save("pdl_steps", args.json, "cuda", result, args.quick)


def measure(folder: Path, name: str, rounds: int) -> list[dict[str, Any]]:
    """Every case of a model."""
    from experiments.baselines.pdl import PdlStep
    from experiments.gpu_steps import STEPS, step_us
    from tests.gpu.model import Context, Model
    from tests.gpu.rig import Rig

    c = product(name)
    weights = Model(c.shape, seed=3)
    packed = weights.packed(c)
    kernel = Kernel.read(folder / f"timed-{name}")
    out = []
    for context, rows in CASES:
        tokens = [(7 + 131 * i) % c.shape.vocab for i in range(rows)]
        step = decode_step(tokens, context, c.shape.layers)
        rig = Rig(kernel, c, packed, Context(c.shape, context, STEPS + 16, 4))
        record = rig.run([step])[0]
        want = rig.logits[:rows].clone()
        rival_context = Context(c.shape, context, STEPS + 16, 4)
        graph = PdlStep.of_test(folder, name, weights, rival_context)
        graph.begin(step, tokens)
        graph.run(0)
        got, chosen = graph.logits[:rows].clone(), graph.choose.chosen[:rows].tolist()
        graph.run(1)
        plain = PdlStep.of_test(folder, name, weights, rival_context, dependent=False)
        plain.begin(step, tokens)
        us: dict[str, list[float]] = {}
        for _ in range(rounds):  # in turn, so that a clock that drifts meets all of them
            for form, time in (
                ("kernel", lambda: step_us(rig, context, rows)["us"]),  # noqa: B023
                ("graph_pdl", lambda: graph.step_us(2, 20)),  # noqa: B023
                ("graph_pdl, 20 steps a graph", lambda: graph.step_us(20, 3)),  # noqa: B023
                ("graph of plain edges", lambda: plain.step_us(2, 20)),  # noqa: B023
            ):
                us.setdefault(form, []).append(time())
        row: dict[str, Any] = {
            "context": context, "rows": rows,
            "logits_equal": bool(torch.equal(got, want) and torch.equal(graph.logits[:rows], want)),
            "choices_equal": chosen == record["token"][:rows].tolist(),
            "us": {form: statistics.median(values) for form, values in us.items()},
            "us_range": {form: [min(values), max(values)] for form, values in us.items()},
        }  # fmt: skip
        row["graph_pdl / kernel"] = row["us"]["graph_pdl"] / row["us"]["kernel"]
        out.append(row)
        print(
            f"{name:14s} context {context} rows {rows}: logits"
            f" {'equal' if row['logits_equal'] else 'DIFFERENT'}, choices"
            f" {'equal' if row['choices_equal'] else 'DIFFERENT'}, "
            + ", ".join(f"{form} {v:.1f} us" for form, v in row["us"].items()),
            flush=True,
        )
    return out


if __name__ == "__main__":
    main()
