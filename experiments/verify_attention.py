"""Verify attention by kernel, by splits of the keys, by width of loads; alone and end to end.

    python -m experiments.verify_attention

`layer`: us of one layer's attention of N tree rows behind a context, in a captured graph, over
copies of the cache so that L2 does not keep a short one: torch's with an additive mask, and
split-KV in Triton with 1 to 128 splits, with vector loads and with loads value by value. `steps`:
us of a whole step of `graph_host_tree` with the same choices, and without graphs: what is left of a
kernel's gain where a host's loop is around it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from experiments.baseline_steps import COMMITTED, forget, timed
from experiments.baselines import Eager, HostTree, Setup
from experiments.baselines.attention import Sdpa
from experiments.baselines.models import OnDevice, open_model
from experiments.common import need_gpu, parser, quiet, save
from experiments.kv_fragmentation import COPIES, SHAPES, graph_us, read_all

SPLITS = (1, 4, 16, 64, 128)
ROWS = (1, 16, 64)
CONTEXTS = (4096, 16384, 65536)
MOST_STEPS = 16384  # context up to which torch's attention is part of the steps


def layer(model: str, rows: int, context: int, rounds: int) -> dict[str, float]:
    """us by kernel."""
    from experiments.baselines.split_kv import SplitKv

    device, (heads, kv_heads, d) = torch.device("cuda"), SHAPES[model]
    capacity = context + 256
    q = torch.randn(rows, heads, d, device=device).bfloat16()
    tree = torch.ones(rows, rows, dtype=torch.uint8, device=device).tril()
    length = torch.tensor([context], device=device)
    pool = torch.randn(COPIES, 2, kv_heads, capacity, d, device=device).bfloat16()
    us: dict[str, float] = {}
    masked = Sdpa(rows, heads, kv_heads)
    masked.begin(capacity, length, tree, pool)

    def torch_s() -> None:
        for keys, values in pool:
            masked(q, keys, values)

    us["torch, masked"] = graph_us(torch_s, rounds) / COPIES
    for splits in SPLITS:
        for scalar in (False, True) if splits in (16, 64) else (False,):
            kernel = SplitKv(rows, heads, kv_heads, d, device, splits=splits, scalar=scalar)
            work = partial(read_all, kernel, q, pool, tree, length, None)
            name = f"{splits} splits" + (", value by value" if scalar else "")
            us[name] = graph_us(work, rounds) / COPIES
    return us


def steps(name: str, contexts: list[int], rows: int, rounds: int) -> list[dict[str, Any]]:
    """Whole steps of the host's loop."""
    weights, drafter = open_model(name, "cuda")
    rounded, out = OnDevice(weights, "cuda", torch.bfloat16), []
    cases: dict[str, tuple[type[HostTree], dict[str, Any]]] = {
        "torch, masked": (HostTree, dict(attention="sdpa")),
        "16 splits, value by value": (HostTree, dict(attention="triton", splits=16, scalar=True)),
        "16 splits": (HostTree, dict(attention="triton", splits=16)),
        "64 splits": (HostTree, dict(attention="triton", splits=64)),
        "64 splits, not captured": (Eager, dict(attention="triton", splits=64)),
    }
    for case, (kind, options) in cases.items():
        rival = kind(
            Setup(
                rounded, drafter, rows=rows, ctx=max(contexts) + 40 * COMMITTED, device="cuda",
                forced=COMMITTED - 1, **options,
            )
        )  # fmt: skip
        row: dict[str, Any] = {"case": case, "us": {}}
        for context in contexts:
            if options["attention"] == "triton" or context <= MOST_STEPS:
                row["us"][str(context)] = timed(rival, context, 12, rounds)["us"]
        out.append(row)
        print(
            f"{case:28s} " + "  ".join(f"{n}: {v:.0f} us" for n, v in row["us"].items()), flush=True
        )
        del rival
        forget()
    return out


def main() -> None:
    """Command line."""
    made = parser(__doc__, "verify_attention")
    made.add_argument("--model", default="smollm2-135m", help="of the whole steps")
    args = made.parse_args()
    need_gpu("verify_attention", "Triton")
    quiet()
    contexts = CONTEXTS[:2] if args.quick else CONTEXTS
    layers = []
    for model in SHAPES:
        for rows in ROWS[1:2] if args.quick else ROWS:
            for context in contexts:
                us = layer(model, rows, context, 3 if args.quick else 9)
                layers.append({"model": model, "rows": rows, "context": context, "us": us})
                cells = "  ".join(f"{k}: {v:.1f}" for k, v in us.items())
                print(f"{model} N = {rows} at {context}: {cells}", flush=True)
    whole = steps(args.model, [1024, *contexts], 16, 1 if args.quick else 3)
    fields = {"layer": layers, "model": args.model, "steps": whole}
    save("verify_attention", args.json, "cuda", fields, args.quick)


if __name__ == "__main__":
    main()
