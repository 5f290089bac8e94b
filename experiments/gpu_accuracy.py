"""How close the GPU's decoding is to fp32: SmolLM2 with its real weights on the fp32 model's texts.

    python -m experiments.gpu_accuracy RESULT.json [--new 256]

Needs a GPU, torch and the default model's kernels (`megadecode build`; where there is no compiler
also `experiments.gpu_scripted`). The texts are 48 greedy answers of the fp32 model (torch on the
same GPU, no TF32). Three sides read them, token by token: fp32, torch in bf16, and the kernel.
Reported: relative L2 error of the logits of the whole forward (the kernel's at every 32nd step,
torch's at all steps and at the same ones), and the steps whose likeliest token is not fp32's, each
with fp32's gap between its two best; then free-running answers through the rings, with the shipped
drafter, and at what gap each first leaves the fp32 text.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import megadecode
from experiments.gpu_scripted import read_through
from experiments.provenance import provenance
from megadecode.models.gguf_file import load
from megadecode.models.store import DEFAULT_MODEL, resolve
from megadecode.training.lockstep import Lockstep
from megadecode.training.target import TorchTarget
from tests.golden import prompt_ids, read_prompts

CHAT = Path(__file__).with_name("chat_prompts.json")
PROMPTS = 48


def prompts_of(tokenizer: Any) -> list[list[int]]:
    """48 prompts: 23 of the greedy goldens (all but the long one) and 25 chats."""
    golden = [p for p in read_prompts()["prompts"] if p["name"] != "long"]
    chats = json.loads(CHAT.read_text(encoding="utf-8"))["prompts"]
    ids = [prompt_ids(tokenizer, p) for p in golden]
    ids += [tokenizer.chat([{"role": "user", "content": text}]) for text in chats]
    return ids[:PROMPTS]


class Differences:
    """Steps whose likeliest token is not fp32's, and the error of all logits."""

    def __init__(self) -> None:
        self.gaps: list[float] = []
        self.steps = 0
        self.error = self.size = 0.0

    def add_tokens(self, reference: torch.Tensor, tokens: torch.Tensor) -> None:
        """The likeliest token of every step, beside fp32's logits [steps, vocab]."""
        self.gaps += gaps_of(reference)[tokens != reference.argmax(-1)].tolist()
        self.steps += len(reference)

    def add_logits(self, reference: torch.Tensor, got: torch.Tensor) -> None:
        """Logits of the same steps, [..., vocab], fp32's and another side's."""
        self.error += float((got.float() - reference).double().square().sum())
        self.size += float(reference.double().square().sum())

    def report(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "differences": len(self.gaps),
            "largest_gap": max(self.gaps, default=0.0),
            "gaps": sorted(round(g, 5) for g in self.gaps),
            "relative_l2": (self.error / self.size) ** 0.5 if self.size else None,
        }


def logits_of(target: TorchTarget, ids: list[int], first: int) -> torch.Tensor:
    """Logits [steps, vocab] fp32 of the positions from `first` on, given all of `ids`."""
    hidden, _ = target.forward(torch.tensor([ids], device=target.device))
    return target.logits(hidden[0, first:]).float()


def gaps_of(logits: torch.Tensor) -> torch.Tensor:
    """[steps]: the distance between the best and the second best of logits [steps, vocab]."""
    best = logits.topk(2).values
    return best[:, 0] - best[:, 1]


