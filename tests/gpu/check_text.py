"""A prompt in chunks, then free-running decoding, in one launch, against torch, as a table:

    python -m tests.gpu.check_text DIR [name ...]        (tests.gpu.kernels builds DIR)

The reference runs over the prompt and what the kernel generated: at every generated position the
kernel's token is the reference's largest logit, or the two are closer there than GAP. Other chunks
and another launch give the same bits.
"""

import pathlib
import sys

import numpy as np
import torch

from cute_kernels.gpu.load import Kernel
from cute_kernels.gpu.script import decode_step, prompt_step
from tests.gpu import model as ref
from tests.gpu.kernels import scripted
from tests.gpu.model import Context, Model
from tests.gpu.rig import Rig, relative

NEW = 24
GAP = 0.05  # logits; random weights have many near ties
PROMPTS = (1, 2, 64, 65, 300)


def script(prompt: list[int], layers: int, new: int, chunk: int = 256) -> list[np.ndarray]:
    """prompt[:-1] in chunks, then its last token and the generated ones."""
    body = len(prompt) - 1
    steps = [prompt_step(min(chunk, body - at), at, layers) for at in range(0, body, chunk)]
    for i in range(new):
        steps.append(decode_step([prompt[-1]], body + i, layers, free=i > 0))
    return steps


def check(kernel: Kernel, c, model: Model, packed: dict, length: int) -> dict:
    s = c.shape
    prompt = torch.randint(s.vocab, (length,), generator=model.gen, device="cuda").tolist()

    def run(chunk: int) -> tuple[Rig, np.ndarray]:
        rig = Rig(kernel, c, packed, Context(s, 0, length + NEW, 5))
        rig.tokens[:length] = torch.tensor(prompt, dtype=torch.int32, device="cuda")
        return rig, rig.run(script(prompt, s.layers, NEW, chunk))[-NEW:, 0]

    rig, got = run(256)
    tokens = torch.tensor(prompt + got["token"].tolist()[:-1], device="cuda")
    empty = Context(s, 0, len(tokens), 5)
    logits = ref.forward(model, empty, tokens, s.layers)["logits"][-NEW:]
    top = logits.max(1).values
    mine = logits[torch.arange(NEW), torch.tensor(got["token"].tolist(), device="cuda")]
    out = {"gap": float((top - mine).max()), "differ": int((top != mine).sum())}
    out["logits"] = relative(rig.logits[0, : s.vocab], logits[-1])
    fields = ["token", "logit", "logprob"]
    _, again = run(64)
    out["chunks"] = bool((again[fields] == got[fields]).all())
    return out


def line(name: str, length: int, r: dict) -> str:
    ok = r["gap"] < GAP and r["chunks"] and r["logits"] < 3e-2
    return (
        f"{name:22s} prompt {length:4d}  differ {r['differ']} (gap {r['gap']:.3f}) logits"
        f" {r['logits']:.1e} chunks equal {r['chunks']}  {'ok' if ok else 'WRONG'}"
    )


def main(folder: pathlib.Path, names: list[str]) -> None:
    for name, c in scripted().items():
        if (names and name not in names) or not c.prompt or not (folder / f"{name}.json").exists():
            continue
        model = Model(c.shape, seed=11)
        kernel, packed = Kernel.read(folder / name), model.packed(c)
        for length in PROMPTS:
            print(line(name, length, check(kernel, c, model, packed, length)), flush=True)


if __name__ == "__main__":
    torch.zeros(1, device="cuda")  # makes the context that kernels are loaded into
    torch.backends.cuda.matmul.allow_tf32 = False
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
