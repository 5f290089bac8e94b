"""A model's weights on the GPU, in the order in which the persistent kernel reads them.

One copy: every matrix goes from the loader through the device straight to its places in the CTAs'
streams. Needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from cute_kernels.gpu import pack
from cute_kernels.gpu.config import Config
from cute_kernels.gpu.kv_layout import rotary_rows
from cute_kernels.gpu.tiles import make_plan
from megadecode.config import ModelConfig

Get = Callable[[str], Any]
"""A tensor by canonical name, fp32, as a numpy array or a torch tensor of any device."""


def _on_device(get: Get, name: str) -> torch.Tensor:
    return torch.as_tensor(get(name)).to("cuda", torch.float32)


def _folded(matrix: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """A matrix behind an RMSNorm with the norm's weights in its columns, rounded once."""
    return (matrix * norm).bfloat16()


def _matrices(config: ModelConfig, get: Get) -> Iterator[tuple[str, torch.Tensor]]:
    """(kind, bf16 [N, K]) in the order of the phases."""
    order = [*range(config.heads + config.kv_heads)]
    rotary = torch.from_numpy(rotary_rows(len(order), config.head_dim)).cuda()
    for layer in range(config.layers):

        def of(name: str, layer: int = layer) -> torch.Tensor:
            return _on_device(get, f"layers.{layer}.{name}")

        qkv = torch.cat([torch.cat([of("q"), of("k")])[rotary], of("v")])
        yield "qkv", _folded(qkv, of("attn_norm"))
        yield "o", of("o").bfloat16()
        yield "gu", _folded(pack.interleave(torch.cat([of("gate"), of("up")])), of("ffn_norm"))
        yield "down", of("down").bfloat16()
    yield "lm", _on_device(get, "head").bfloat16()


def pack_model(config: ModelConfig, get: Get, c: Config, positions: int) -> dict[str, torch.Tensor]:
    """What `arguments.Arg` calls the model, by its names there: streams, tables, norms, rotary
    factors of `positions` positions. EMBED_BASE is STREAM itself where the embeddings are tied."""
    size = pack.granule(c) // 2
    index, offsets = pack.stream_index(c, config.layers)
    place = np.empty_like(index)
    place[index] = np.arange(len(index))
    places = torch.from_numpy(place).cuda()
    stream = torch.empty(len(index), size, dtype=torch.bfloat16, device="cuda")
    at = 0
    for kind, matrix in _matrices(config, get):
        packed = pack.pack_matrix(matrix, c, kind).reshape(-1, size)
        stream[places[at : at + len(packed)]] = packed
        at += len(packed)
    if at != len(index):
        raise RuntimeError(f"{at} of {len(index)} pieces of the weight streams were filled")
    tied = config.tied_embeddings
    embed = stream
    if not tied:
        embed = pack.pack_matrix(_on_device(get, "embed").bfloat16(), c, "lm").contiguous()
    rope = config.rotations(positions).transpose(0, 2, 1).astype(np.float32)
    found = {
        "STREAM": stream,
        "OFFSETS": torch.from_numpy(offsets),
        "PLAN": torch.from_numpy(make_plan(c, config.layers)),
        "EMBED_BASE": embed,
        "EMBED_TABLE": torch.from_numpy(pack.embed_table(c, config.layers if tied else None)),
        "FINAL_NORM": pack.norm_row(_on_device(get, "final_norm").bfloat16()).contiguous(),
        "ROPE": torch.from_numpy(np.ascontiguousarray(rope)),
    }
    if config.qk_norm:
        norms = [
            torch.stack([_on_device(get, f"layers.{i}.{name}") for name in ("q_norm", "k_norm")])
            for i in range(config.layers)
        ]
        found["QK_NORM"] = torch.stack(norms)
    return {name: tensor.cuda() for name, tensor in found.items()}
