"""The exported drafter in llama.cpp: does its own chain accept as many tokens a draft as ours?

    python -m experiments.drafter_llama --build FOLDER      # from the llama-cpp-python sources
    python -m experiments.drafter_llama --binary PATH [--drafter auto] [--prompts 16] [--tokens 64]

An independent check of the exported weights: llama.cpp reads the same target in F32 with F32 keys
and values, and drafts with `--spec-type draft-dflash`. It starts to draft one token earlier than
our engine (the prompt's last token is its first anchor) and limits a draft's length near the end in
its own way; our chain is walked by the same rules here, over the text our engine writes. Only
prompts whose answers do not stop before the limit are taken, so that every draft can be judged.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.chat_prompts import CHAT_PROMPTS
from experiments.cpu_speed import gguf_path
from experiments.provenance import provenance
from megadecode import Engine, SamplingParams
from megadecode.drafter.find import choose_drafter
from megadecode.drafter.gguf_export import export_gguf
from megadecode.drafter.module import DrafterModule
from megadecode.models.gguf_file import load
from megadecode.models.store import DEFAULT_MODEL, resolve
from megadecode.training.evaluate import Text, draft_at, truths
from megadecode.training.target import TorchTarget
from megadecode.training.walk import accepted, true_rows

BAR = 0.03
SOURCE = "llama-cpp-python==0.3.36"
PROGRAM = "llama-speculative-simple"
_MARGIN = 16
_COUNTS = {
    name: re.compile(rf"{name}\s*=\s*(\d+)") for name in ("n_predict", "n_drafted", "n_accept")
}


def build(folder: Path) -> Path:
    """Fetch and compile llama.cpp's program for the CPU; its path. Needs cmake, ninja and C++."""
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", SOURCE]
    subprocess.run([*pip, "--dest", str(folder)], check=True)
    (archive,) = folder.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    source = archive.with_suffix("").with_suffix("") / "vendor" / "llama.cpp"
    options = {"LLAMA_CURL": "OFF", "BUILD_SHARED_LIBS": "OFF", "LLAMA_BUILD_TESTS": "OFF",
               "LLAMA_BUILD_SERVER": "OFF", "LLAMA_BUILD_TOOLS": "OFF", "GGML_NATIVE": "ON",
               "CMAKE_BUILD_TYPE": "Release"}  # fmt: skip
    flags = [f"-D{name}={value}" for name, value in options.items()]
    out = folder / "build"
    subprocess.run(["cmake", "-S", str(source), "-B", str(out), "-G", "Ninja", *flags], check=True)
    subprocess.run(["cmake", "--build", str(out), "--target", PROGRAM], check=True)
    return out / "bin" / PROGRAM


def theirs(
    binary: Path, draft: Path, prompt: bytes, tokens: int, drafted: int, threads: int
) -> dict[str, Any]:
    """llama.cpp's counts and text for one prompt."""
    with tempfile.NamedTemporaryFile(suffix=".txt") as file:
        file.write(prompt)
        file.flush()
        command = [
            str(binary), "-m", str(gguf_path("F32")), "-md", str(draft), "--spec-type",
            "draft-dflash", "--spec-draft-n-max", str(drafted), "-bf", file.name, "-n", str(tokens),
            "--temp", "0", "-fa", "off", "-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd",
            "f32", "-c", "1024", "-t", str(threads), "-td", str(threads),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, check=True)
    log = (done.stdout + done.stderr).decode("utf-8", "replace")
    counts = {name: int(pattern.search(log).group(1)) for name, pattern in _COUNTS.items()}  # type: ignore[union-attr]
    return counts | {"text": done.stdout.decode("utf-8", "replace")}


