"""Lay a drafter out in memory for the CPU device, beside its target."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cute_kernels.cpu import pack
from cute_kernels.cpu.draft import Draft
from cute_kernels.cpu.simd import LANES
from cute_kernels.cpu.state import Weights

if TYPE_CHECKING:
    from megadecode.drafter.config import DrafterConfig


def pack_drafter(
    config: DrafterConfig,
    get: pack.Getter,
    target: Weights,
    positions: int,
    *,
    target_rows: int,
    context_rows: int,
) -> tuple[Weights, Draft]:
    """Pack a drafter's tensors in the dtype of its target, whose embedding and head it shares.

    `get(name)` returns a float32 tensor whose rows are outputs: `fc`, `context_norm`, `final_norm`
    and `layers.{i}.` + `attn_norm`, `q`, `k`, `v`, `q_norm`, `k_norm`, `o`, `ffn_norm`, `gate`,
    `up`, `down`. `positions`: how many can be rotated; a block at n needs n + block_size.
    `target_rows`: rows of a target step, whose features are kept; `context_rows`: rows whose
    features a step can turn into draft keys and values, at most the rows of the drafter's `Acts`.
    ValueError for a wrong shape and for what this device does not compute.
    """
    for key, plain in (("input_embedding_scale", 1.0), ("final_logit_softcapping", None)):
        if (value := getattr(config, key)) != plain:
            raise ValueError(
                f"drafter {config.name!r}: {key} is {value}; the CPU device has no kernel for it"
            )
    model = config.as_model()
    dtype = "fp32" if target.embed.dtype == np.float32 else "bf16"
    pack.dims_of(model)
    weights = pack.pack_weights(model, get, positions, dtype, shared=target)
    weights = weights._replace(
        # The logits are linear in it, so a scale of theirs costs nothing here.
        final_norm=weights.final_norm * np.float32(config.output_multiplier),
    )
    tokens = np.array(config.draft_tokens, np.int32)
    if tokens.size:
        weights = weights._replace(head=_rows_of_head(target.head, tokens))
    fc = np.asarray(get("fc"), np.float32)
    norm = np.asarray(get("context_norm"), np.float32)
    for name, tensor, shape in (
        ("fc", fc, (config.hidden, config.feature_size)),
        ("context_norm", norm, (config.hidden,)),
    ):
        if tensor.shape != shape:
            raise ValueError(
                f"drafter {config.name!r}: tensor {name!r} has shape {list(tensor.shape)}; "
                f"expected {list(shape)}"
            )
    layers = range(config.layers)
    return weights, Draft(
        fc=pack.pack_matrix(fc, dtype),
        context_norm=norm.copy(),
        taps=np.array(config.taps, np.int32),
        window=np.array([config.window_of(layer) or 0 for layer in layers], np.int32),
        causal=np.array([config.causal(layer) for layer in layers], np.int32),
        tokens=tokens,
        features=_rows(target_rows, config.feature_size),
        context=_rows(context_rows, config.hidden),
    )


def _rows_of_head(head: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The packed head of some tokens, a multiple of 32."""
    some = head[tokens // LANES, :, tokens % LANES]  # [R, H]
    tiles = some.reshape(-1, LANES, some.shape[1]).transpose(0, 2, 1)
    packed = pack.allocate(tiles.nbytes).view(head.dtype).reshape(tiles.shape)
    packed[...] = tiles
    return packed


def _rows(rows: int, size: int) -> np.ndarray:
    shape = (rows, size + LANES)  # padded, so that rows do not fall on the same cache sets
    return pack.allocate(rows * shape[1] * 4).view(np.float32).reshape(shape)
