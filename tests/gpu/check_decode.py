"""Decode steps of scripted kernels against torch, as a table:

    python -m tests.gpu.check_decode DIR [name ...]      (tests.gpu.kernels builds DIR)

A line is a model and a number of rows: relative L2 error of every phase against fp32 from the same
inputs, over the error of torch in bf16 (the bar is 2); of the whole forward, ours and torch's; and
what must be equal to the bit.
"""

import pathlib
import sys
import traceback

import torch
import torch.nn.functional as F

from cute_kernels.gpu.load import Kernel
from cute_kernels.gpu.script import decode_step
from tests.gpu import model as ref
from tests.gpu.kernels import scripted
from tests.gpu.model import Context, Model
from tests.gpu.rig import Rig, relative

ROWS = (1, 3, 8, 9, 16)
NEAR_WRAP = 2**31 - 5
COMMITTED = 200


def phase_ratios(rig: Rig, m: Model, tokens: torch.Tensor, got: dict) -> dict[str, float]:
    """Of layer 0: our error over that of torch in bf16, both against fp32 from the same inputs."""
    s = rig.c.shape
    wq, wo, wg, wd = m.matrices[0]
    x = m.embed[tokens]

    def normed(v):
        return v.float() * ref.factor(v.float(), s.rms_eps)

    def half(v):
        return v.bfloat16()

    middle = x.float() + got["a"] @ wo.float().T
    gu = normed(got["y"]) @ wg.float().T
    gu16 = F.linear(half(normed(half(got["y"]))), wg)
    want = {
        "q": (normed(x) @ wq.float().T, F.linear(half(normed(x)), wq)),
        "y": (middle, x + F.linear(half(got["a"]), wo)),
        "h": (F.silu(gu[:, 0::2]) * gu[:, 1::2], F.silu(gu16[:, 0::2]) * gu16[:, 1::2]),
        "x": (middle + got["h"] @ wd.float().T, half(middle) + F.linear(half(got["h"]), wd)),
    }
    if rig.ctx is not None:
        q = got["q"]
        want["a"] = (
            ref.attend(m, rig.ctx, 0, q, ref.exact),
            ref.attend_bf16(m, rig.ctx, 0, half(q)),
        )
    return {
        name: relative(got[name], want32) / relative(want16.float(), want32)
        for name, (want32, want16) in want.items()
    }


def check(kernel: Kernel, c, model: Model, packed: dict, rows: int, seed: int) -> dict:
    """Numbers and equalities of one line; see the module's docstring."""
    s = c.shape
    ctx = Context(s, COMMITTED, 64, seed) if c.attention else None
    rig = Rig(kernel, c, packed, ctx, first=NEAR_WRAP if rows == 3 else 0)
    tokens = torch.randint(s.vocab, (rows,), generator=model.gen, device="cuda")
    ids, out = tokens.tolist(), {}

    def step(**kw):
        return decode_step(ids, COMMITTED, s.layers, **kw)

    rig.run([step(last=4)])
    out["phases"] = phase_ratios(rig, model, tokens, rig.buffers(rows))
    want = ref.forward(model, ctx, tokens, 1)
    got = rig.buffers(rows)
    out["layer"] = max(relative(got[n], want[n]) for n in got)

    rig.reset()
    record = rig.run([step()])[0, :rows]
    logits = rig.logits[:rows, : s.vocab].clone()
    want = ref.forward(model, ctx, tokens, s.layers)["logits"]
    true = ref.forward(model, ctx, tokens, s.layers, ref.exact)["logits"]
    out["step"] = relative(logits, want)
    out["exact"], out["torch"] = (
        relative(v, true) for v in (logits, ref.forward_bf16(model, ctx, tokens, s.layers))
    )
    best = logits.max(1)
    logprob = best.values - logits.double().logsumexp(1)
    out["argmax"] = record["token"].tolist() == best.indices.tolist()
    out["logit"] = record["logit"].tolist() == best.values.tolist()
    out["logprob"] = max(abs(a - b) for a, b in zip(record["logprob"], logprob.tolist())) < 2e-5
    out["flags"] = not record["flags"].any()
    out["clean"] = rig.clean()
    again = rig.run([step()] * 4)
    out["repeat"] = all((r[:rows]["logprob"] == record["logprob"]).all() for r in again)
    out["repeat"] &= bool(torch.equal(rig.logits[:rows, : s.vocab], logits)) and rig.clean()
    alone = rig.run([decode_step(ids[:1], COMMITTED, s.layers)])
    out["alone"] = bool(torch.equal(rig.logits[0, : s.vocab], logits[0])) and (
        alone[0, 0]["token"] == record[0]["token"]
    )
    mixed = [decode_step(ids[: 1 + i % rows], COMMITTED, s.layers) for i in range(7)]
    rig.run([*mixed, step()])
    out["mixed"] = bool(torch.equal(rig.logits[:rows, : s.vocab], logits)) and rig.clean()
    return out


def line(name: str, rows: int, r: dict) -> str:
    phases = " ".join(f"{k} {v:.2f}" for k, v in r["phases"].items())
    wrong = [k for k, v in r.items() if v is False]
    ok = not wrong and max(r["phases"].values()) < 2 and r["exact"] <= r["torch"]
    return (
        f"{name:22s} {rows:2d} rows  {phases}  layer {r['layer']:.1e} step {r['step']:.1e}"
        f"  whole {r['exact']:.2e} torch {r['torch']:.2e}  {'ok' if ok else f'WRONG {wrong}'}"
    )


def main(folder: pathlib.Path, names: list[str]) -> None:
    for name, c in scripted().items():
        if (names and name not in names) or not (folder / f"{name}.json").exists():
            continue
        kernel, model = Kernel.read(folder / name), Model(c.shape, seed=11)
        packed = model.packed(c)
        for rows in ROWS:
            try:
                print(line(name, rows, check(kernel, c, model, packed, rows, 5)), flush=True)
            except Exception as e:
                traceback.print_exc()
                print(f"{name:22s} {rows:2d} rows  {type(e).__name__}: {e}", flush=True)
                if "failed" in str(e) or "CUDA" in str(e):
                    return
        del packed, model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    torch.zeros(1, device="cuda")  # makes the context that kernels are loaded into
    torch.backends.cuda.matmul.allow_tf32 = False
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
