"""What a speculative step costs on the CPU, stage by stage, for the default model.

    python -m experiments.speculation_cost [--tokens 96] [--context 512] [--json PATH]

The drafter has random weights in the shape of a small trained one (2 layers of the target's own
widths, block of 8, 5 taps), so its time is a real drafter's and its proposals are not: **what is
accepted says nothing, and is not reported**. For each number of verify rows N = budget + 1 the
table gives microseconds per step of: the drafter's context and block (`draft`), ranking its logits
(`rank`), the trees (`tree`), the target's rows (`verify`), its head (`head`), the walk (`decide`)
and the moved keys and values (`compact`). Beside it runs the check that the tokens are those of
plain decoding. A break-even tau is the step's time over a plain step's: tokens a step must commit
to be worth it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from cute_kernels.cpu.tree import build_tree, make_frontier, make_tree
from cute_kernels.plan import PHASES
from experiments.provenance import provenance
from host.atomics import now_ns
from host.jit import jit
from megadecode import Engine, SamplingParams
from megadecode.drafter.config import DrafterConfig
from megadecode.drafter.io import Drafter, tensor_shapes
from megadecode.models.gguf_file import LoadedModel, load
from megadecode.models.store import DEFAULT_MODEL, resolve

ROWS = (1, 4, 8, 16, 32)
STAGES = {
    "draft": (
        "draft_fuse",
        "draft_context",
        "draft_embed",
        "draft_qkv",
        "draft_attend",
        "draft_out_proj",
        "draft_gate_up",
        "draft_down",
        "draft_head",
    ),
    "rank": ("draft_rank",),
    "tree": ("tree", "rows"),
    "verify": ("embed", "qkv", "attend", "merge", "out_proj", "gate_up", "down", "tap"),
    "head": ("head",),
    "decide": ("decide",),
    "compact": ("compact",),
}


def random_drafter(model: LoadedModel) -> Drafter:
    """Two layers of the target's widths with random weights."""
    c = model.config
    config = DrafterConfig(
        name="random", layers=2, hidden=c.hidden, heads=c.heads, kv_heads=c.kv_heads,
        head_dim=c.head_dim, ffn=c.ffn, vocab=c.vocab, block_size=8, taps=(1, 8, 14, 21, 27),
        target_layers=c.layers, mask_token_id=c.vocab - 1, rope_theta=c.rope_theta,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
        if len(shape) == 2
        else np.ones(shape, np.float32)
        for name, shape in tensor_shapes(config).items()
    }
    return Drafter(config, tensors)


def measure(model: LoadedModel, drafter: Drafter | None, rows: int, args: Any) -> dict[str, Any]:
    """Mean microseconds per decode step by stage, and the tokens."""
    prompt = [int(i) for i in np.random.default_rng(1).integers(3, 40_000, args.context)]
    params = SamplingParams(max_new_tokens=args.tokens, ignore_eos=True)
    with Engine(
        model, ctx=args.context + args.tokens + 64, slots=1, draft=drafter or "off",
        budget=rows - 1, weights=args.weights,
    ) as engine:  # fmt: skip
        engine.submit(prompt[:64], SamplingParams(max_new_tokens=4)).result()
        engine._parts.trace[:] = 0
        result = engine.submit(prompt, params).result()
        table = engine._parts.trace[0]
    steps = int(table[next(i for i, p in enumerate(PHASES) if p.name == "decide"), 0])
    ns = {phase.name: int(table[i, 1]) for i, phase in enumerate(PHASES)}
    stages = {
        stage: sum(ns[name] for name in names) / steps / 1e3 for stage, names in STAGES.items()
    }
    return {"rows": rows, "steps": steps, "us": stages, "tokens": result.token_ids}


@jit
def _time_trees(ids, logprobs, widths, budget, tree, frontier, rounds):
    start = now_ns()
    for _ in range(rounds):
        build_tree(0, ids, logprobs, widths, 15, budget, False, tree, frontier)
    return now_ns() - start


def tree_us(budget: int, depth: int) -> float:
    """Microseconds to build one tree from random, sorted candidates."""
    rng = np.random.default_rng(2)
    logprobs = -np.sort(rng.exponential(2.0, (depth, budget)).astype(np.float32), axis=1)
    ids = np.tile(np.arange(budget, dtype=np.int32), (depth, 1))
    widths = np.full(depth, budget, np.int32)
    tree, frontier = make_tree(budget), make_frontier(budget)
    _time_trees(ids, logprobs, widths, budget, tree, frontier, 1)
    times = [_time_trees(ids, logprobs, widths, budget, tree, frontier, 200) for _ in range(9)]
    return float(np.median(times)) / 200 / 1e3


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--weights", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    model = load(resolve(DEFAULT_MODEL))
    drafter = random_drafter(model)
    plain = measure(model, None, 1, args)
    base = sum(plain["us"].values())
    results = [plain] + [measure(model, drafter, rows, args) for rows in ROWS[1:]]
    tokens = plain["tokens"]
    for result in results:
        if result.pop("tokens") != tokens:
            raise SystemExit(f"N = {result['rows']} changed the tokens: the figures are void")
    print(f"{'N':>4s} {'step us':>9s} {'break-even':>10s}  " + " ".join(f"{s:>8s}" for s in STAGES))
    for result in results:
        total = sum(result["us"].values())
        result["step_us"], result["break_even_tau"] = total, total / base
        cells = " ".join(f"{result['us'][stage]:8.0f}" for stage in STAGES)
        print(f"{result['rows']:4d} {total:9.0f} {total / base:10.2f}  {cells}")
    trees = {f"B={b}, L={d}": tree_us(b, d) for b in (16, 64, 255) for d in (7, 15)}
    print("tree build us: " + ", ".join(f"{k}: {v:.1f}" for k, v in trees.items()))
    if args.json:
        report = {
            "experiment": "speculation_cost", **provenance(), "model": DEFAULT_MODEL,
            "weights": args.weights, "context": args.context, "tokens": args.tokens,
            "drafter": "random weights: times only", "steps": results, "tree_build_us": trees,
            "tokens_equal_plain": True,
        }  # fmt: skip
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
