"""Greedy decoding on the CPU: this engine against transformers and llama.cpp on the same weights.

    python -m experiments.cpu_speed [--rounds 5] [--tokens 128] [--prompt-tokens 64]

Needs, besides the project, torch, transformers and llama-cpp-python in the same environment. All
sides run the default model's dequantised weights: llama.cpp as F32 and BF16 files written here from
the same values, with float32 keys and values and flash attention off; transformers with its own
attention and cache. Each side lives in a process of its own that sleeps while another runs; sides
take turns, and each turn decodes the same prompt for the same number of tokens. Counted is the time
from the first new token to the last: no prefill. A machine's memory speed moves by the minute, so
the figures to look at are the ratios of neighbouring turns and their medians.

The check that runs beside it: all float32 sides must give the same tokens in every turn; where a
bfloat16 side leaves them is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from experiments.cpu_kernels import cpu_model
from experiments.provenance import provenance
from host.cache import cache_home
from megadecode.models.gguf_file import load
from megadecode.models.store import DEFAULT_MODEL, resolve

Turn = Callable[[list[int], int], tuple[list[int], float]]
"""(prompt ids, new tokens) -> the new tokens, and seconds from the first to the last of them."""

SIDES = ("ours-fp32", "ours-bf16", "llama-f32", "llama-bf16", "transformers-fp32")
BARS = (
    ("ours-fp32", "transformers-fp32", 2.5),
    ("ours-fp32", "llama-f32", 0.85),
    ("ours-bf16", "llama-bf16", 0.85),
)
TEXT = (
    "A lighthouse keeper writes down what she sees each night: the ships that pass, the weather, "
    "the birds that rest on the rail, and the light that turns above it all. Tell her story from "
    "the first evening of autumn to the last morning of winter, slowly, with every small detail."
)


def write_gguf(source: Path, target: Path, kind: str) -> None:
    """The model in `source` with every matrix dequantised and stored as F32 or BF16."""
    import gguf

    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, arch)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value, sub = field.contents(), None
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            sub = field.types[-1]
        if field.name == "general.file_type":
            file_type = gguf.LlamaFileType
            value = int(file_type.ALL_F32 if kind == "F32" else file_type.MOSTLY_BF16)
        if field.name == "general.quantization_version":
            continue
        writer.add_key_value(field.name, value, field.types[0], sub_type=sub)
    stored = gguf.GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1 or kind == "F32":
            writer.add_tensor(tensor.name, values)
        else:
            packed = gguf.quants.quantize(values, stored)
            writer.add_tensor(tensor.name, packed, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(target)


def gguf_path(kind: str) -> Path:
    """The default model as an F32 or BF16 file, written once into the cache folder."""
    source = resolve(DEFAULT_MODEL)
    target = cache_home() / "experiments" / f"{source.name.split('.')[0]}.{kind}.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        write_gguf(source, target, kind)
    return target


def ours(dtype: str, threads: int) -> Turn:
    from megadecode import Engine, SamplingParams

    engine = Engine(DEFAULT_MODEL, ctx=2048, slots=1, weights=dtype, workers=threads)

    def turn(ids: list[int], count: int) -> tuple[list[int], float]:
        params = SamplingParams(max_new_tokens=count, ignore_eos=True)
        first = last = 0.0
        tokens: list[int] = []
        for chunk in engine.stream(ids, params):
            last = time.perf_counter()
            # Several tokens may come at once: the clock starts at the first chunk's last token.
            if not tokens:
                first, taken = last, len(chunk.token_ids)
            tokens += chunk.token_ids
        engine.park()
        seconds = last - first
        return tokens, seconds * (len(tokens) - 1) / (len(tokens) - taken)

    return turn


def transformers(dtype: str, threads: int) -> Turn:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    torch.set_num_threads(threads)
    path = resolve(DEFAULT_MODEL)
    kind = torch.float32 if dtype == "fp32" else torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=kind
    ).eval()

    @torch.inference_mode()
    def turn(ids: list[int], count: int) -> tuple[list[int], float]:
        cache = transformers.DynamicCache()
        rows, tokens, first = torch.tensor([ids]), [], 0.0
        while len(tokens) < count:
            out = model(rows, past_key_values=cache, use_cache=True, logits_to_keep=1)
            tokens.append(int(out.logits[0, -1].argmax()))
            rows = torch.tensor([tokens[-1:]])
            if len(tokens) == 1:
                first = time.perf_counter()
        return tokens, time.perf_counter() - first

    return turn


def llama(kind: str, threads: int) -> Turn:
    import llama_cpp

    f32 = llama_cpp.GGML_TYPE_F32
    model = llama_cpp.Llama(
        str(gguf_path(kind)), n_ctx=2048, n_batch=512, n_threads=threads, n_threads_batch=threads,
        type_k=f32, type_v=f32, flash_attn=False, logits_all=False, verbose=False,
    )  # fmt: skip
    vocab = model.n_vocab()

    def turn(ids: list[int], count: int) -> tuple[list[int], float]:
        model.reset()
        model.eval(ids)
        tokens: list[int] = []
        first = 0.0
        while True:
            logits = np.ctypeslib.as_array(
                llama_cpp.llama_get_logits_ith(model.ctx, -1), shape=(vocab,)
            )
            tokens.append(int(logits.argmax()))
            if len(tokens) == 1:
                first = time.perf_counter()
            if len(tokens) == count:
                return tokens, time.perf_counter() - first
            model.eval(tokens[-1:])

    return turn


def make_side(name: str, threads: int) -> Turn:
    who, kind = name.split("-")
    if who == "ours":
        return ours(kind, threads)
    if who == "llama":
        return llama(kind.upper(), threads)
    return transformers(kind, threads)


def serve(name: str, threads: int) -> None:
    """A side's process: one JSON line in, a turn, one JSON line out."""
    turn = make_side(name, threads)
    print(json.dumps({"ready": name}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        tokens, seconds = turn(request["ids"], request["count"])
        print(json.dumps({"tokens": tokens, "seconds": seconds}), flush=True)


class Side:
    """A side seen from the script that times it."""

    def __init__(self, name: str, threads: int) -> None:
        self.name = name
        command = [sys.executable, "-m", "experiments.cpu_speed", "--serve", name]
        self._process = subprocess.Popen(
            [*command, "--threads", str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, cwd=Path(__file__).parent.parent,
        )  # fmt: skip
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError(f"{self.name} ended with code {self._process.wait()}")

    def turn(self, ids: list[int], count: int) -> tuple[list[int], float]:
        """New tokens, and tokens per second after the first."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"ids": ids, "count": count}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        assert len(answer["tokens"]) == count, f"{self.name}: {len(answer['tokens'])} tokens"
        return answer["tokens"], (count - 1) / answer["seconds"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sides", nargs="+", default=list(SIDES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, help="default: experiments/results/cpu_speed.json")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.serve:
        serve(options.serve, options.threads)
        return

    tokenizer = load(resolve(DEFAULT_MODEL)).tokenizer()
    ids = tokenizer.chat([{"role": "user", "content": TEXT}])
    while len(ids) < options.prompt_tokens:
        ids += ids
    ids = list(ids[: options.prompt_tokens])
    sides = [Side(name, options.threads) for name in options.sides]
    rates: dict[str, list[float]] = {side.name: [] for side in sides}
    tokens: dict[str, list[int]] = {}
    for side in sides:  # a turn to warm up, and the tokens to compare
        tokens[side.name], _ = side.turn(ids, options.tokens)
    for n in range(options.rounds):
        for side in sides if n % 2 == 0 else reversed(sides):
            got, rate = side.turn(ids, options.tokens)
            assert got == tokens[side.name], f"{side.name} gave other tokens in another turn"
            rates[side.name].append(rate)
        last = ", ".join(f"{name} {values[-1]:.1f}" for name, values in rates.items())
        print(f"round {n + 1}: {last} tok/s")
    for side in sides:
        side.close()

    exact = [name for name in options.sides if name.endswith(("fp32", "f32"))]
    same = all(tokens[name] == tokens[exact[0]] for name in exact) if exact else True
    base = tokens[exact[0]] if exact else next(iter(tokens.values()))
    agreement = {
        name: next((i for i, (a, b) in enumerate(zip(t, base)) if a != b), len(base))
        for name, t in tokens.items()
    }
    bars = []
    middle = ", ".join(f"{name} {median(values):.1f}" for name, values in rates.items())
    print(f"\nmedians: {middle} tok/s")
    for mine, rival, bar in BARS:
        if mine in rates and rival in rates:
            ratios = [a / b for a, b in zip(rates[mine], rates[rival])]
            bars.append({"ours": mine, "rival": rival, "bar": bar, "ratios": ratios,
                         "median": median(ratios), "met": median(ratios) >= bar})  # fmt: skip
            print(f"{mine} / {rival}: {median(ratios):.2f} (bar {bar}): "
                  + " ".join(f"{r:.2f}" for r in ratios))  # fmt: skip
    print(f"float32 sides agree on all {len(base)} tokens: {same}; "
          f"first differing token by side: {agreement}")  # fmt: skip
    result = {
        "experiment": "cpu_speed", **provenance(), "cpu": cpu_model(), "threads": options.threads,
        "model": DEFAULT_MODEL, "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.tokens, "tok_s": rates, "bars": bars,
        "float32_sides_agree": same, "tokens_in_common": agreement, "versions": _versions(),
    }  # fmt: skip
    path = options.json or Path(__file__).parent / "results" / "cpu_speed.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {path}")
    if not same:
        raise SystemExit("the float32 sides disagree: the comparison is void")


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("torch", "transformers", "llama-cpp-python", "numba", "llvmlite", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


if __name__ == "__main__":
    main()
