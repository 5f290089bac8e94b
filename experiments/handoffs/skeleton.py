"""Run step kernels on synthetic weights, compare with torch, time them. Needs torch and a GPU."""

import gc
from typing import Any

import numpy as np
import torch

from cute_kernels.gpu import pack
from cute_kernels.gpu.config import COPIES, LAYER_KINDS, Config
from cute_kernels.gpu.load import Kernel
from cute_kernels.gpu.tiles import Buffers, make_plan
from experiments.handoffs.context import Context, attend


class Weights:
    """Random bf16 matrices [N, K] of a shape, in phase order, with unit gain (K ** -0.5).

    Rows of gate/up are interleaved (gate 0, up 0, gate 1, ...), as the kernels want them.
    """

    def __init__(self, shape, seed: int) -> None:
        self.shape = shape
        gen = torch.Generator("cuda").manual_seed(seed)

        def draw(n: int, k: int) -> torch.Tensor:
            w = torch.randn(n, k, generator=gen, device="cuda", dtype=torch.bfloat16)
            return w * k**-0.5

        s = shape
        sizes = [
            (s.qkv, s.hidden),
            (s.hidden, s.heads * s.head_dim),
            (2 * s.ffn, s.hidden),
            (s.hidden, s.ffn),
        ]
        self.matrices = [draw(n, k) for _ in range(s.layers) for n, k in sizes]
        self.matrices.append(draw(s.vocab, s.hidden))
        self.x = torch.randn(128, s.hidden, generator=gen, device="cuda").bfloat16()

    def of(self, layers: int) -> list[torch.Tensor]:
        return self.matrices[: 4 * layers] + self.matrices[-1:]


def reference(
    weights: Weights, layers: int, rows: int, context: Context | None = None
) -> dict[str, torch.Tensor]:
    """The step in fp32, rounded to bf16 where the kernel stores bf16. Keys: KINDS; with a context
    `qkv` is the attention output."""
    s, ws = weights.shape, weights.of(layers)

    def factor(v):
        return torch.rsqrt((v * v).mean(1, keepdim=True) + s.rms_eps)

    def stored(v):
        return v.bfloat16().float()

    x = weights.x[:rows].float()
    residual, out = x, {}
    for i in range(layers):
        wq, wo, wg, wd = (w.float() for w in ws[4 * i : 4 * i + 4])
        q = x @ wq.T * factor(x)
        q = stored(q) if context is None else attend(context, i, q)
        residual = residual + q[:, : s.heads * s.head_dim] @ wo.T
        y = stored(residual)
        gu = y @ wg.T * factor(y)
        h = stored(torch.nn.functional.silu(gu[:, 0::2]) * gu[:, 1::2])
        residual = residual + h @ wd.T
        x = stored(residual)
        out = dict(qkv=q, o=y, gu=h, down=x)
    out["lm"] = x @ ws[-1].float().T * factor(x)
    return out


def packed(weights: Weights, c: Config, layers: int) -> tuple[torch.Tensor, ...]:
    """(stream, offsets, plan) on the device."""
    size, s = pack.granule(c) // 2, c.shape
    rotary = pack.rotary_rows(s.heads + s.kv_heads)
    rows = np.concatenate([rotary, np.arange(len(rotary), s.qkv)])
    order = torch.from_numpy(rows).cuda()
    names = [*LAYER_KINDS] * layers + ["lm"]
    pieces = [
        pack.pack_matrix(w[order] if c.attention and name == "qkv" else w, c, name).reshape(
            -1, size
        )
        for name, w in zip(names, weights.of(layers), strict=True)
    ]
    index, offsets = pack.stream_index(c, layers)
    stream = torch.cat(pieces)[torch.from_numpy(index).cuda()]
    return (
        stream,
        torch.from_numpy(offsets).cuda(),
        torch.from_numpy(make_plan(c, layers)).cuda(),
    )


