"""Small GGUF files for the tests, written by the `gguf` package from random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFValueType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize

from megadecode.config import ModelConfig
from megadecode.models.random_model import random_model

TINY = ModelConfig(
    name="tiny",
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=64,
    vocab=300,
    context_tokens=128,
    rope_theta=5000.0,
    rms_eps=float(np.float32(1e-5)),
    bos_id=1,
    stop_ids=(2,),
)
TOP = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight"}
STORED = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "o": "attn_output.weight",
    "ffn_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}
TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """GPT-2's stand-in characters for the bytes 0 to 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(rest)) for b in range(256)]


def vocabulary() -> tuple[list[str], list[int], list[str]]:
    """300 tokens: 3 control tokens, 256 bytes, then merges of pairs of ASCII letters."""
    control = ["<|text|>", "<|start|>", "<|end|>"]
    pairs = [f"{a} {b}" for a in "abcdefg" for b in "hijklm"][:41]
    tokens = [*control, *byte_alphabet(), *(pair.replace(" ", "") for pair in pairs)]
    return tokens, [3, 3, 3] + [1] * 297, pairs


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as GGUF stores them: rotary partner rows j and j + d / 2 of a head side by side."""
    d = weight.shape[0] // heads
    order = [
        head * d + j + half * (d // 2)
        for head in range(heads)
        for j in range(d // 2)
        for half in (0, 1)
    ]
    return weight[order]


def write_gguf(
    path: Path,
    config: ModelConfig = TINY,
    *,
    dtype: GGMLQuantizationType = GGMLQuantizationType.F32,
    tensors: dict[str, np.ndarray] | None = None,
    keys: dict[str, Any] | None = None,
    architecture: str = "llama",
) -> Path:
    """Write a model with `random_model(config, 7)`'s weights.

    `tensors` (by stored name; None leaves one out) and `keys` (None leaves one out) replace or add.
    Matrices of `dtype` that the package cannot quantise are random blocks (see `quantized`).
    """
    stored: dict[str, np.ndarray | None] = {}
    for name, values in random_model(config, 7).tensors():
        if name in TOP:
            if name != "head" or not config.tied_embeddings:
                stored[TOP[name]] = values
            continue
        _, layer, kind = name.split(".")
        if kind in ("q", "k") and architecture == "llama":
            values = interleave(values, config.heads if kind == "q" else config.kv_heads)
        stored[f"blk.{layer}.{STORED[kind]}"] = values
    stored.update(tensors or {})

    tokens, types, merges = vocabulary()
    metadata: dict[str, Any] = {
        "general.name": config.name,
        f"{architecture}.block_count": config.layers,
        f"{architecture}.context_length": config.context_tokens,
        f"{architecture}.embedding_length": config.hidden,
        f"{architecture}.feed_forward_length": config.ffn,
        f"{architecture}.attention.head_count": config.heads,
        f"{architecture}.attention.head_count_kv": config.kv_heads,
        f"{architecture}.attention.key_length": config.head_dim,
        f"{architecture}.attention.value_length": config.head_dim,
        f"{architecture}.rope.dimension_count": config.head_dim,
        f"{architecture}.rope.freq_base": config.rope_theta,
        f"{architecture}.attention.layer_norm_rms_epsilon": config.rms_eps,
        f"{architecture}.vocab_size": config.vocab,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }
    metadata.update(keys or {})

    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, values in stored.items():
        if values is None:
            continue
        if values.ndim == 1 or values.dtype != np.float32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, quantized(values, dtype), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantized(values: np.ndarray, dtype: GGMLQuantizationType) -> np.ndarray:
    """`values` [rows, columns] in blocks, [rows, bytes]; the same bytes every time.

    The package only reads Q4_K and Q6_K: those are random blocks of `values`'s shape, whose scales
    give weights of a usual size.
    """
    if dtype.name not in ("Q4_K", "Q6_K"):
        return quantize(values, dtype)
    block, block_bytes = GGML_QUANT_SIZES[dtype]
    rows, columns = values.shape
    rng = np.random.default_rng([rows, columns, int(abs(values.flat[0]) * 1e6)])
    raw = rng.integers(0, 256, (rows, columns // block, block_bytes), np.uint8)
    scales = (columns**-0.5 * rng.uniform(1, 2, (rows, columns // block, 2))).astype(np.float16)
    if dtype.name == "Q4_K":  # d and dmin, then 6-bit scales and minimums, then 4-bit values
        raw[..., :4] = (scales / np.array([256, 32], np.float16)).view(np.uint8)
    else:  # ..., int8 scales, d
        raw[..., -2:] = (scales[..., :1] / np.float16(2048)).view(np.uint8)
    return raw.reshape(rows, -1)


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_key_value(key, value, GGUFValueType.UINT32)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)
