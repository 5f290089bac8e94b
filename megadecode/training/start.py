"""How a drafter's weights begin: at random, or as the target's last layers."""

from __future__ import annotations

import torch
from torch import nn

from megadecode.drafter.module import DrafterModule
from megadecode.training.target import TorchTarget

STD = 0.02


@torch.no_grad()
def start_module(module: DrafterModule, target: TorchTarget, start: str) -> None:
    """Fill the drafter's weights; the generator of the module's device is the source of chance.

    The final norm is the target's in any case: the rows end in the target's output matrix.
    """
    for parameter in module.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=STD)
        else:
            nn.init.ones_(parameter)
    module.norm.weight.copy_(target.final_norm)
    if start == "target":
        copy_last_layers(module, target)


def copy_last_layers(module: DrafterModule, target: TorchTarget) -> None:
    """Drafter layer i starts as the target's layer i of its last ones, on context vectors that are
    the last tap, normed as that target layer norms it.

    Norms of the heads have no counterpart in the target and start as the identity; the first
    layer's attention norm becomes the context's.
    """
    config, shape = module.config, target.config
    if config.ffn != shape.ffn:
        raise ValueError(f"layers of ffn {shape.ffn} cannot start a drafter of ffn {config.ffn}")
    module.fc.weight.zero_()
    module.fc.weight[:, -config.hidden :].fill_diagonal_(1.0)
    first = shape.layers - config.layers
    for number, layer in enumerate(module.layers):
        source, attention = f"layers.{first + number}.", layer.self_attn
        pairs = {
            "attn_norm": layer.input_layernorm, "ffn_norm": layer.post_attention_layernorm,
            "q": attention.q_proj, "k": attention.k_proj, "v": attention.v_proj,
            "o": attention.o_proj, "gate": layer.mlp.gate_proj, "up": layer.mlp.up_proj,
            "down": layer.mlp.down_proj,
        }  # fmt: skip
        for name, mine in pairs.items():
            mine.weight.copy_(target.take(source + name))
    module.hidden_norm.weight.copy_(target.take(f"layers.{first}.attn_norm"))
