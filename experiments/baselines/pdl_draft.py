"""The drafter as a graph of megadecode's phases: its layers have the target's sizes, so the same
kernels run them, with attention over the drafter's own pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from cute_kernels.gpu import pack
from cute_kernels.gpu.arguments import COUNT, Arg
from cute_kernels.gpu.board import Desc, make_board
from cute_kernels.gpu.config import KINDS, LAYER_KINDS, ROWS
from cute_kernels.gpu.kv_layout import PAGE, key_order
from cute_kernels.gpu.load import Kernel
from cute_kernels.gpu.tiles import Buffers, make_plan
from experiments.baselines.network import Draft
from experiments.baselines.pdl_plan import attention_config, draft_config
from experiments.baselines.pdl_step_ends import embed_block, put_context
from megadecode.cuda_weights import _fill, _Reader, _rope
from megadecode.drafter.io import Drafter


def table(entries: dict[Arg, torch.Tensor | int]) -> torch.Tensor:
    """The argument table: addresses, and numbers as they are."""
    values = np.zeros(COUNT, np.int64)
    for key, entry in entries.items():
        values[key] = entry if isinstance(entry, int) else entry.data_ptr()
    return torch.from_numpy(values).cuda()


class PdlDraft:
    """model: the same drafter in torch, whose fc and context matrices are used. pages: an entry for
    every position. The pages have an empty layer in front, see pdl_kernels."""

    def __init__(
        self, folder: Path, name: str, drafter: Drafter, model: Draft, head: torch.Tensor,
        pages: torch.Tensor, positions: int,
    ) -> None:  # fmt: skip
        d, config = drafter.config, attention_config(name)
        s = config.shape
        sizes = (d.hidden, d.ffn, d.heads, d.kv_heads, d.head_dim)
        if sizes != (s.hidden, s.ffn, s.heads, s.kv_heads, s.head_dim):
            raise ValueError(f"drafter {d.name!r}: its layers are not of {name}'s sizes")
        self.config, self.model, self.layers = d, model, d.layers
        self.kernels = {
            part: Kernel.read(folder / f"pdl-{name}-{part}") for part in (*KINDS, "draft_attention")
        }
        self.b, self.pages = Buffers.of(config), pages
        columns = len(model.ids)
        c, read = draft_config(name, d.layers, columns), _Reader(drafter.get, d.as_model(), "cuda")

        def matrices() -> Iterator[tuple[str, torch.Tensor]]:
            for layer in range(d.layers):
                yield from read.layer(layer)
            yield "lm", head[model.ids]

        index, offsets = pack.stream_index(c, d.layers)
        self.board = torch.from_numpy(make_board()).cuda()
        self.board[Desc.ROWS] = d.block_size
        pool = (len(pages), d.layers + 1, d.kv_heads, 2, PAGE, d.head_dim)
        self.pool = torch.zeros(pool, dtype=torch.bfloat16, device="cuda")
        norms = read.head_norms(d.layers)
        self.norms = torch.cat([torch.ones_like(norms[:1]), norms]).contiguous()
        self.rope = _rope(d, positions, "cuda")
        masks = [(0, 0), *((d.window_of(i) or 0, int(d.causal(i))) for i in range(d.layers))]
        self.entries: dict[Arg, torch.Tensor | int] = {
            Arg.LAYERS: d.layers, Arg.STREAM: _fill(c, index, matrices(), "cuda"),
            Arg.OFFSETS: torch.from_numpy(offsets).cuda(),
            Arg.PLAN: torch.from_numpy(make_plan(c, d.layers)).cuda(),
            Arg.FINAL_NORM: read.norm("final_norm", d.output_multiplier),
        }  # fmt: skip
        self.attention: dict[Arg, torch.Tensor | int] = {
            Arg.BOARD: self.board, Arg.PAGE_TABLE: pages, Arg.DRAFT_KV: self.pool,
            Arg.DRAFT_ROPE: self.rope, Arg.DRAFT_QK_NORM: self.norms,
            Arg.DRAFT_MASK: torch.tensor(masks, dtype=torch.int32, device="cuda"),
            Arg.DRAFT_LAYERS: d.layers + 1,
        }  # fmt: skip
        self.tables = table(self.entries), table(self.attention)
        size = d.layers * self.b.bytes
        self.sets = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
        self.x0 = torch.zeros(ROWS * d.hidden, dtype=torch.bfloat16, device="cuda")
        self.residual = torch.zeros(ROWS * d.hidden, device="cuda")
        self.logits = torch.zeros(ROWS, config.logit_stride, device="cuda")
        order = torch.from_numpy(key_order(d.head_dim))
        self.place = torch.empty_like(order)
        self.place[order] = torch.arange(d.head_dim)
        self.place = self.place.to("cuda", torch.int32)
        self.side = torch.cuda.Stream()
        self.clear()

    def clear(self) -> None:
        """All words EMPTY, in both sets."""
        for words in self.sets:
            words.fill_(255)

    def absorb(self, features: torch.Tensor, count: torch.Tensor, length: torch.Tensor) -> None:
        """Keys and values of the `count` positions below `length` into the pages."""
        m, d = self.model, self.config
        context = F.rms_norm(
            F.linear(features, m.fc), m.context_norm.shape, m.context_norm, d.rms_eps
        )
        joint = F.linear(context, m.context_kv)
        put_context(
            joint,
            self.pool,
            self.pages,
            self.norms,
            self.rope,
            self.place,
            count,
            length,
            d.rms_eps,
        )

    def launch(self, which: int, anchor: torch.Tensor, length: torch.Tensor) -> None:
        """The block behind `length` positions through all layers, into `logits`."""
        d, b, act = self.config, self.b, self.sets[which].data_ptr()
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            self.sets[1 - which].view(self.layers, b.bytes)[:, b.a :].fill_(255)
        embed_block(
            anchor, d.mask_token_id, length, self.model.embed, d.block_size,
            d.input_embedding_scale, self.board, self.x0, self.residual,
        )  # fmt: skip
        matrices, attention = (t.data_ptr() for t in self.tables)
        stream, x = main.cuda_stream, self.x0.data_ptr()
        edge = dict(cooperative=False, dependent=True)

        def matrix(kind: str, phase: int, source: int, to: int) -> None:
            values = [matrices, source, to, self.residual.data_ptr(), phase, d.block_size]
            self.kernels[kind].launch(values, "qqqqii", stream, **edge)

        for layer in range(self.layers):
            at = act + layer * b.bytes
            hops = (x, at + b.q), (at + b.a, at + b.y), (at + b.y, at + b.h), (at + b.h, at + b.x)
            for i, (kind, (source, to)) in enumerate(zip(LAYER_KINDS, hops)):
                matrix(kind, 4 * layer + i, source, to)
                if kind == "qkv":
                    values = [attention, at, layer + 1]
                    self.kernels["draft_attention"].launch(values, "qqi", stream, **edge)
            x = at + b.x
        matrix("lm", 4 * self.layers, x, self.logits.data_ptr())
        main.wait_stream(self.side)
