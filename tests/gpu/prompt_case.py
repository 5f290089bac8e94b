"""A model with random weights and the buffers of the prompt kernels; torch, no cutlass.

`PromptCase.run` launches a part of the segment (or all of it) on a chunk; `rows_of` and `set_rows`
read and write activations as plain [rows, columns]; references are methods of `Reference`.
"""

import numpy as np
import torch

from cute_kernels.gpu import board, kv_layout, pack
from cute_kernels.gpu.arguments import COUNT, Arg
from cute_kernels.gpu.config import LAYER_KINDS, Config
from cute_kernels.gpu.kv_layout import PAGE
from cute_kernels.gpu.prompt_plan import (
    BLOCKS,
    COLUMNS_BYTES,
    MAX_ROWS,
    PromptBuffers,
    from_row_quads,
    to_row_quads,
)
from cute_kernels.gpu.tiles import make_plan

POISON = -1  # as int16: a NaN
THETA = 500000.0


class Model:
    """Random bf16 matrices in plain row order (norm weights count as folded in; gate and up rows
    alternate), q/k norm weights, embeddings; and all of it packed."""

    def __init__(self, c: Config, seed: int) -> None:
        s = self.shape = c.shape
        self.c, gen = c, torch.Generator("cuda").manual_seed(seed)

        def draw(n: int, k: int) -> torch.Tensor:
            w = torch.randn(n, k, generator=gen, device="cuda", dtype=torch.bfloat16)
            return w * k**-0.5

        sizes = [(s.qkv, s.hidden), (s.hidden, s.attended), (2 * s.ffn, s.hidden)]
        sizes.append((s.hidden, s.ffn))
        self.layers = [
            {name: draw(*size) for name, size in zip(LAYER_KINDS, sizes, strict=True)}
            for _ in range(s.layers)
        ]
        self.head = draw(s.vocab, s.hidden) * s.hidden**0.5
        self.embedding = self.head if s.tied else draw(s.vocab, s.hidden) * s.hidden**0.5
        shape = (s.layers, 2, s.head_dim)
        self.qk_norm = 1 + torch.randn(shape, generator=gen, device="cuda") / 4
        self._pack()

    def _pack(self) -> None:
        c, s = self.c, self.shape
        size = pack.granule(c) // 2
        rotary = kv_layout.rotary_rows(s.heads + s.kv_heads, s.head_dim)
        order = np.concatenate([rotary, np.arange(len(rotary), s.qkv)])
        self.qkv_order = torch.from_numpy(order).cuda()
        pieces = []
        for layer in self.layers:
            for name, w in layer.items():
                w = w[self.qkv_order] if name == "qkv" else w
                pieces.append(pack.pack_matrix(w, c, name).reshape(-1, size))
        pieces.append(pack.pack_matrix(self.head, c, "lm").reshape(-1, size))
        index, offsets = pack.stream_index(c, s.layers)
        self.stream = torch.cat(pieces)[torch.from_numpy(index).cuda()]
        self.offsets = torch.from_numpy(offsets).cuda()
        self.plan = torch.from_numpy(make_plan(c, s.layers)).cuda()
        packed, layers = self.stream, s.layers
        if not s.tied:
            packed, layers = pack.pack_matrix(self.embedding, c, "lm").contiguous(), None
        self.embed = packed
        self.embed_table = torch.from_numpy(pack.embed_table(c, layers)).cuda()

    def packed(self) -> dict[str, torch.Tensor]:
        """By name of Arg."""
        return dict(
            STREAM=self.stream, OFFSETS=self.offsets, PLAN=self.plan, QK_NORM=self.qk_norm,
            EMBED_BASE=self.embed, EMBED_TABLE=self.embed_table,
        )  # fmt: skip


