"""A random target and random drafters for it: hundreds of drafts run in seconds."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from megadecode.config import ModelConfig
from megadecode.drafter import Drafter, DrafterConfig
from megadecode.drafter.io import tensor_shapes
from megadecode.drafter.module import DrafterModule
from megadecode.models.random_model import random_model

TARGET = ModelConfig(
    name="tiny target", layers=5, hidden=64, heads=4, kv_heads=2, head_dim=32, ffn=96, vocab=203,
    context_tokens=4096, tied_embeddings=False,
)  # fmt: skip
MASK = 202

DRAFTER = DrafterConfig(
    name="tiny drafter", layers=3, hidden=64, heads=4, kv_heads=2, head_dim=32, ffn=80, vocab=203,
    block_size=8, taps=(0, 2, 3), target_layers=5, mask_token_id=MASK,
)  # fmt: skip


def target():
    """The target's random weights."""
    return random_model(TARGET, seed=5)


def variant(**changes) -> DrafterConfig:
    return dataclasses.replace(DRAFTER, **changes)


def random_tensors(config: DrafterConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Tensors by published name, at the scale of a trained model's; no norm is the identity."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, shape in tensor_shapes(config).items():
        values = rng.standard_normal(shape)
        if len(shape) == 1:
            made[name] = (1 + 0.2 * values).astype(np.float32)
        else:
            made[name] = (values / np.sqrt(shape[1])).astype(np.float32)
    return made


def drafter(config: DrafterConfig = DRAFTER, seed: int = 0) -> Drafter:
    return Drafter(config, random_tensors(config, seed))


def module(of: Drafter, dtype: torch.dtype = torch.float32) -> DrafterModule:
    """The oracle on the tiny target's embeddings."""
    weights = target()
    embed, head = (torch.from_numpy(weights.tensor(name)) for name in ("embed", "head"))
    made = DrafterModule(of.config, embed, head).load(of.tensors())
    return made.requires_grad_(False).to(dtype)


def random_features(config: DrafterConfig, positions: int, seed: int = 0) -> np.ndarray:
    """[positions, taps, hidden] at the scale of a residual stream."""
    rng = np.random.default_rng([seed, positions])
    shape = (positions, len(config.taps), config.hidden)
    return (1.5 * rng.standard_normal(shape)).astype(np.float32)
