"""A drafter as a llama.cpp draft model: a GGUF file of the architecture `dflash`.

llama.cpp runs it as a linear chain (`--spec-type draft-dflash`) and takes embedding and head from
its target, as we do. The tokenizer is copied from the target's file, because llama.cpp compares the
two vocabularies token by token.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from megadecode.drafter.config import SLIDING
from megadecode.drafter.io import Drafter
from megadecode.errors import ModelError
from megadecode.models.gguf_file import load

ARCHITECTURE = "dflash"
_TOP = {"fc": "fc", "context_norm": "enc.output_norm", "final_norm": "output_norm"}
_LAYER = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "o": "attn_output",
    "ffn_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def export_gguf(
    drafter: Drafter,
    target_file: str | os.PathLike[str],
    out: str | os.PathLike[str],
    context_tokens: int,
) -> None:
    """Write `out` (fp32) for the target in `target_file`, a GGUF file whose tokenizer is copied.

    Raises ModelError for what llama.cpp has no key for, naming it.
    """
    _check(drafter)
    source, path = Path(target_file), Path(out)
    try:
        fields = GGUFReader(source).fields
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ModelError(f"{source}: cannot be read as GGUF: {error}") from None
    if "tokenizer.ggml.tokens" not in fields:
        raise ModelError(f"{source}: holds no tokenizer, which a draft model needs")
    part = path.with_name(path.name + ".part")
    writer = GGUFWriter(part, ARCHITECTURE)
    _write_shape(writer, drafter, context_tokens)
    for name, field in fields.items():
        if not name.startswith("tokenizer.") or name == "tokenizer.ggml.mask_token_id":
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, inner)
    writer.add_mask_token_id(drafter.config.mask_token_id)
    if tokens := drafter.config.draft_tokens:
        # Its own, smaller head, and which token each of the head's rows is.
        writer.add_tensor("output.weight", load(source).tensor("head")[list(tokens)])
        writer.add_tensor("d2t", np.array(tokens, np.int64))
    for canonical, stored in _names(drafter.config.layers).items():
        writer.add_tensor(f"{stored}.weight", drafter.get(canonical))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(part, path)


def _names(layers: int) -> dict[str, str]:
    """Canonical name -> name in the file, without its suffix."""
    names = dict(_TOP)
    for layer in range(layers):
        names |= {f"layers.{layer}.{ours}": f"blk.{layer}.{s}" for ours, s in _LAYER.items()}
    return names


def _check(drafter: Drafter) -> None:
    config = drafter.config
    kinds = {config.causal(layer) for layer in range(config.layers)}
    problems = {
        "prediction": config.prediction != "same" and "its anchor row predicts too",
        "yarn": config.yarn is not None and "its rotary positions are scaled",
        "is_causal": len(kinds) > 1 and "some of its layers are causal and others are not",
        "taps": config.target_layers - 1 in config.taps
        and "it reads the target's last layer, which llama.cpp does not hand out",
    }
    for key, problem in problems.items():
        if problem:
            raise ModelError(
                f"drafter {config.name!r} cannot be exported: {problem} ({key} is "
                f"{getattr(config, key)!r})"
            )


def _write_shape(writer: GGUFWriter, drafter: Drafter, context_tokens: int) -> None:
    c = drafter.config
    writer.add_name(c.name)
    writer.add_context_length(context_tokens)
    writer.add_block_count(c.layers)
    writer.add_embedding_length(c.hidden)
    writer.add_feed_forward_length(c.ffn)
    writer.add_head_count(c.heads)
    writer.add_head_count_kv(c.kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_layer_norm_rms_eps(c.rms_eps)
    writer.add_vocab_size(c.vocab)
    key = f"{ARCHITECTURE}."
    writer.add_uint32(key + "block_size", c.block_size)
    # A layer is named by what goes into it: the layer behind the one whose output is tapped.
    writer.add_array(key + "target_layers", [tap + 1 for tap in c.taps])
    writer.add_bool(key + "attention.causal", c.causal(0))
    if SLIDING in c.layer_types:
        writer.add_sliding_window(c.window or 0)
        writer.add_array(
            key + "attention.sliding_window_pattern", [kind == SLIDING for kind in c.layer_types]
        )
    if c.input_embedding_scale != 1.0:
        writer.add_float32(key + "embedding_scale", c.input_embedding_scale)
