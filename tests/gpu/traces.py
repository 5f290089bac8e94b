"""Requests of every kind, and what the CPU device answers: a GPU must answer the same.

    python -m tests.gpu.traces FILE    writes them on any machine; it takes minutes.

Then MEGADECODE_TRACES=FILE. The model is one whose answers rounding does not change: in `Counting`
the likeliest next token is the one after the last, by far, and every token's logits have a part of
their own from its layers. Requests whose answers change with the model's last bits (its weights
moved at random by SHAKE, several times bf16's rounding) are not kept.

A position's token is the same in all requests that count from 10, so one script of candidates by
position serves them all; requests that count from elsewhere, or that sample another token, are what
it is wrong for.
"""

import json
import sys
from typing import Any

import numpy as np

from megadecode.acceptance import Candidates, propose
from megadecode.presets import preset_config
from megadecode.sampling import SamplingParams

SHAPE, CTX, FIRST = "odd-960", 320, 10
KEPT, DRAWN = 500, 640
MARGIN = 14.0  # logits of the next token over the mean of the others, whose deviation is 0.45
SHAKE = 0.01


class Counting:
    """Implements `Weights`: see above. seed: of the shake, 0 for none."""

    def __init__(self, shake: int = 0) -> None:
        self.config, self._shake = preset_config(SHAPE), shake

    def tensor(self, name: str) -> np.ndarray:
        c, rng = self.config, np.random.default_rng([3, *name.encode()])
        if name in ("embed", "head"):
            table = np.random.default_rng(2).standard_normal((c.vocab, c.hidden), np.float32)
            if name == "head":  # the row of t + 1 points where the embedding of t does
                table = np.roll(table, 1, axis=0) * np.float32(MARGIN / c.hidden)
        elif "norm" in name:
            table = np.ones(c.hidden, np.float32)
        else:
            from megadecode.models.weights import tensor_shapes

            shape = tensor_shapes(c)[name]
            table = rng.standard_normal(shape, np.float32) * np.float32(shape[1] ** -0.5)
            if name.endswith((".o", ".down")):
                table *= np.float32(0.05)
        if self._shake and "norm" not in name:
            noise = np.random.default_rng([self._shake, *name.encode()])
            table *= 1 + np.float32(SHAKE) * noise.standard_normal(table.shape, np.float32)
        return table

    def drafter(self):
        """One of random weights, in whose place the script speaks."""
        from megadecode.presets import RandomDrafter, drafter_config

        return RandomDrafter(drafter_config(self.config))

    def tensors(self):
        from megadecode.models.weights import tensor_shapes

        for name in tensor_shapes(self.config):
            yield name, self.tensor(name)


def script() -> Candidates:
    """Right for what counts from FIRST in seven positions of ten; in another, second."""
    vocab = preset_config(SHAPE).vocab
    return propose([FIRST + p for p in range(CTX)], 0, vocab=vocab, width=127, seed=5)


def draw(number: int) -> tuple[list[int], dict[str, Any]]:
    """Prompt and parameters of one request."""
    rng = np.random.default_rng([17, number])
    vocab = preset_config(SHAPE).vocab
    length = int(rng.choice([1, 2, 5, 30, 62, 63, 64, 65, 100, 129, 200, 257, 300, 318, 319]))
    first = FIRST if rng.random() < 0.8 else int(rng.integers(0, vocab - CTX))
    prompt = [first + p for p in range(length)]
    chosen: dict[str, Any] = {"max_new_tokens": int(rng.choice([0, 1, 2, 7, 16, 17, 40, 70]))}
    if rng.random() < 0.5:
        chosen |= {"temperature": float(rng.choice([0.3, 0.8, 1.0, 1.2]))}
        chosen |= {"seed": int(rng.integers(0, 2**62))}
        if rng.random() < 0.4:
            chosen["top_k"] = int(rng.choice([1, 2, 40]))
        if rng.random() < 0.4:
            chosen["top_p"] = float(rng.choice([0.5, 0.9, 0.99]))
        if rng.random() < 0.3:
            chosen["min_p"] = 0.02
    if rng.random() < 0.4:  # a token that this text may well come to
        chosen["stop_token_ids"] = [first + length + int(rng.integers(0, 40)), 3]
        if rng.random() < 0.4:
            most = min(30, chosen["max_new_tokens"])
            chosen["min_new_tokens"] = int(rng.integers(0, most + 1))
    if rng.random() < 0.25:  # the text jumps: a token is forbidden, another made likely
        at = first + length + int(rng.integers(0, 20))
        chosen["logit_bias"] = {at: -40.0, first + 1000: 6.0, **{7000 + i: -1.0 for i in range(9)}}
    if rng.random() < 0.3:
        chosen["logprobs"] = int(rng.choice([1, 5, 20]))
    return prompt, chosen


def answers(engine, requests) -> list[dict[str, Any]]:
    """Completions, in JSON's types. Alternatives as ids and log-probabilities."""
    sent = [engine.submit(ids, SamplingParams(**how)) for ids, how in requests]
    found = []
    for request in sent:
        r = request.result(600)
        found.append(
            {
                "tokens": list(r.token_ids), "logprobs": [float(p) for p in r.logprobs],
                "reason": r.finish_reason, "error": None if r.error is None else str(r.error),
                "alternatives": [[[int(t), float(p)] for t, p in a] for a in r.top_logprobs or ()],
            }
        )  # fmt: skip
    return found


def load(path: str) -> list[dict[str, Any]]:
    """What `main` has written: prompt, params and answer of every request."""
    with open(path) as file:
        found: list[dict[str, Any]] = json.load(file)
    for request in found:
        if bias := request["params"].get("logit_bias"):  # JSON's names are text
            request["params"]["logit_bias"] = {int(token): b for token, b in bias.items()}
    return found


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """The same completion, logits aside."""
    return all(a[name] == b[name] for name in ("tokens", "reason", "error"))


def main(path: str) -> None:
    from megadecode import Engine

    requests = [draw(i) for i in range(DRAWN)]
    by_model = []
    for shake in range(3):
        with Engine(Counting(shake), CTX, slots=16, device="cpu", draft="off") as engine:
            by_model.append(answers(engine, requests))
        print("model", shake, "has answered", file=sys.stderr, flush=True)
    kept = [
        {"prompt": ids, "params": how, "answer": first}
        for (ids, how), first, *others in zip(requests, *by_model, strict=True)
        if all(same(first, other) for other in others)
    ]
    print(len(kept), "of", DRAWN, "answers stand", file=sys.stderr)
    with open(path, "w") as file:
        json.dump(kept[:KEPT], file)


if __name__ == "__main__":
    main(sys.argv[1])
