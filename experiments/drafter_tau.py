"""The evaluator's tau against the engine's own count of steps, on the CPU device.

    python -m experiments.drafter_tau [--drafter auto] [--prompts 64] [--tokens 96] [--json PATH]

The engine answers the prompts under each policy; the evaluator then walks the engine's texts with
features and drafts of its own (torch, fp32). Both count tokens and verify steps behind each
answer's first token. The two differ only where a last bit of a logit decides a tie, so tau should
agree far better than the bar, which is 3 %.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from experiments.chat_prompts import CHAT_PROMPTS
from experiments.provenance import provenance
from megadecode import Engine, SamplingParams
from megadecode.drafter.find import choose_drafter
from megadecode.drafter.module import DrafterModule
from megadecode.models.gguf_file import load
from megadecode.models.store import DEFAULT_MODEL, resolve
from megadecode.training.evaluate import Text, score
from megadecode.training.target import TorchTarget
from megadecode.training.walk import CHAIN, policies

BAR = 0.03
CASES = ((CHAIN, 0.0), ("N=8", 0.0), ("N=16", 0.0), ("N=8", 1.0))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--json", type=Path, help="default: experiments/results/drafter_tau.json")
    args = parser.parse_args()
    model = load(resolve(DEFAULT_MODEL))
    drafter = choose_drafter(args.drafter, model)
    if drafter is None:
        raise SystemExit(f"no drafter belongs to {DEFAULT_MODEL}")
    target = TorchTarget(model)
    taps = drafter.config.taps
    module = DrafterModule(drafter.config, target.embed, target.head).load(drafter.tensors())
    kinds = policies((8, 16))
    cases: list[dict[str, Any]] = []
    walked: dict[Text, dict[str, list[int]]] = {}
    for name, temperature in CASES:
        shape: dict[str, Any] = (
            dict(shape="chain", budget=drafter.config.drafted)
            if name == CHAIN
            else dict(budget=int(name[2:]) - 1)
        )
        with Engine(model, ctx=1024, slots=8, draft=drafter, **shape) as engine:
            prompts = [engine.encode(prompt).tolist() for prompt in CHAT_PROMPTS[: args.prompts]]
            requests = [
                engine.submit(
                    ids, SamplingParams(max_new_tokens=args.tokens, temperature=temperature, seed=i)
                )
                for i, ids in enumerate(prompts)
            ]
            answers = [request.result() for request in requests]
        ours = theirs = tokens = same = 0
        for ids, answer in zip(prompts, answers):
            text = Text((*ids, *answer.token_ids), len(ids), args.tokens)
            if len(text.answer) < 2:
                continue
            if text not in walked:  # the same under every policy, as speculation never shows
                features = target.forward(torch.tensor([text.ids[:-1]]), taps)[1][0]
                walked[text] = score(module, features, text, kinds).commits
            steps = len(walked[text][name])
            tokens += len(text.answer) - 1
            ours, theirs = ours + steps, theirs + answer.stats.steps - 1
            same += steps == answer.stats.steps - 1
        case = {
            "policy": name, "temperature": temperature, "tokens": tokens,
            "evaluator_tau": tokens / ours, "engine_tau": tokens / theirs,
            "difference": theirs / ours - 1, "texts_with_equal_steps": same,
        }  # fmt: skip
        cases.append(case)
        print(json.dumps(case))
    result = {
        "experiment": "drafter_tau", **provenance(), "model": DEFAULT_MODEL,
        "drafter": drafter.config.name, "prompts": len(prompts), "new_tokens": args.tokens,
        "bar": BAR, "cases": cases, "met": all(abs(c["difference"]) < BAR for c in cases),
    }  # fmt: skip
    path = args.json or Path(__file__).parent / "results" / "drafter_tau.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{'met' if result['met'] else 'MISSED'}; written to {path}")


if __name__ == "__main__":
    main()
