"""Any of our shapes as a model of transformers, and as a folder that it writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

from megadecode.config import ModelConfig
from megadecode.models.weights import Weights
from megadecode.rope import DynamicNtk, Linear, Llama3, Yarn

NAMES = {
    "attn_norm": "input_layernorm.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}
TOP = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}


def rope_parameters(config: ModelConfig) -> dict[str, Any]:
    """`rope_parameters` of config.json."""
    theta, scaling = config.rope_theta, config.rope_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    kinds = {Linear: "linear", DynamicNtk: "dynamic", Llama3: "llama3", Yarn: "yarn"}
    values = {key: value for key, value in vars(scaling).items() if value is not None}
    original = values.pop("original_context", None)
    if original is not None and not isinstance(scaling, DynamicNtk):
        values["original_max_position_embeddings"] = original
    return {"rope_type": kinds[type(scaling)], "rope_theta": theta, **values}


def transformers_model(
    weights: Weights, dtype: torch.dtype = torch.float32, family: str | None = None, **extra: Any
) -> Any:
    """The same weights in transformers; `family` is told from the shape unless it is given."""
    c = weights.config
    if family is None:
        family = "Qwen3" if c.qk_norm else "Qwen2" if c.qkv_bias else "Llama"
    values: dict[str, Any] = dict(
        vocab_size=c.vocab,
        hidden_size=c.hidden,
        intermediate_size=c.ffn,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.context_tokens,
        rms_norm_eps=c.rms_eps,
        rope_parameters=rope_parameters(c),
        tie_word_embeddings=c.tied_embeddings,
        bos_token_id=c.bos_id,
        eos_token_id=list(c.stop_ids) or None,
        attn_implementation="eager",
    )
    made = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**(values | extra))
    )
    state = {}
    for name, tensor in weights.tensors():
        if name in TOP:
            state[TOP[name]] = torch.from_numpy(tensor)
        else:
            _, layer, part = name.split(".")
            state[f"model.layers.{layer}.{NAMES[part]}"] = torch.from_numpy(tensor)
    made.load_state_dict(state)
    return made.to(dtype).eval()


def write_folder(
    folder: Path, weights: Weights, dtype: torch.dtype = torch.float32, shard: str | None = None,
    **options: Any,
) -> Any:  # fmt: skip
    """save_pretrained into `folder`; the model it wrote."""
    model = transformers_model(weights, dtype, **options)
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    return model


@torch.inference_mode()
def logits(model: Any, tokens: Any) -> torch.Tensor:
    """[tokens, vocab] of one sequence."""
    return model(torch.as_tensor(tokens)[None]).logits[0].float()