class Skeleton:
    """A step kernel with its buffers and packed weights."""

    def __init__(
        self, kernel: Kernel, c: Config, weights: Weights, context: Context | None = None
    ) -> None:
        self.kernel, self.c, self.weights, self.context = kernel, c, weights, context
        self.buffers = Buffers.of(c)
        self.packs: dict[int, tuple[torch.Tensor, ...]] = {}
        n = self.buffers.bytes * COPIES // 2
        self.act = torch.zeros(n, dtype=torch.bfloat16, device="cuda")
        self.logits = torch.zeros(c.rows, c.shape.vocab, device="cuda")
        self.counter = torch.zeros(32 + c.ctas, dtype=torch.int32, device="cuda")
        phases = 4 * c.shape.layers + 1
        self.times = torch.zeros(c.ctas * (phases * 4 + 16) + 4, dtype=torch.int64, device="cuda")

    def pack(self, layers: int) -> tuple[torch.Tensor, ...]:
        if layers not in self.packs:
            self.packs[layers] = packed(self.weights, self.c, layers)
        return self.packs[layers]

    def launch(
        self, x: torch.Tensor, layers: int, steps: int, context: Context | None = None
    ) -> float:
        """x: [rows, hidden] bf16. Returns us of the whole launch, by events."""
        c, context = self.c, context or self.context
        stream, offsets, plan = self.pack(layers)
        full = torch.zeros(c.tile_rows, c.shape.hidden, dtype=torch.bfloat16, device="cuda")
        full[: x.shape[0]] = x
        x0 = pack.to_fragments(full, c).contiguous()
        r0 = full.float().reshape(c.tile_rows, -1, 8).transpose(0, 1).contiguous()
        self.act.view(torch.int16).fill_(-1)  # EMPTY, and a NaN: stale reads show
        self.logits.fill_(float("nan"))
        self.counter.zero_()
        self.last = (layers * steps - 1) % COPIES
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        tensors = (stream, offsets, plan, x0, r0, self.act, self.logits, self.counter, self.times)
        pointers, scalars = [t.data_ptr() for t in tensors], [0, 0, 0]
        if context is None:
            pointers += [0] * 4
        else:  # the pool's layer stride is the shape's, also when fewer layers run
            assert layers == context.shape.layers
            pointers += [
                t.data_ptr() for t in (context.pool, context.pages, context.rope, context.rows)
            ]
            scalars = context.scalars()
        torch.cuda.synchronize()
        start.record()
        self.kernel.launch(
            [*pointers, layers, steps, *scalars],
            "q" * 13 + "i" * 5,
            torch.cuda.current_stream().cuda_stream,
        )
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3

    def outputs(self) -> dict[str, torch.Tensor]:
        """What the last layer and the head left, fp32 [rows, columns], by phase."""
        b, size, rows = self.buffers, self.buffers.bytes // 2, self.c.rows
        copy = self.act[self.last * size : (self.last + 1) * size]
        first = b.a if self.c.attention else b.q
        shape, out = self.c.shape, {}
        places = (first, shape.heads * 64), (b.y, shape.hidden), (b.h, shape.ffn), (b.x, 0)
        for name, (at, cols) in zip(LAYER_KINDS, places, strict=True):
            if name == "qkv" and not self.c.attention:
                cols = shape.qkv
            n = (cols or shape.hidden) // 32 * self.c.chunk_bytes // 2
            flat = copy[at // 2 : at // 2 + n]
            out[name] = pack.from_fragments(flat, self.c)[:rows].float()
        out["lm"] = self.logits.clone()
        return out

    def check(self) -> dict[str, Any]:
        """Relative L2 error per phase for 1 and all layers, and three bit-equalities."""
        c, w = self.c, self.weights
        rows, full = c.rows, c.shape.layers
        x, report = w.x[:rows], {}
        for layers in [full] if c.attention else sorted({1, full}):
            self.launch(x, layers, 1)
            want, got = reference(w, layers, rows, self.context), self.outputs()
            errors = {}
            for name in got:
                a, b = got[name][:, : want[name].shape[1]], want[name]
                errors[name] = float((a - b).norm() / b.norm())
            report[f"relative L2, {layers} layers"] = errors
        first = got["lm"]
        self.launch(x, full, 3)
        report["repeat equal"] = torch.equal(first, self.outputs()["lm"])
        gen = torch.Generator("cuda").manual_seed(rows)
        order = torch.randperm(rows, generator=gen, device="cuda")
        moved = self.context.permuted(order.tolist()) if self.context else None
        self.launch(x[order], full, 1, moved)
        report["permuted rows equal"] = torch.equal(first[order], self.outputs()["lm"])
        alone = torch.zeros_like(x)
        alone[0] = x[0]
        self.launch(alone, full, 1)
        report["row 0 alone equal"] = torch.equal(first[0], self.outputs()["lm"][0])
        worst = max(e for k, v in report.items() if k.startswith("rel") for e in v.values())
        report["ok"] = bool(
            worst < 2e-2
            and report["repeat equal"]
            and report["permuted rows equal"]
            and report["row 0 alone equal"]
        )
        return report

    def step_us(self, few: int = 5, many: int = 45) -> float:
        """One step, from two launches of different length: launch and first-step costs cancel."""
        x, full = self.weights.x[: self.c.rows], self.c.shape.layers
        return (self.launch(x, full, many) - self.launch(x, full, few)) / (many - few)

    def skew(self) -> dict[str, list[float]]:
        """us from a phase's first arrival; [first, mean, last CTA] of: activations complete, own
        work done, phase done; only with `timing`."""
        c, full = self.c, self.c.shape.layers
        self.launch(self.weights.x[: c.rows], full, 3)
        times = self.times[: c.ctas * (4 * full + 1) * 4]
        t = times.view(c.ctas, 4 * full + 1, 4).cpu().double() / 1e3
        out = {}
        for i, name in enumerate([*LAYER_KINDS, "lm"]):
            v = t[:, i : 4 * full : 4] if name != "lm" else t[:, -1:]
            d = v - v[:, :, :1].amin(0, keepdim=True)
            for j, what in enumerate(("complete", "work", "done"), 1):
                x = d[..., j]
                three = (x.amin(0).mean(), x.mean(), x.amax(0).mean())
                out[f"{name} {what}"] = [round(float(f), 2) for f in three]
        clock = self.times[-4:].tolist()
        out["SM clock MHz"] = [round((clock[2] - clock[0]) / (clock[3] - clock[1]) * 1e3)]
        if c.attention:  # the last layer's; columns: attention.stamp
            v = self.times[-c.ctas * 16 - 4 : -4].view(c.ctas, 2, 8).cpu().double() / 1e3
            v = v[: c.shape.kv_heads * 16]
            for half in range(2):
                for slot in range(8 if half == 0 else 5):
                    x = v[:, half, slot] - v[:, 0, 0].min()
                    three = (x.min(), x.mean(), x.max())
                    out[f"attention {half} {slot}"] = [round(float(f), 2) for f in three]
        return out

    def lateness(self) -> dict[str, list[float]]:
        """How late each CTA ends gate/up and the head, us from the mean CTA, averaged over layers:
        what is left is a property of the SM, not chance. `sm`: where CTA i ran."""
        c, full = self.c, self.c.shape.layers
        times = self.times[: c.ctas * (4 * full + 1) * 4]
        t = times.view(c.ctas, 4 * full + 1, 4).cpu().double() / 1e3
        gu, lm = t[:, 2 : 4 * full : 4, 2], t[:, -1, 2]
        gu = gu - gu.mean(0, keepdim=True)
        return {
            "sm": self.counter[32:].tolist(),
            "gu": [round(float(v), 2) for v in gu.mean(1)],
            "gu spread": [round(float(v), 2) for v in gu.std(1)],
            "lm": [round(float(v), 2) for v in lm - lm.mean()],
        }

    def free(self) -> None:
        self.packs.clear()
        gc.collect()
