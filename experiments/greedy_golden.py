"""Write tests/data/greedy_golden.json: greedy decoding of the default model by transformers, fp32.

    python -m experiments.greedy_golden

Needs the extra `golden`. transformers loads the same GGUF file and decodes with its own
attention and cache; ids come from our tokenizer, because the tokenizer that transformers builds
from a GGUF lacks this model's digit split. Checks that run beside it: with the digit split put
back, transformers' tokenizer gives our ids on every text, and its chat rendering gives ours; our
torch reference gives the same tokens wherever the gap is at least GAP, and logits within LOGITS.

Fields: `prompts` {name, ids, tokens, gaps, stop_at}: the prompt, MAX_NEW new tokens (decoding goes
on past a stop token, so that every prompt gives as many steps), the distance in logits between best
and second best at each step, the index of the first stop token or null; `tokenizer` {text, ids};
`tokenizer_differences` {text, ours, transformers}; `checks`, what
the comparison with the reference found; `versions`.
"""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import pre_tokenizers

from megadecode.models.gguf_file import LoadedModel, load
from megadecode.models.store import DEFAULT_MODEL, KNOWN, resolve
from megadecode.models.tokenizer import Tokenizer
from megadecode.reference import Reference
from tests.golden import GOLDEN, prompt_ids, prompt_messages, read_prompts

MAX_NEW = 128
GAP = 1e-3
LOGITS = 1e-3


def main() -> None:
    path = resolve(DEFAULT_MODEL)
    ours = load(path)
    tokenizer = ours.tokenizer()
    asked = read_prompts()

    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    pinned, differences = compare_tokenizers(tokenizer, theirs, ours, asked)
    print(f"tokenizer: {len(pinned)} texts pinned, transformers' own differs on {len(differences)}")

    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    reference = Reference(ours.config, ours.tensors())
    prompts = []
    worst_logit = worst_gap = 0.0
    for prompt in asked["prompts"]:
        begin = time.perf_counter()
        ids = prompt_ids(tokenizer, prompt)
        tokens, gaps, logits = greedy(model, ids)
        difference, differing_gap = compare_reference(reference, ids, tokens, gaps, logits)
        worst_logit, worst_gap = max(worst_logit, difference), max(worst_gap, differing_gap)
        prompts.append(
            {
                "name": prompt["name"],
                "ids": ids,
                "tokens": tokens,
                "gaps": [float(f"{gap:.6g}") for gap in gaps],
                "stop_at": next(
                    (i for i, t in enumerate(tokens) if t in ours.config.stop_ids), None
                ),
            }
        )
        print(
            f"{prompt['name']}: {len(ids)} + {len(tokens)} tokens, smallest gap {min(gaps):.2g}, "
            f"logits within {difference:.1e}, {time.perf_counter() - begin:.0f} s, "
            f"{tokenizer.decode(tokens)[:60]!r}"
        )
    steps = sum(len(prompt["tokens"]) for prompt in prompts)
    result = {
        "about": "Written by `python -m experiments.greedy_golden`; its docstring has the fields.",
        "model": {"name": DEFAULT_MODEL, "sha256": KNOWN[DEFAULT_MODEL].sha256, "dtype": "fp32"},
        "max_new": MAX_NEW,
        "stop_ids": list(ours.config.stop_ids),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
        },
        "checks": {
            "steps": steps,
            "reference_max_logit_difference": float(f"{worst_logit:.3g}"),
            "reference_largest_gap_with_another_token": worst_gap,
            "smallest_gap": min(min(prompt["gaps"]) for prompt in prompts),
            "gaps_under_0.01": sum(gap < 0.01 for prompt in prompts for gap in prompt["gaps"]),
        },
        "prompts": prompts,
        "tokenizer": pinned,
        "tokenizer_differences": differences,
    }
    write(GOLDEN, result)
    print(json.dumps(result["checks"]))


@torch.inference_mode()
def greedy(model: Any, ids: list[int]) -> tuple[list[int], list[float], torch.Tensor]:
    """MAX_NEW tokens, gap per step and the logits [steps, vocab] they were read from."""
    tokens: list[int] = []
    kept = []
    cache = transformers.DynamicCache()
    rows = torch.tensor([ids])
    while len(tokens) < MAX_NEW:
        out = model(rows, past_key_values=cache, use_cache=True, logits_to_keep=1)
        kept.append(out.logits[0, -1])
        tokens.append(int((kept[-1] == kept[-1].max()).nonzero()[0]))
        rows = torch.tensor([tokens[-1:]])
    logits = torch.stack(kept)
    top = logits.topk(2, dim=-1).values
    return tokens, (top[:, 0] - top[:, 1]).tolist(), logits


def compare_reference(
    reference: Reference, ids: list[int], tokens: list[int], gaps: list[float], logits: torch.Tensor
) -> tuple[float, float]:
    """Teacher-forced: largest difference of any logit; largest gap at which the token differs."""
    rows = range(len(ids) - 1, len(ids) + len(tokens) - 1)
    mine, _ = reference.forward([*ids, *tokens[:-1]], logits_rows=rows)
    difference = float((mine - logits).abs().max())
    differs = mine.argmax(-1) != torch.tensor(tokens)
    gap = max((gaps[step] for step in differs.nonzero()[:, 0].tolist()), default=0.0)
    assert difference < LOGITS, f"logits differ by {difference}"
    assert gap < GAP, f"another token at a gap of {gap}"
    return difference, gap


def compare_tokenizers(
    ours: Tokenizer, theirs: Any, model: LoadedModel, asked: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Pins of our ids, and every text on which transformers' GGUF tokenizer gives others."""
    raw = [prompt["raw"] for prompt in asked["prompts"] if "raw" in prompt]
    texts = [*asked["tokenizer_texts"], *raw]
    template = model.chat_template
    as_read = ids_of(theirs, texts)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), theirs.backend_tokenizer.pre_tokenizer]
    )
    for prompt in asked["prompts"]:
        messages = prompt_messages(prompt)
        if messages is None or any("<|" in message["content"] for message in messages):
            continue  # message text stays text with us; there it becomes a control token
        rendered = theirs.apply_chat_template(
            messages, chat_template=template, add_generation_prompt=True, return_dict=False
        )
        assert rendered == prompt_ids(ours, prompt), prompt["name"]

    pinned, differences = [], []
    for text, first, repaired in zip(texts, as_read, ids_of(theirs, texts), strict=True):
        with_specials = ours.encode(text, specials=True)
        assert repaired == with_specials, f"{text!r}: {repaired} but we give {with_specials}"
        pinned.append({"text": text, "ids": ours.encode(text, specials=False)})
        if first != with_specials:
            differences.append({"text": text, "ours": with_specials, "transformers": first})
    return pinned, differences


def ids_of(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def write(path: Path, result: dict[str, Any]) -> None:
    """Indented, but a list of numbers stays on one line."""
    compact: list[str] = []

    def shelve(value: Any) -> Any:
        if isinstance(value, list) and value and all(isinstance(x, int | float) for x in value):
            compact.append(json.dumps(value, separators=(",", ":")))
            return f"@{len(compact) - 1}@"
        if isinstance(value, list):
            return [shelve(item) for item in value]
        if isinstance(value, dict):
            return {key: shelve(item) for key, item in value.items()}
        return value

    text = json.dumps(shelve(result), indent=1, ensure_ascii=True)
    for index, numbers in enumerate(compact):
        text = text.replace(f'"@{index}@"', numbers)
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