class PromptCase:
    """Buffers for contexts of up to `positions`, everything poisoned; pages in random order."""

    def __init__(self, c: Config, model: Model, positions: int, seed: int, spare: int = 2) -> None:
        s, gen = c.shape, torch.Generator("cuda").manual_seed(seed)
        self.c, self.model, self.shape, self.b = c, model, s, PromptBuffers.of(c)
        pages = -(-positions // PAGE)
        self.act = torch.full((self.b.bytes // 2,), POISON, dtype=torch.int16, device="cuda")
        order = torch.randperm(pages + spare, generator=gen, device="cuda")
        self.pages, self.free = order[:pages].int(), order[pages:]
        block = (pages + spare, s.layers, s.kv_heads, 2, PAGE, s.head_dim)
        self.pool = torch.full(block, POISON, dtype=torch.int16, device="cuda")
        self.tokens = torch.randint(
            s.vocab, (positions,), generator=gen, device="cuda", dtype=torch.int32
        )
        half = s.head_dim // 2
        angle = np.arange(positions)[:, None] * THETA ** (-np.arange(half) / half)
        self.rope = torch.tensor(
            np.stack([np.cos(angle), np.sin(angle)], -1), dtype=torch.float32, device="cuda"
        )
        self.board = torch.zeros(board.WORDS, dtype=torch.int32, device="cuda")
        self.table = torch.zeros(COUNT, dtype=torch.int64)
        for name, value in {
            **{Arg[name]: value for name, value in model.packed().items()},
            Arg.ROPE: self.rope, Arg.BOARD: self.board, Arg.KV_POOL: self.pool,
            Arg.PAGE_TABLE: self.pages, Arg.TOKENS: self.tokens, Arg.PROMPT_ACT: self.act,
        }.items():  # fmt: skip
            self.table[name] = value.data_ptr()
        self.table[Arg.LAYERS] = s.layers
        self.args = self.table.cuda()

    def run(self, kernel, rows: int, position: int = 0, first: int = 0, last: int | None = None):
        last = 4 * self.shape.layers if last is None else last
        torch.cuda.synchronize()
        kernel.launch([self.args.data_ptr(), rows, position, first, last], "qiiii")
        torch.cuda.synchronize()

    def run_part(self, load, part: str, layer: int, rows: int, position: int = 0) -> None:
        """One part of a layer, as a kernel of its own."""
        phase = {"embed": 0, "qkv": 0, "gu": 2, "down": 3}.get(part, 1) + 4 * layer
        last = phase if part == "embed" else phase + 1
        self.run(load(f"prompt-{self.shape.name}-{part}"), rows, position, phase, last)

    # -- activations
    def _flat(self, name: str) -> torch.Tensor:
        s = self.shape
        columns = dict(x=s.hidden, q=s.qkv, a=s.attended, h=s.ffn)[name]
        at = getattr(self.b, name) // 2
        return self.act[at : at + columns // 32 * COLUMNS_BYTES // 2]

    def raw_rows(self, name: str) -> torch.Tensor:
        """[256, columns] 16-bit, columns as the kernel has them."""
        return pack.from_fragments(self._flat(name), BLOCKS)

    def rows_of(self, name: str) -> torch.Tensor:
        """[256, columns] bf16, poison and all. q: columns in plain order."""
        x = self.raw_rows(name)
        if name == "q":
            plain = torch.empty_like(x)
            plain[:, self.model.qkv_order] = x
            x = plain
        return x.contiguous().view(torch.bfloat16)

    def set_rows(self, name: str, x: torch.Tensor) -> None:
        """x: [rows, columns] bf16; the other rows are poison."""
        full = torch.full((MAX_ROWS, x.shape[1]), POISON, dtype=torch.int16, device="cuda")
        full[: len(x)] = x.contiguous().view(torch.int16)
        if name == "q":
            full = full[:, self.model.qkv_order]
        self._flat(name).copy_(pack.to_fragments(full, BLOCKS))

    def _residual(self) -> torch.Tensor:
        return self.act[self.b.residual // 2 : self.b.parts // 2].view(torch.float32)

    def residual(self) -> torch.Tensor:
        return from_row_quads(self._residual())

    def set_residual(self, x: torch.Tensor) -> None:
        full = torch.full((MAX_ROWS, self.shape.hidden), float("nan"), device="cuda")
        full[: len(x)] = x
        self._residual().copy_(to_row_quads(full))

    # -- pages
    def keys_values(self, layer: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[kv heads, length, head_dim] bf16 in plain order, as they lie in the pages."""
        order = torch.from_numpy(kv_layout.key_order(self.shape.head_dim)).cuda()
        blocks = kv_layout.swizzle_rows(self.pool[self.pages.long(), layer])
        k, v = (
            blocks[:, :, i].transpose(0, 1).reshape(self.shape.kv_heads, -1, self.shape.head_dim)
            for i in range(2)
        )
        plain = torch.empty_like(k)
        plain[..., order] = k
        return plain[:, :length].view(torch.bfloat16), v[:, :length].view(torch.bfloat16)

    def set_keys_values(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """The inverse; positions behind are poison."""
        s, pages = self.shape, len(self.pages)
        order = torch.from_numpy(kv_layout.key_order(s.head_dim)).cuda()
        for i, x in enumerate((k[..., order], v)):
            full = torch.full(
                (s.kv_heads, pages * PAGE, s.head_dim), POISON, dtype=torch.int16, device="cuda"
            )
            full[:, : x.shape[1]] = x.contiguous().view(torch.int16)
            rows = kv_layout.swizzle_rows(full.reshape(s.kv_heads, pages, PAGE, s.head_dim))
            self.pool[self.pages.long(), layer, :, i] = rows.transpose(0, 1)


# -- references ----------------------------------------------------------------------------------
def normed(x: torch.Tensor, eps: float, weight: torch.Tensor | None = None) -> torch.Tensor:
    y = x.float() * torch.rsqrt((x.float() ** 2).mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.float()).to(x.dtype)


class Reference:
    """Each part on given inputs, in the dtype of those inputs: fp32, or bf16 as torch does it.
    Attention's and the matrices' inputs hold `rows` rows."""

    def __init__(self, model: Model, rope: torch.Tensor, dtype: torch.dtype) -> None:
        self.model, self.shape, self.dtype, self.rope = model, model.shape, dtype, rope

    def w(self, layer: int, name: str) -> torch.Tensor:
        return self.model.layers[layer][name].to(self.dtype)

    def qkv(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        return normed(x.to(self.dtype), self.shape.rms_eps) @ self.w(layer, "qkv").T

    def o(self, layer: int, a: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual.to(self.dtype) + a.to(self.dtype) @ self.w(layer, "o").T

    def gu(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        y = normed(x.to(self.dtype), self.shape.rms_eps) @ self.w(layer, "gu").T
        return torch.nn.functional.silu(y[:, 0::2]) * y[:, 1::2]

    def down(self, layer: int, h: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual.to(self.dtype) + h.to(self.dtype) @ self.w(layer, "down").T

    def heads(
        self, layer: int, qkv: torch.Tensor, position: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [heads, rows, d], k and v [kv heads, rows, d]; q and k normalised and rotated."""
        s, n, d = self.shape, len(qkv), self.shape.head_dim
        sizes = [s.heads * d, s.kv_heads * d, s.kv_heads * d]
        q, k, v = (x.reshape(n, -1, d) for x in qkv.to(self.dtype).split(sizes, 1))
        rope = self.rope[position : position + n, None].to(self.dtype)
        cos, sin = rope[..., 0], rope[..., 1]
        out = []
        for which, x in enumerate((q, k)):
            if s.qk_norm:
                x = normed(x, s.rms_eps, self.model.qk_norm[layer, which].to(self.dtype))
            a, b = x.chunk(2, -1)
            out.append(torch.cat([a * cos - b * sin, b * cos + a * sin], -1).transpose(0, 1))
        return out[0], out[1], v.transpose(0, 1)

    def attention(
        self, layer: int, qkv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: int
    ) -> torch.Tensor:
        """k, v: of all positions up to the chunk's end, [kv heads, position + rows, d]."""
        s, n = self.shape, len(qkv)
        q = self.heads(layer, qkv, position)[0]
        group = s.heads // s.kv_heads
        k, v = (x.to(self.dtype).repeat_interleave(group, 0) for x in (k, v))
        at = torch.arange(n, device="cuda")[:, None] + position
        mask = torch.arange(position + n, device="cuda")[None] <= at
        out = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask
        )[0]
        return out.transpose(0, 1).reshape(n, -1)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, list]:
        """(residual stream behind the last layer, [(k, v) of each layer]) of a whole prompt."""
        x, keys = self.model.embedding[tokens.long()].to(self.dtype), []
        for i in range(self.shape.layers):
            qkv = self.qkv(i, x)
            _, k, v = self.heads(i, qkv, 0)
            keys.append((k, v))
            x = self.o(i, self.attention(i, qkv, k, v, 0), x)
            x = self.down(i, self.gu(i, x), x)
        return x, keys


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2."""
    return float((got.float() - want.float()).norm() / want.float().norm())
