"""A model's weights, and its drafter's, in the order in which the persistent kernel reads them.

One copy: every matrix goes from the loader through the device straight to its places in the CTAs'
streams. Needs torch; `where` is the torch device, a GPU but in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from cute_kernels.gpu import pack
from cute_kernels.gpu.config import Config, DraftShape
from cute_kernels.gpu.kv_layout import rotary_rows
from cute_kernels.gpu.tiles import make_plan
from megadecode.config import ModelConfig
from megadecode.drafter.config import DrafterConfig

Get = Callable[[str], Any]
"""A tensor by canonical name, fp32, as a numpy array or a torch tensor of any device."""


class _Reader:
    """Tensors on the device, fp32; matrices behind an RMSNorm with its weights in their columns,
    rounded once, as bf16."""

    def __init__(self, get: Get, config: ModelConfig, where: str) -> None:
        self._get, self._where, self._config = get, where, config
        self._rotary = {
            n: torch.from_numpy(rotary_rows(n, config.head_dim)).to(where)
            for n in (config.kv_heads, config.heads + config.kv_heads)
        }

    def __call__(self, name: str) -> torch.Tensor:
        return torch.as_tensor(self._get(name)).to(self._where, torch.float32)

    def rotary(self, *names: str) -> torch.Tensor:
        """Projections to rotary heads, one above the other, their rows in the kernel's order."""
        rows = torch.cat([self(name) for name in names])
        return rows[self._rotary[len(rows) // self._config.head_dim]]

    def layer(self, number: int) -> Iterator[tuple[str, torch.Tensor]]:
        """(kind, bf16 [N, K]) of a layer in the order of its phases."""
        at = f"layers.{number}."
        qkv = torch.cat([self.rotary(at + "q", at + "k"), self(at + "v")])
        yield "qkv", (qkv * self(at + "attn_norm")).bfloat16()
        yield "o", self(at + "o").bfloat16()
        gu = pack.interleave(torch.cat([self(at + "gate"), self(at + "up")]))
        yield "gu", (gu * self(at + "ffn_norm")).bfloat16()
        yield "down", self(at + "down").bfloat16()

    def head_norms(self, layers: int) -> torch.Tensor:
        """fp32 [layers, 2, head_dim]: the norms of the heads of q and k."""
        rows = [self(f"layers.{i}.{name}") for i in range(layers) for name in ("q_norm", "k_norm")]
        return torch.stack(rows).reshape(layers, 2, -1)

    def norm(self, name: str, scale: float = 1.0) -> torch.Tensor:
        """A norm in front of a head, as a row of activations."""
        return pack.norm_row((self(name) * scale).bfloat16()).contiguous()


def _fill(
    c: Config, index: np.ndarray, matrices: Iterator[tuple[str, torch.Tensor]], where: str
) -> torch.Tensor:
    """The streams: the packed matrices, in phase order, at their places."""
    size = pack.granule(c) // 2
    place = np.empty_like(index)
    place[index] = np.arange(len(index))
    places = torch.from_numpy(place).to(where)
    stream = torch.empty(len(index), size, dtype=torch.bfloat16, device=where)
    at = 0
    for kind, matrix in matrices:
        packed = pack.pack_matrix(matrix, c, kind).reshape(-1, size)
        stream[places[at : at + len(packed)]] = packed
        at += len(packed)
    if at != len(index):
        raise RuntimeError(f"{at} of {len(index)} pieces of the weight streams were filled")
    return stream


def _rope(config: ModelConfig | DrafterConfig, positions: int, where: str) -> torch.Tensor:
    factors = config.rotations(positions).transpose(0, 2, 1).astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(factors)).to(where)


def pack_model(
    config: ModelConfig, get: Get, c: Config, positions: int, where: str = "cuda"
) -> dict[str, torch.Tensor]:
    """What `arguments.Arg` calls the model, by its names there: streams, tables, norms, rotary
    factors of `positions` positions. EMBED_BASE is STREAM itself where the embeddings are tied."""
    read = _Reader(get, config, where)

    def matrices() -> Iterator[tuple[str, torch.Tensor]]:
        for layer in range(config.layers):
            yield from read.layer(layer)
        yield "lm", read("head").bfloat16()

    index, offsets = pack.stream_index(c, config.layers)
    stream = _fill(c, index, matrices(), where)
    tied = config.tied_embeddings
    embed = stream
    if not tied:
        embed = pack.pack_matrix(read("embed").bfloat16(), c, "lm").contiguous()
    found = {
        "STREAM": stream,
        "OFFSETS": torch.from_numpy(offsets),
        "PLAN": torch.from_numpy(make_plan(c, config.layers)),
        "EMBED_BASE": embed,
        "EMBED_TABLE": torch.from_numpy(pack.embed_table(c, config.layers if tied else None)),
        "FINAL_NORM": read.norm("final_norm"),
        "ROPE": _rope(config, positions, where),
    }
    if config.qk_norm:
        found["QK_NORM"] = read.head_norms(config.layers)
    return {name: tensor.to(where) for name, tensor in found.items()}


DRAFT_STREAM = "DRAFT_STREAM"
"""The drafter's weights among a device's arrays. The kernel has no name for them: it finds them
from STREAM, by OFFSETS."""


def pack_drafter(
    drafter: DrafterConfig,
    get: Get,
    target: dict[str, torch.Tensor],
    head: Callable[[], Any],
    c: Config,
    draft: DraftShape,
    positions: int,
    where: str = "cuda",
) -> dict[str, torch.Tensor]:
    """The same of a drafter, and PLAN and OFFSETS of both.

    target: what `pack_model` gave. head: the target's head, fp32 [vocabulary, hidden], of which the
    listed tokens' rows are the drafter's where it does not draft all of them.
    """
    config, layers = drafter.as_model(), drafter.target_layers
    read, hidden = _Reader(get, config, where), config.hidden
    tokens = torch.tensor(drafter.draft_tokens, dtype=torch.int32, device=where)

    def matrices() -> Iterator[tuple[str, torch.Tensor]]:
        for fc in read("fc").split(hidden, 1):  # a sum over the taps
            yield "fc", fc.bfloat16()
        norm = read("context_norm")
        for layer in range(drafter.layers):
            at = f"layers.{layer}."
            keys_values = torch.cat([read.rotary(at + "k"), read(at + "v")])
            yield "ckv", (keys_values * norm).bfloat16()
        for layer in range(drafter.layers):
            yield from read.layer(layer)
        if draft.columns:
            rows = torch.as_tensor(head()).to(where, torch.float32)
            yield "lm", rows[tokens.long()].bfloat16()

    index, own = pack.draft_stream_index(c, draft)
    stream = _fill(c, index, matrices(), where)
    offsets = target["OFFSETS"].cpu().numpy()
    own = own + (stream.data_ptr() - target["STREAM"].data_ptr())
    if not draft.columns:
        own = np.concatenate([own, offsets[:, -1:]], 1)
    mask = [(drafter.window_of(i) or 0, int(drafter.causal(i))) for i in range(drafter.layers)]
    tap_of = np.full(layers, -1, np.int32)
    tap_of[list(drafter.taps)] = np.arange(len(drafter.taps))
    found = {
        DRAFT_STREAM: stream,
        "OFFSETS": torch.from_numpy(np.concatenate([offsets, own], 1)),
        "PLAN": torch.from_numpy(make_plan(c, layers, draft)),
        "DRAFT_QK_NORM": read.head_norms(drafter.layers),
        "DRAFT_ROPE": _rope(drafter, positions, where),
        # the logits are linear in it, so a scale of theirs costs nothing here
        "DRAFT_NORM": read.norm("final_norm", drafter.output_multiplier),
        "DRAFT_MASK": torch.tensor(mask, dtype=torch.int32),
        "TAP_OF": torch.from_numpy(tap_of),
    }
    if draft.columns:
        found["DRAFT_TOKENS"] = tokens
    return {name: tensor.to(where) for name, tensor in found.items()}
