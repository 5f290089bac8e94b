"""What the CPU device answers, for the GPU's answers to be compared with.

    python -m tests.gpu.answers FILE    writes them on any machine; it takes minutes.

Then MEGADECODE_ANSWERS=FILE. Per prompt: its ids, the CPU device's tokens in fp32, and at each the
gap in log-probability to the runner-up.
"""

import json
import sys

import numpy as np

LENGTHS = (1, 2, 63, 64, 65, 128, 257, 1000)
NEW_TOKENS = 48
TEXT = (
    "The lighthouse keeper counted the ships that passed before dawn. Each of them carried a lamp, "
    "and each lamp was answered from the tower. When the fog came in, the answers stopped, and the "
    "keeper wrote down the hour. He had done so for thirty years, in nine green books. "
)
QUESTIONS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about a lighthouse.",
    "List three prime numbers above 50.",
)


def prompts(engine):
    """Token ids: pieces of a text of every length that matters, and questions."""
    text = engine.encode(TEXT * 30, chat=False).tolist()
    return [text[:n] for n in LENGTHS] + [engine.encode(q).tolist() for q in QUESTIONS]


def main(path: str) -> None:
    from megadecode import Engine, SamplingParams

    params = SamplingParams(max_new_tokens=NEW_TOKENS, logprobs=2, ignore_eos=True)
    found = []
    with Engine("smollm2-135m", 2048, device="cpu", draft="off") as engine:
        for ids in prompts(engine):
            result = engine.submit(ids, params).result()
            gaps = [float(a[0][1] - a[1][1]) for a in result.top_logprobs]
            found.append({"ids": ids, "tokens": result.token_ids, "gaps": gaps})
            print(len(ids), "tokens:", round(min(gaps), 4), "smallest gap", file=sys.stderr)
    with open(path, "w") as file:
        json.dump(found, file)


def first_difference(answer: dict, tokens: list[int]) -> tuple[int, float] | None:
    """(index, the CPU's gap there) of the first token that differs; None where none does."""
    differ = np.flatnonzero(np.array(answer["tokens"]) != np.array(tokens))
    return (int(differ[0]), answer["gaps"][differ[0]]) if differ.size else None


if __name__ == "__main__":
    main(sys.argv[1])
