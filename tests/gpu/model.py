"""A random model on the GPU, packed for a kernel, and what it should compute. Needs torch.

Three forwards: `stored` rounds to bf16 where the kernel stores bf16 and is fp32 between (what every
phase is compared with), `exact` is fp32 throughout (bf16 weights), `bf16` is plain torch in bf16.
Norm weights of attention and ffn are folded into the matrices, as the kernel has them.
"""

import numpy as np
import torch
import torch.nn.functional as F

from cute_kernels.gpu import pack
from cute_kernels.gpu.config import LAYER_KINDS, PAGE, Config, Shape
from cute_kernels.gpu.kv_layout import key_order, rotary_order, rotary_rows, swizzle_rows
from cute_kernels.gpu.tiles import make_plan

THETA = 500000.0


class Model:
    """matrices[layer]: qkv, o, gu (rows gate 0, up 0, gate 1, ...), down, bf16 [N, K]."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, s = shape, shape
        self.gen = torch.Generator("cuda").manual_seed(seed)
        sizes = (s.qkv, s.hidden), (s.hidden, s.attended), (2 * s.ffn, s.hidden), (s.hidden, s.ffn)
        self.matrices = [[self.draw(n, k) for n, k in sizes] for _ in range(s.layers)]
        self.head = self.draw(s.vocab, s.hidden)
        self.embed = self.head if s.tied else self.draw(s.vocab, s.hidden)
        self.norm = (1 + 0.2 * self.noise(s.hidden)).bfloat16()
        self.qk_norm = 1 + 0.2 * self.noise(s.layers, 2, s.head_dim)

    def noise(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.gen, device="cuda")

    def draw(self, n: int, k: int) -> torch.Tensor:
        return (self.noise(n, k) * k**-0.5).bfloat16()

    def packed(self, c: Config) -> dict[str, torch.Tensor]:
        """Stream, offsets, plan and embedding for a kernel."""
        s, size = c.shape, pack.granule(c) // 2
        order = np.arange(s.qkv)
        if c.attention:
            rotary = rotary_rows(s.heads + s.kv_heads, s.head_dim)
            order[: len(rotary)] = rotary
        rows = torch.from_numpy(order).cuda()
        pieces = []
        for layer in self.matrices:
            for name, w in zip(LAYER_KINDS, layer, strict=True):
                w = w[rows] if name == "qkv" else w
                pieces.append(pack.pack_matrix(w, c, name).reshape(-1, size))
        pieces.append(pack.pack_matrix(self.head, c, "lm").reshape(-1, size))
        index, offsets = pack.stream_index(c, s.layers)
        out = {
            "STREAM": torch.cat(pieces)[torch.from_numpy(index).cuda()],
            "OFFSETS": torch.from_numpy(offsets).cuda(),
            "PLAN": torch.from_numpy(make_plan(c, s.layers)).cuda(),
            "FINAL_NORM": pack.norm_row(self.norm).contiguous(),
            "QK_NORM": self.qk_norm.contiguous(),
        }
        out["EMBED_BASE"] = out["STREAM"]
        if not s.tied:
            out["EMBED_BASE"] = pack.pack_matrix(self.embed, c, "lm").contiguous()
        table = pack.embed_table(c, s.layers if s.tied else None)
        out["EMBED_TABLE"] = torch.from_numpy(table).cuda()
        return out


class Context:
    """Committed keys (after norm and rotation) and values, bf16 [layers, kv heads, n, d], and the
    pages that hold them in a random order, NaN in every position that nobody may read."""

    def __init__(self, shape: Shape, committed: int, room: int, seed: int) -> None:
        s, self.shape, self.committed = shape, shape, committed
        gen = torch.Generator("cuda").manual_seed(seed)
        size = (s.layers, s.kv_heads, committed, s.head_dim)
        self.keys, self.values = (
            torch.randn(size, generator=gen, device="cuda").bfloat16() for _ in range(2)
        )
        n = -(-(committed + room) // PAGE)
        self.pages = torch.randperm(n, generator=gen, device="cuda").int()
        self.pool = torch.full(
            (n, s.layers, s.kv_heads, 2, PAGE, s.head_dim), float("nan"),
            dtype=torch.bfloat16, device="cuda",
        )  # fmt: skip
        order = torch.from_numpy(key_order(s.head_dim)).cuda()
        for i, x in enumerate((self.keys[..., order], self.values)):
            full = torch.full((s.layers, s.kv_heads, n * PAGE, s.head_dim), float("nan"),
                              dtype=torch.bfloat16, device="cuda")  # fmt: skip
            full[:, :, :committed] = x
            blocks = full.reshape(s.layers, s.kv_heads, n, PAGE, s.head_dim)
            self.pool[self.pages.long(), :, :, i] = swizzle_rows(blocks).permute(2, 0, 1, 3, 4)
        angle = np.arange(n * PAGE)[:, None] * THETA ** (
            -np.arange(s.head_dim // 2) / (s.head_dim // 2)
        )
        rope = np.stack([np.cos(angle), np.sin(angle)], -1)
        self.rope = torch.tensor(rope, dtype=torch.float32, device="cuda")


def stored(v: torch.Tensor) -> torch.Tensor:
    return v.bfloat16().float()


def exact(v: torch.Tensor) -> torch.Tensor:
    return v


def factor(x: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)


def rotate(v: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """v: [rows, heads, d]; rope: [rows, d / 2, 2]."""
    a, b = v.chunk(2, -1)
    cos, sin = rope[:, None, :, 0], rope[:, None, :, 1]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def split_heads(model: Model, ctx: Context, layer: int, qkv: torch.Tensor, rnd):
    """Rotated q and k (after their norms) and v of a chain of rows, [rows, heads, d], and all keys
    and values that they see, [kv heads, keys, d]. qkv: [rows, qkv], plain column order."""
    s, n = model.shape, qkv.shape[0]
    q, key, value = qkv.split(
        [s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.head_dim], 1
    )
    rope = ctx.rope[ctx.committed : ctx.committed + n].to(qkv.dtype)
    out = []
    for i, v in enumerate((q, key)):
        v = v.reshape(n, -1, s.head_dim)
        if s.qk_norm:
            v32 = v.float()
            v = (v32 * factor(v32, s.rms_eps) * model.qk_norm[layer, i]).to(qkv.dtype)
        out.append(rnd(rotate(v, rope)))
    q, key = out
    value = value.reshape(n, -1, s.head_dim)
    keys = torch.cat([ctx.keys[layer].to(qkv.dtype), key.transpose(0, 1)], 1)
    values = torch.cat([ctx.values[layer].to(qkv.dtype), value.transpose(0, 1)], 1)
    return q, keys, values


def causal(ctx: Context, n: int) -> torch.Tensor:
    """[rows, keys] bool: a row sees the committed keys and the rows up to itself."""
    seen = torch.ones(n, ctx.committed + n, dtype=torch.bool, device="cuda")
    return seen.tril(ctx.committed)


def attend(model: Model, ctx: Context, layer: int, qkv: torch.Tensor, rnd) -> torch.Tensor:
    """A chain of rows behind the committed keys, in fp32."""
    s, n = model.shape, qkv.shape[0]
    q, keys, values = split_heads(model, ctx, layer, qkv, rnd)
    group = s.heads // s.kv_heads
    keys, values = (v.repeat_interleave(group, 0) for v in (keys, values))
    scores = q.transpose(0, 1) @ keys.transpose(1, 2) * s.head_dim**-0.5
    scores.masked_fill_(~causal(ctx, n), float("-inf"))
    return rnd((scores.softmax(-1) @ values).transpose(0, 1).reshape(n, -1))


def attend_bf16(model: Model, ctx: Context, layer: int, qkv: torch.Tensor) -> torch.Tensor:
    """Plain torch in bf16."""
    s, n = model.shape, qkv.shape[0]
    q, keys, values = split_heads(model, ctx, layer, qkv, exact)
    group = s.heads // s.kv_heads
    keys, values = (v.repeat_interleave(group, 0) for v in (keys, values))
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None], values[None], attn_mask=causal(ctx, n)
    )
    return out[0].transpose(0, 1).reshape(n, -1)


def forward(
    model: Model, ctx: Context | None, tokens: torch.Tensor, layers: int, rnd=stored
) -> dict[str, torch.Tensor]:
    """Every buffer of the last layer, and the logits. ctx None: no attention, o reads q."""
    s, x = model.shape, model.embed[tokens].float()
    residual, out = x, {}
    for i in range(layers):
        wq, wo, wg, wd = (w.float() for w in model.matrices[i])
        q = rnd(x @ wq.T * factor(x, s.rms_eps))
        a = q[:, : s.attended] if ctx is None else attend(model, ctx, i, q, rnd)
        middle = residual + a @ wo.T
        y = rnd(middle)
        gu = y @ wg.T * factor(y, s.rms_eps)
        h = rnd(F.silu(gu[:, 0::2]) * gu[:, 1::2])
        residual = middle + h @ wd.T
        x = rnd(residual)
        out = dict(q=q, a=a, y=y, h=h, x=x)
    out["logits"] = rnd(x * model.norm) @ model.head.float().T * factor(x, s.rms_eps)
    return out


def forward_bf16(
    model: Model, ctx: Context | None, tokens: torch.Tensor, layers: int
) -> torch.Tensor:
    """Logits of plain torch in bf16: a residual in bf16, as Hugging Face models have it."""
    s, x = model.shape, model.embed[tokens]

    def norm(v):
        return (v.float() * factor(v.float(), s.rms_eps)).bfloat16()

    for i in range(layers):
        wq, wo, wg, wd = model.matrices[i]
        q = F.linear(norm(x), wq)
        if ctx is None:
            a = q[:, : s.attended]
        else:
            a = attend_bf16(model, ctx, i, q)
        x = x + F.linear(a, wo)
        gu = F.linear(norm(x), wg)
        x = x + F.linear(F.silu(gu[:, 0::2]) * gu[:, 1::2], wd)
    return F.linear(norm(x) * model.norm, model.head).float()


def column_order(c: Config) -> torch.Tensor:
    """order[i]: the plain qkv column that the kernel keeps at column i."""
    s = c.shape
    order = np.arange(s.qkv)
    if c.attention:
        heads = np.arange(s.heads + s.kv_heads)[:, None] * s.head_dim
        rotary = (heads + rotary_order(s.head_dim)).reshape(-1)
        order[: len(rotary)] = rotary
    return torch.from_numpy(order).cuda()
