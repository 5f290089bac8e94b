"""One step of attention on random data: buffers for the kernel, and the same in torch.

Pages lie in a random order and hold NaN wherever no committed key is; rows that a step does not
have hold NaN in every buffer; rotary factors of positions that no row has are NaN.
"""

import math
import random

import numpy as np
import torch

from cute_kernels.gpu import arguments, board, kv_layout, pack
from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.board import Desc
from cute_kernels.gpu.config import ROWS, Config
from cute_kernels.gpu.kv_layout import PAGE
from cute_kernels.gpu.load import Kernel
from cute_kernels.gpu.tiles import Buffers

THETA = 500000.0
NAN = float("nan")


def random_tree(rows: int, seed: int) -> list[int]:
    """Parents of a random tree whose first four rows are a chain; depth stays under 16."""
    rng = random.Random(seed)
    return [-1, 0, 1, 2][:rows] + [rng.randrange(i) for i in range(4, rows)]


def chain(rows: int) -> list[int]:
    return list(range(-1, rows - 1))


def fused(a, b, c):
    """a b + c in fp32, rounded once (but for one case in 2^29, by way of fp64)."""
    return (a.double() * b.double() + c.double()).float()


class Case:
    """A slot with `committed` positions in its pages, and raw columns of qkv for rows on top.

    raw: bf16 [layers, rows, qkv] in plain column order. Everything random follows from `seed`.
    """

    def __init__(self, kernel: Kernel, c: Config, committed: int, parents: list[int], seed: int,
                 layers: int = 2) -> None:  # fmt: skip
        s = self.shape = c.shape
        self.kernel, self.c, self.layers, self.normed = kernel, c, layers, s.qk_norm
        self.gen = torch.Generator("cuda").manual_seed(seed)
        size = (layers, s.kv_heads, committed, s.head_dim)
        self.keys, self.values = self._randn(*size), self._randn(*size)
        self.raw = self._randn(layers, len(parents), s.qkv)
        self.weights = 1 + 0.3 * self._randn(layers, 2, s.head_dim).float()
        blocks = -(-(committed + ROWS) // PAGE)
        self.pages = torch.randperm(blocks + 3, generator=self.gen, device="cuda")[:blocks].int()
        shape = (blocks + 3, s.layers, s.kv_heads, 2, PAGE, s.head_dim)
        self.pool = torch.full(shape, NAN, dtype=torch.bfloat16, device="cuda")
        order = torch.from_numpy(kv_layout.key_order(s.head_dim)).cuda()
        for layer in range(layers):
            for i, x in enumerate((self.keys[layer][..., order], self.values[layer])):
                padded = torch.full((s.kv_heads, blocks * PAGE, s.head_dim), NAN, device="cuda")
                padded = padded.bfloat16()
                padded[:, :committed] = x
                rows = padded.reshape(s.kv_heads, blocks, PAGE, s.head_dim)
                rows = kv_layout.swizzle_rows(rows).transpose(0, 1)
                self.pool[self.pages.long(), layer, :, i] = rows
        self.angles = THETA ** (-np.arange(s.head_dim // 2) / (s.head_dim // 2))
        self.begin(committed, parents)

    def _randn(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.gen, device="cuda", dtype=torch.bfloat16)

    def begin(self, committed: int, parents: list[int]) -> None:
        """Another step over the same pages."""
        self.committed, self.parents = committed, parents
        self.depth, self.path = kv_layout.paths(parents)
        self.positions = committed + self.depth
        factors = np.full((int(self.positions.max()) + 2, len(self.angles), 2), NAN, np.float32)
        for p in set(self.positions.tolist()):
            factors[p] = np.stack([np.cos(p * self.angles), np.sin(p * self.angles)], -1)
        self.rope = torch.from_numpy(factors).cuda()

    # -- the kernel
    def _act(self) -> torch.Tensor:
        """Copies of Buffers, all EMPTY (as bf16 a NaN) but for the step's rows of qkv."""
        c, s, b, n = self.c, self.shape, Buffers.of(self.c), len(self.parents)
        act = torch.full((self.layers, b.bytes // 2), -1, dtype=torch.int16, device="cuda")
        rotary = kv_layout.rotary_rows(s.heads + s.kv_heads, s.head_dim)
        columns = torch.from_numpy(np.concatenate([rotary, np.arange(len(rotary), s.qkv)])).cuda()
        full = torch.full((self.layers, ROWS, s.qkv), -1, dtype=torch.int16, device="cuda")
        full[:, :n] = self.raw[: self.layers, :n, columns].view(torch.int16)
        for layer in range(self.layers):
            words = pack.to_fragments(full[layer])
            act[layer, b.q // 2 : b.q // 2 + words.numel()] = words
        assert c.shape.layers >= self.layers
        return act

    def _descriptor(self) -> torch.Tensor:
        words, n = np.zeros(board.WORDS, np.uint32), len(self.parents)
        words[Desc.ROWS], words[Desc.POSITION], words[Desc.COMMITTED] = n, *[self.committed] * 2
        words[Desc.ROW_POSITION : Desc.ROW_POSITION + n] = self.positions
        words[Desc.PATH : Desc.PATH + 2 * n] = self.path.ravel()
        return torch.from_numpy(words.view(np.int32)).cuda()

    def _entries(self) -> dict[Arg, torch.Tensor]:
        """What the table points at."""
        return {
            Arg.ACT: self.act, Arg.BOARD: self.board, Arg.PAGE_TABLE: self.pages,
            Arg.KV_POOL: self.pool, Arg.ROPE: self.rope, Arg.QK_NORM: self.weights,
        }  # fmt: skip

    def prepare(self) -> None:
        """Upload everything for `launch`."""
        self.act, self.board = self._act(), self._descriptor()
        table = torch.zeros(arguments.COUNT, dtype=torch.int64)
        for name, x in self._entries().items():
            table[name] = x.data_ptr()
        if self.c.timing:
            self.stamps = torch.zeros(self.c.ctas, 2, 10, dtype=torch.int64, device="cuda")
            table[Arg.TIMES] = self.stamps.data_ptr()
        self.table = table.cuda()

    def launch(self) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self.kernel.launch([self.table.data_ptr(), self.layers], "qi", stream)

    def run(self) -> torch.Tensor:
        """bf16 [layers, 16, heads * head_dim]: the kernel's output, EMPTY where nothing was put."""
        self.prepare()
        torch.cuda.synchronize()
        self.launch()
        torch.cuda.synchronize()
        b, n = Buffers.of(self.c), self.shape.attended * ROWS
        words = self.act[:, b.a // 2 : b.a // 2 + n].view(torch.bfloat16)
        return torch.stack([pack.from_fragments(w) for w in words])

    def parts_of_absent_rows(self) -> torch.Tensor:
        c, b, s = self.c, Buffers.of(self.c), self.shape
        words = s.kv_heads * ROWS * c.splits * c.part_bytes // 2
        parts = self.act[:, b.part // 2 : b.part // 2 + words]
        return parts.reshape(self.layers, s.kv_heads, ROWS, -1)[:, :, len(self.parents) :]

    # -- torch
    def heads(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(q [rows, heads, d], k, v [rows, kv heads, d]) bf16, normed and rotated."""
        s, n, d = self.shape, len(self.parents), self.shape.head_dim
        x = self.raw[layer, :n]
        q, k, v = x.split([s.heads * d, s.kv_heads * d, s.kv_heads * d], 1)
        factors = self.rope[torch.from_numpy(self.positions).cuda()][:, None]

        def ready(x, weight):
            x = x.reshape(n, -1, d).float()
            if self.normed:
                x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + s.rms_eps) * weight
            lo, hi = x.chunk(2, -1)
            cos, sin = factors[..., 0], factors[..., 1]
            turned = fused(lo, cos, -(hi * sin)), fused(hi, cos, lo * sin)
            return torch.cat(turned, -1).bfloat16()

        norms = self.weights[layer]
        return ready(q, norms[0]), ready(k, norms[1]), v.reshape(n, -1, d)

    def mask(self, layer: int) -> torch.Tensor:
        """bool [rows, committed + rows]: which keys a row sees."""
        n = len(self.parents)
        seen = torch.zeros(n, n, dtype=torch.bool)
        for i, parent in enumerate(self.parents):
            if parent >= 0:
                seen[i] = seen[parent]
            seen[i, i] = True
        ones = torch.ones(n, self.committed, dtype=torch.bool)
        return torch.cat([ones, seen], 1).cuda()

    def reference(self, layer: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[rows, heads * d] fp32; all arithmetic in `dtype`."""
        q, k, v = self.heads(layer)
        group = self.shape.heads // self.shape.kv_heads
        keys = torch.cat([self.keys[layer][:, : self.committed], k.transpose(0, 1)], 1).to(dtype)
        values = torch.cat([self.values[layer][:, : self.committed], v.transpose(0, 1)], 1)
        out = []
        for h in range(self.shape.kv_heads):
            mine = q[:, h * group : (h + 1) * group].transpose(0, 1).to(dtype)
            scores = mine @ keys[h].T / math.sqrt(self.shape.head_dim)
            weights = scores.masked_fill(~self.mask(layer), float("-inf")).softmax(-1)
            out.append(weights @ values[h].to(dtype))
        n = len(self.parents)
        return torch.cat(out).transpose(0, 1).reshape(n, -1).float()

    def pool_after(self) -> torch.Tensor:
        """The pool as the step must leave it: row i's K and V at position committed + i."""
        pool, d = self.pool.clone(), self.shape.head_dim
        order = torch.from_numpy(kv_layout.key_order(d)).cuda()
        at = torch.arange(len(self.parents), device="cuda") + self.committed
        page, place = self.pages[at // PAGE].long(), at % PAGE
        for layer in range(self.layers):
            _, k, v = self.heads(layer)
            for i, x in enumerate((k[..., order], v)):
                rows = torch.zeros(x.shape[1], PAGE, d, dtype=x.dtype, device="cuda")
                for r in range(len(self.parents)):
                    rows[:, place[r]] = x[r]
                    pool[page[r], layer, :, i, place[r]] = kv_layout.swizzle_rows(rows)[:, place[r]]
        return pool
