"""What the CPU device commits a step with the shipped drafter, for the GPU to be compared with.

    python -m tests.gpu.tau_golden FILE    writes it on any machine; it takes minutes.

Then MEGADECODE_TAU=FILE. Per policy: prompts' ids, tokens and steps of every answer, tau over all.
Steps and tokens are counted behind each answer's first token.
"""

import json
import sys

from experiments.chat_prompts import CHAT_PROMPTS

NEW_TOKENS = 96
POLICIES = {
    "chain": dict(shape="chain", budget=7),
    "15": dict(budget=15),
    "63": dict(budget=63),
}
DECODE_ROWS = 256
"""Of a step of the CPU device: with more slots than fit, budgets would shrink."""
SEED = 11


def params_of(number: int, temperature: float):
    """Parameters of prompt `number`."""
    from megadecode import SamplingParams

    return SamplingParams(max_new_tokens=NEW_TOKENS, temperature=temperature, seed=SEED + number)


def tau_of(results) -> float:
    """Tokens a step, over all answers that have more than one token."""
    some = [r for r in results if r["tokens"] > 1]
    return sum(r["tokens"] - 1 for r in some) / sum(r["steps"] - 1 for r in some)


def measure(engine, prompts, temperature: float = 0.0) -> list[dict[str, int]]:
    """Tokens and steps of every answer."""
    requests = [engine.submit(ids, params_of(i, temperature)) for i, ids in enumerate(prompts)]
    stats = [request.result().stats for request in requests]
    return [{"tokens": s.tokens, "steps": s.steps} for s in stats]


def main(path: str) -> None:
    from megadecode import Engine

    found: dict = {"prompts": [], "policies": {}}
    for name, shape in POLICIES.items():
        slots = min(8, DECODE_ROWS // (shape["budget"] + 1))
        with Engine(
            "smollm2-135m", 1024, slots=slots, device="cpu", draft="auto", **shape
        ) as engine:
            prompts = [engine.encode(prompt).tolist() for prompt in CHAT_PROMPTS]
            answers = measure(engine, prompts)
        found["prompts"] = prompts
        found["policies"][name] = {"tau": tau_of(answers), "answers": answers}
        print(name, "tau", round(tau_of(answers), 4), file=sys.stderr, flush=True)
        with open(path, "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1])
