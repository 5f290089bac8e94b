"""A model from a Hugging Face folder: config.json, safetensors in one file or in shards, tokenizer.

Only what is understood is loaded: a tensor that is missing, left over, of another shape or of a
dtype that cannot be converted is refused by name, with what was found and what was expected.
"""

from __future__ import annotations

import os
from pathlib import Path

from megadecode.config import ModelConfig
from megadecode.errors import ModelError
from megadecode.models.hf_config import read_config
from megadecode.models.hf_tokenizer import read_template, read_tokenizer
from megadecode.models.safetensors_file import WEIGHTS, StoredTensor, open_weights
from megadecode.models.stored import StoredModel, wrong_shape
from megadecode.models.tokenizer import Tokenizer
from megadecode.models.weights import tensor_shapes

# Canonical name -> name in the file.
_TOP_NAMES = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o": "self_attn.o_proj.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
# Written by old versions of transformers; the configuration says the same.
_DERIVED = "rotary_emb.inv_freq"


def load_folder(path: str | os.PathLike[str], name: str | None = None) -> FolderModel:
    """Open a folder and check it: configuration, every tensor's name, shape, dtype and place.

    Reads headers only; weights are read when asked for. `name` defaults to the folder's.
    Raises ModelError.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder}: there is no config.json; a Hugging Face folder holds config.json, "
            f"{WEIGHTS} (or shards and their index) and tokenizer.json"
        )
    config = read_config(folder, name or folder.resolve().name)
    return FolderModel(folder, config, _match(folder, config))


class FolderModel(StoredModel):
    """Implements `Weights` over a folder that passed every check of `load_folder`."""

    def __init__(self, path: Path, config: ModelConfig, stored: dict[str, StoredTensor]) -> None:
        super().__init__(path, config, {name: tensor.read for name, tensor in stored.items()})

    @property
    def chat_template(self) -> str | None:
        return read_template(self.path)

    def _read_tokenizer(self) -> Tokenizer | None:
        return read_tokenizer(self.path)


def _match(folder: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """Canonical name -> its tensor in the files; nothing missing, nothing left over."""
    stored = open_weights(folder)
    if config.layers > len(stored):
        raise ModelError(
            f"{folder}: num_hidden_layers is {config.layers}, but there are {len(stored)} tensors"
        )
    left = {name for name in stored if not name.endswith(_DERIVED)}
    sources: dict[str, StoredTensor] = {}
    for name, shape in tensor_shapes(config).items():
        their_name = _stored_name(name)
        left.discard(their_name)
        if name == "head" and config.tied_embeddings:
            continue
        tensor = stored.get(their_name)
        if tensor is None:
            raise ModelError(f"{folder}: tensor {their_name!r} is missing; expected {list(shape)}")
        if tensor.shape != shape:
            raise wrong_shape(tensor.path, their_name, tensor.shape, shape)
        tensor.check_readable()
        sources[name] = tensor
    if left:
        raise ModelError(
            f"{folder}: tensor {min(left)!r} is not part of a model of this configuration; "
            "it would change the result"
        )
    return sources


def _stored_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    layers, layer, part = name.split(".")
    return f"model.{layers}.{layer}.{_LAYER_NAMES[part]}"