def first_difference(
    text: list[int], answer: list[int], gaps: list[float], stops: tuple[int, ...]
) -> dict[str, Any] | None:
    """Where an answer leaves the fp32 text, with fp32's gap there; None if it never does.

    An answer ends at a stop token; the text goes on.
    """
    for step, (want, got) in enumerate(zip(text, answer)):
        if want != got:
            return {"step": step, "gap": round(gaps[step], 5)}
        if want in stops:
            break
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("result", type=Path)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument(
        "--device", default="cuda", help="cpu: a rehearsal without the kernel's GPU"
    )
    parser.add_argument("--kernels", help="a folder of kernels that another machine has built")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    asked = parser.parse_args()
    begin = time.perf_counter()
    torch.backends.cuda.matmul.allow_tf32 = False
    model = load(resolve(DEFAULT_MODEL))
    tokenizer, stops = model.tokenizer(), model.config.stop_ids
    prompts = prompts_of(tokenizer)[: asked.prompts]
    exact = TorchTarget(model, asked.device, torch.float32)
    half = TorchTarget(model, asked.device, torch.bfloat16)
    writer = Lockstep(exact, len(prompts), max(map(len, prompts)) + asked.new, stop_id=-1)
    texts = writer.write(prompts, asked.new, [0.0] * len(prompts))
    del writer
    torch_side, kernel_side, same_steps = Differences(), Differences(), Differences()
    free: list[dict[str, Any] | None] = []
    references, gaps = [], []
    for prompt, text in zip(prompts, texts):
        ids, first = prompt + text[:-1], len(prompt) - 1
        reference = logits_of(exact, ids, first)
        other = logits_of(half, ids, first)
        torch_side.add_tokens(reference, other.argmax(-1))
        torch_side.add_logits(reference, other)
        references.append((reference, other))
        gaps.append(gaps_of(reference).tolist())
    print(
        f"{time.perf_counter() - begin:.0f} s: {len(texts)} texts, fp32 and bf16 read", flush=True
    )
    kernels = {"kernels": asked.kernels} if asked.kernels else {}
    with megadecode.Engine(
        DEFAULT_MODEL, ctx=2048, slots=1, device=asked.device, **kernels
    ) as engine:
        for prompt, text, gap in zip(prompts, texts, gaps):  # no CUDA call in here
            answer = engine.submit(prompt, megadecode.SamplingParams(max_new_tokens=asked.new))
            free.append(first_difference(text, answer.result().token_ids, gap, stops))
    print(f"{time.perf_counter() - begin:.0f} s: answers through the rings", flush=True)
    if asked.device == "cuda":
        texts_read = [p + t[:-1] for p, t in zip(prompts, texts)]
        readings = read_through(model, texts_read, asked.kernels)
        for prompt, (reference, other), reading in zip(prompts, references, readings):
            first = len(prompt) - 1
            tokens = torch.from_numpy(reading.tokens[first:]).to(reference.device)
            kernel_side.add_tokens(reference, tokens)
            for at, logits in reading.logits.items():
                if at >= first:
                    kernel_side.add_logits(reference[at - first], logits)
                    same_steps.add_logits(reference[at - first], other[at - first])
    found = [{"prompt": i, **f} for i, f in enumerate(free) if f]
    result = {
        "about": "python -m experiments.gpu_accuracy; its docstring has the fields",
        "device": provenance().get("gpu", "cpu"),
        **provenance(),
        "model": DEFAULT_MODEL,
        "prompts": len(prompts),
        "new_tokens": asked.new,
        "teacher_forced": {
            "torch_bf16": torch_side.report(),
            "kernel": kernel_side.report(),
            "torch_bf16_relative_l2_of_the_kernels_steps": same_steps.report()["relative_l2"],
        },
        "free_running": {
            "equal": len(free) - len(found),
            "largest_gap": max((f["gap"] for f in found), default=0.0),
            "first_differences": found,
        },
    }
    asked.result.parent.mkdir(parents=True, exist_ok=True)
    asked.result.write_text(json.dumps(result, indent=1) + "\n")
    for name, side in (("torch bf16", torch_side), ("kernel", kernel_side)):
        print(name, {k: v for k, v in side.report().items() if k != "gaps"})
    print("torch bf16 at the kernel's steps", same_steps.report()["relative_l2"])
    print(
        "free-running",
        {k: v for k, v in result["free_running"].items() if k != "first_differences"},
    )


if __name__ == "__main__":
    main()