def ours(
    module: DrafterModule, features: torch.Tensor, text: Text, limit: int
) -> tuple[int, int, int]:
    """Our chain by llama.cpp's rules: tokens, steps, accepted."""
    drafted = module.config.drafted
    steps = len(text.answer) - 1
    anchors = range(text.prompt_tokens, text.prompt_tokens + steps)
    drafts = draft_at(module, features, text.ids, anchors, 1)
    left = limit - np.arange(steps) - 1  # it takes no room at all for no limit
    depth = np.where(left > 0, np.minimum(left, drafted), drafted).astype(np.int32)
    rows = true_rows(drafts.ids, drafts.logprobs, drafts.widths, truths(text, drafted), depth,
                     drafted, chain=True)  # fmt: skip
    right = accepted(rows, drafted)
    tokens = count = taken = 0
    while tokens <= limit:
        count, taken = count + 1, taken + int(right[tokens])
        tokens += int(right[tokens]) + 1
    return tokens, count, taken


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--build", type=Path, help="build llama.cpp in this folder and stop")
    parser.add_argument("--binary", type=Path, help=f"the path of {PROGRAM}")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="default: experiments/results/drafter_llama.json")
    args = parser.parse_args()
    if args.build:
        print(build(args.build))
        return
    model = load(resolve(DEFAULT_MODEL))
    drafter = choose_drafter(args.drafter, model)
    if drafter is None or args.binary is None:
        raise SystemExit("give --binary, and a drafter that belongs to the model")
    tokenizer, names = model.tokenizer(), model.metadata["tokenizer.ggml.tokens"]
    with Engine(model, ctx=1024, slots=8, draft="off") as engine:
        encoded = [engine.encode(prompt).tolist() for prompt in CHAT_PROMPTS]
        params = SamplingParams(max_new_tokens=args.tokens + _MARGIN, ignore_eos=True)
        requests = [engine.submit(ids, params) for ids in encoded]
        answers = [request.result().token_ids for request in requests]
    stops = set(model.config.stop_ids)
    target = TorchTarget(model)
    module = DrafterModule(drafter.config, target.embed, target.head).load(drafter.tensors())
    turns = []
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / "draft.gguf"
        export_gguf(drafter, model.path, draft, model.config.context_tokens)
        for prompt, ids, answer in zip(CHAT_PROMPTS, encoded, answers):
            if stops & set(answer) or len(turns) == args.prompts:
                continue
            text = Text((*ids, *answer), len(ids) - 1, args.tokens)
            features = target.forward(torch.tensor([text.ids[:-1]]), drafter.config.taps)[1][0]
            with torch.inference_mode():
                tokens, steps, taken = ours(module, features, text, args.tokens)
            said = b"".join(
                names[i].encode() if tokenizer.is_special(i) else tokenizer.token_bytes(i)
                for i in ids
            )
            found = theirs(args.binary, draft, said, args.tokens, module.config.drafted,
                           args.threads)  # fmt: skip
            common = tokenizer.decode(answer[: args.tokens - 8])
            turns.append(
                {
                    "prompt": prompt, "ours": {"tokens": tokens, "steps": steps, "accepted": taken},
                    "theirs": {
                        "tokens": found["n_predict"],
                        "steps": found["n_predict"] - found["n_accept"],
                        "accepted": found["n_accept"],
                    },
                    "same_text": common in found["text"],
                }
            )  # fmt: skip
            print(json.dumps(turns[-1]))
    rates = {
        side: sum(t[side]["accepted"] for t in turns) / sum(t[side]["steps"] for t in turns)
        for side in ("ours", "theirs")
    }
    difference = rates["theirs"] / rates["ours"] - 1
    result = {
        "experiment": "drafter_llama", **provenance(), "llama": SOURCE, "model": DEFAULT_MODEL,
        "drafter": drafter.config.name, "tokens": args.tokens,
        "accepted_per_draft": rates, "difference": difference, "bar": BAR,
        "texts_in_common": sum(t["same_text"] for t in turns),
        "met": abs(difference) < BAR and len(turns) >= args.prompts, "turns": turns,
    }  # fmt: skip
    path = args.json or Path(__file__).parent / "results" / "drafter_llama.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{rates}, difference {difference:+.2%}; written to {path}")


if __name__ == "__main__":
    main()
