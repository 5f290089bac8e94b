"""DRAFT steps of scripted kernels against the drafter's torch module, as a table:

    python -m tests.gpu.check_draft DIR [name ...]      (tests.gpu.kernels builds DIR)

A line is a drafter and a number n of positions before the step. Features of the first n positions
are given 16 at a time; the target's own rows then leave theirs (a chain of 8), of which rows 0, 2
and 5 are accepted, and a block is drafted behind them. Relative L2 errors against fp32: `taps` the
stored features (over torch in bf16), then ours/torch's of the raw keys and values, the keys in the
pages, the values there, and the block's logits; what must be equal to the bit; and microseconds of
the step's parts.
"""

import pathlib
import sys
import traceback

import numpy as np
import torch

from cute_kernels.gpu.board import Desc, Segment
from cute_kernels.gpu.config import Config
from cute_kernels.gpu.load import Kernel
from tests.gpu import model as ref
from tests.gpu.draft_case import DraftCase, random_drafter, shipped
from tests.gpu.kernels import drafting
from tests.gpu.model import Model
from tests.gpu.rig import relative

POSITIONS = (5, 64, 200, 1100)
CHAIN, ACCEPTED = 8, [0, 2, 5]
WORST = 1.3  # times torch's own error in bf16


def drafters(name: str, c: Config) -> dict[str, tuple]:
    """Those that a kernel of this name is tried with."""
    taps = (0, 2, c.shape.layers - 1) if c.shape.layers > 3 else (0, c.shape.layers - 1)
    found = {f"{name} random": random_drafter(c, 2, taps, seed=3)}
    if name == "draft-smollm2-135m":
        found[f"{name} shipped"] = shipped(c, (0, 1, 2, 4, 5))
        few = tuple(range(0, 4096, 2))
        found[f"{name} own head"] = random_drafter(c, 1, taps, seed=4, draft_tokens=few)
    return found


def tapped(case: DraftCase, tokens: torch.Tensor, rnd) -> torch.Tensor:
    """The target's residual behind the tapped layers, [rows, taps, hidden]."""
    runs = [ref.forward(case.model, case.ctx, tokens, tap + 1, rnd)["x"]
            for tap in case.config.taps]  # fmt: skip
    return torch.stack(runs, 1)


def guessing(steps: list[np.ndarray], kind: Segment) -> list[np.ndarray]:
    """The same steps, each of which says that one of that kind follows."""
    steps = [d.copy() for d in steps]
    for d in steps:
        d[Desc.NEXT] = kind
    return steps


def check(kernel: Kernel, c: Config, model: Model, drafter: tuple, n: int) -> dict:
    """Numbers and equalities of one line; see the module's docstring."""
    case, out = DraftCase(kernel, c, model, drafter, n, seed=n), {}
    block_rows = min(case.config.block_size, 16)
    tokens = torch.randint(c.shape.vocab, (CHAIN,), generator=model.gen, device="cuda")
    ids = tokens.tolist()
    block = [ids[5], *[case.config.mask_token_id] * (block_rows - 1)]
    steps = case.steps(ids, ACCEPTED, block)
    with torch.no_grad():
        keys, values = case.cached(n)
        want = case.context(case.module, case.features)
        half = case.context(case.half, case.features)
        out["fed keys"] = ratio(keys, want[1], half[1])
        out["fed values"] = ratio(values, want[2], half[2])
        out["unwritten"] = bool(case.pool[case.ctx.pages[-1].long()].isnan().all())

        record = case.rig.run(steps)
        got, kept = case.logits(block_rows), case.stored_features(CHAIN)
        out["taps"] = relative(kept, tapped(case, tokens, ref.stored))
        features = torch.cat([case.features, kept[ACCEPTED]])
        want, half = case.context(case.module, features), case.context(case.half, features)
        out["raw"] = ratio(case.raw_columns(len(ACCEPTED)), want[0][n:], half[0][n:])
        keys, values = case.cached(len(features))
        out["keys"], out["values"] = ratio(keys, want[1], half[1]), ratio(values, want[2], half[2])
        true = case.forward(case.module, features, block)
        out["logits"] = ratio(got, true, case.forward(case.half, features, block))
        same = (got.argmax(1) == true.argmax(1)).float().mean()
        out["argmax"] = float(same)
    out["tree"] = 1 < record[1, 0]["token"] <= 16
    out["clean"], out["us"] = case.is_clean(), case.stamps()
    pool, target = case.pool.clone(), case.rig.logits[:CHAIN].clone()

    def again(steps) -> bool:
        case.buffers["DRAFT_LOGITS"].fill_(255)
        case.rig.run(steps)
        return (
            bool(torch.equal(case.logits(block_rows), got)) and case.is_clean()
            and bool(torch.equal(case.pool.view(torch.int16), pool.view(torch.int16)))
            and bool(torch.equal(case.rig.logits[:CHAIN], target))
        )  # fmt: skip

    out["repeat"] = again(steps * 4)
    out["guesses"] = all(
        again(guessing(steps * 2, kind)) for kind in (Segment.DECODE, Segment.DRAFT, Segment.PROMPT)
    )
    alone = case.steps(ids, ACCEPTED, [])  # without rows: the context alone
    out["alone"] = again([alone[1], *steps, alone[1], *steps])
    return out


def ratio(got: torch.Tensor, want: torch.Tensor, half: torch.Tensor) -> tuple[float, float]:
    """(our error, torch's in bf16)."""
    return relative(got, want), relative(half.float(), want)


def wrong(r: dict) -> list[str]:
    out = [name for name, v in r.items() if v is False or v is np.False_]
    out += [n for n, v in r.items() if isinstance(v, tuple) and not v[0] <= WORST * v[1]]
    return out + (["taps"] if not r["taps"] < 2e-2 else [])


def line(name: str, n: int, r: dict) -> str:
    pairs = " ".join(f"{k} {v[0]:.1e}/{v[1]:.1e}" for k, v in r.items() if isinstance(v, tuple))
    times = " ".join(f"{k} {v:.1f}" for k, v in r["us"].items())
    bad = wrong(r)
    return (
        f"{name:28s} n {n:4d}  taps {r['taps']:.1e}  {pairs}  argmax {r['argmax']:.2f}"
        f"  {'ok' if not bad else f'WRONG {bad}'}\n{'':30s}us: {times}"
    )


def main(folder: pathlib.Path, names: list[str]) -> None:
    for name, c in drafting().items():
        if (names and name not in names) or not (folder / f"{name}.json").exists():
            continue
        kernel, model = Kernel.read(folder / name), Model(c.shape, seed=11)
        for title, drafter in drafters(name, c).items():
            for n in POSITIONS:
                try:
                    print(line(title, n, check(kernel, c, model, drafter, n)), flush=True)
                except Exception as e:
                    traceback.print_exc()
                    print(f"{title:28s} n {n:4d}  {type(e).__name__}: {e}", flush=True)
                    if "failed" in str(e) or "CUDA" in str(e):
                        return
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    torch.zeros(1, device="cuda")  # makes the context that kernels are loaded into
    torch.backends.cuda.matmul.allow_tf32 = False
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
