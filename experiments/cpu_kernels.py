"""How close the CPU device's kernels come to the machine: read bandwidth and FMA rate.

    python -m experiments.cpu_kernels [--rows 1 8 16 256] [--weights fp32 bf16] [--json FILE]

Measures, on the same threads, what the machine can do (a plain read of memory far larger than the
caches; fused multiply-adds on registers) and then whole steps of SmolLM2-135M's shape on random
weights, phase by phase. Machine figures are measured again before every step figure and the best is
kept: on a shared machine they move. Up to 16 rows are decode rows, all with logits; more are a
prompt chunk with one row of logits.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cute_kernels.cpu import attention, pack, phases
from cute_kernels.cpu.machine import Machine, on_threads
from cute_kernels.cpu.state import PAGE, make_batch
from experiments.provenance import provenance
from host.atomics import cpu_relax, fetch_add, load_acquire, now_ns, yield_core
from host.jit import jit
from megadecode.config import ModelConfig

SMOL = ModelConfig(
    name="SmolLM2-135M", layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, ffn=1536,
    vocab=49152, context_tokens=8192, rope_theta=100000.0,
)  # fmt: skip
NAMES = ("embed", "qkv", "attend", "merge", "out_proj", "gate_up", "down", "head")


@jit
def _barrier(sync, target):
    fetch_add(sync, 0, 1)
    spins = 0
    while load_acquire(sync, 0) < target:
        cpu_relax()
        spins += 1
        if spins > 20000:
            yield_core()


@jit
def _run_steps(worker, workers, dims, weights, kv, batch, acts, counters, sync, steps, spent):
    """`steps` whole steps; spent[step, phase] gets the nanoseconds on worker 0's clock."""
    target = 0
    for step in range(steps):
        if worker == 0:
            counters[:] = 0
        target += workers
        _barrier(sync, target)
        start = now_ns()
        for op in range(2 + 6 * dims.layers):
            layer = (op - 1) // 6
            if op == 0:
                phase = 0
                phases.embed(dims, weights, kv, batch, acts, layer, worker, counters, op)
            elif op == 1 + 6 * dims.layers:
                phase = 7
                phases.head(dims, weights, kv, batch, acts, layer, worker, counters, op)
            else:
                phase = 1 + (op - 1) % 6
                if phase == 1:
                    phases.qkv(dims, weights, kv, batch, acts, layer, worker, counters, op)
                elif phase == 2:
                    attention.attend(dims, weights, kv, batch, acts, layer, worker, counters, op)
                elif phase == 3:
                    attention.merge(dims, weights, kv, batch, acts, layer, worker, counters, op)
                elif phase == 4:
                    phases.out_proj(dims, weights, kv, batch, acts, layer, worker, counters, op)
                elif phase == 5:
                    phases.gate_up(dims, weights, kv, batch, acts, layer, worker, counters, op)
                else:
                    phases.down(dims, weights, kv, batch, acts, layer, worker, counters, op)
            target += workers
            _barrier(sync, target)
            if worker == 0:
                end = now_ns()
                spent[step, phase] += end - start
                start = end


class Bench:
    """Whole steps of a model shape on random weights."""

    def __init__(self, config: ModelConfig, dtype: str, workers: int, context: int) -> None:
        self.config, self.workers, self.context = config, workers, context
        rng = np.random.default_rng(0)
        pool = (rng.standard_normal(1 << 20) * 0.03).astype(np.float32)

        def get(name: str) -> np.ndarray:
            c = config
            shape = {
                "embed": (c.vocab, c.hidden), "head": (c.vocab, c.hidden),
                "q": (c.heads * c.head_dim, c.hidden), "k": (c.kv_heads * c.head_dim, c.hidden),
                "v": (c.kv_heads * c.head_dim, c.hidden), "o": (c.hidden, c.heads * c.head_dim),
                "gate": (c.ffn, c.hidden), "up": (c.ffn, c.hidden), "down": (c.hidden, c.ffn),
            }.get(name.split(".")[-1], (c.hidden,))  # fmt: skip
            if len(shape) == 1:
                return np.ones(shape, np.float32)
            return np.resize(pool, shape)

        rows, table = 256, (context + 256) // PAGE + 1
        self.dims = pack.dims_of(config)
        start = time.perf_counter()
        self.weights = pack.pack_weights(config, get, context + 256, dtype)
        self.pack_s = time.perf_counter() - start
        self.kv = pack.allocate_kv(config, table)
        self.kv.k[:] = 0.1
        self.kv.v[:] = 0.1
        self.acts = pack.allocate_acts(config, rows, rows, 1, table, workers)
        self.batch = make_batch(
            rows=rows, head_rows=rows, slots=1, pages_per_slot=table,
            items=pack.attention_items(config, rows, 1, table),
        )  # fmt: skip
        self.batch.pages[0] = np.arange(table)
        matrices = (self.weights.qkv, self.weights.out, self.weights.gate_up, self.weights.down)
        self.layer_bytes = sum(m.nbytes for m in matrices)
        self.head_bytes = self.weights.head.nbytes
        self.item_bytes = self.weights.head.itemsize

    def work(self, rows: int) -> tuple[float, float]:
        """Bytes read and floating-point operations of one step."""
        c = self.config
        heads = rows if rows <= 16 else 1
        keys = self.context + rows / 2
        products = (self.layer_bytes * rows + self.head_bytes * heads) / self.item_bytes
        attention_flops = 4 * rows * keys * c.heads * c.head_dim * c.layers
        kv_bytes = c.kv_bytes_per_token * (self.context + rows)
        return self.layer_bytes + self.head_bytes + kv_bytes, 2 * products + attention_flops

    def run(self, rows: int, steps: int) -> np.ndarray:
        """`[steps, phases]` nanoseconds."""
        b = self.batch
        b.token[:rows] = np.arange(rows) % self.config.vocab
        b.position[:rows] = self.context + np.arange(rows)
        b.segment[0] = 0, 0, rows
        heads = rows if rows <= 16 else 1
        b.head_row[:heads] = np.arange(rows)[-heads:]
        b.count[:3] = rows, heads, 1
        attention.build_attention_work(self.dims, b)
        counters = np.zeros((3 + 6 * self.config.layers) * 8, np.int64)
        sync, spent = np.zeros(8, np.int64), np.zeros((steps, len(NAMES)), np.int64)
        on_threads(
            self.workers,
            lambda worker: _run_steps(
                worker, self.workers, self.dims, self.weights, self.kv, b, self.acts, counters,
                sync, steps, spent,
            ),
        )  # fmt: skip
        return spent


def cpu_model() -> str:
    """The processor's name, as the system gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64, 256])
    parser.add_argument("--weights", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--context", type=int, default=512, help="keys before the first row")
    parser.add_argument("--rounds", type=int, default=5, help="alternations over all row counts")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)

    machine = Machine(options.workers)
    result: dict[str, Any] = {
        "experiment": "cpu_kernels", **provenance(), "cpu": cpu_model(), "model": SMOL.name,
        "workers": options.workers, "context": options.context, "table": [],
    }  # fmt: skip
    for dtype in options.weights:
        bench = Bench(SMOL, dtype, options.workers, options.context)
        start = time.perf_counter()
        bench.run(1, 1)
        print(f"{dtype}: packed in {bench.pack_s:.1f} s, "
              f"first step (with compiling) {time.perf_counter() - start:.1f} s")  # fmt: skip
        samples: dict[int, list[np.ndarray]] = {rows: [] for rows in options.rows}
        rates = []
        for _ in range(options.rounds):
            for rows in options.rows:
                rates.append((machine.measure_read(), machine.measure_fma()))
                samples[rows].append(bench.run(rows, 8 if rows <= 16 else 1))
        read, flop = machine.gb_per_s, machine.gflop_per_s
        now = np.median([r[0] for r in rates]), np.median([r[1] for r in rates])
        print(f"machine: read {read:.1f} GB/s best, {now[0]:.1f} median; "
              f"FMA {flop:.0f} GFLOP/s best, {now[1]:.0f} median")  # fmt: skip
        heading = "".join(f"{name:>9}" for name in NAMES)
        print(f"{'rows':>5}{'ms':>9}{'x t(first)':>11}{'GB/s':>7}{'of read':>9}{'of FMA':>8} | us:"
              + heading)  # fmt: skip
        base = None
        for rows in options.rows:
            every = np.concatenate(samples[rows])
            totals = every.sum(1)
            best = every[np.argsort(totals)[: max(1, len(totals) // 4)]].mean(0)
            seconds = float(best.sum()) / 1e9
            base = base or seconds
            size, flops = bench.work(rows)
            line = {
                "weights": dtype, "rows": rows, "ms": seconds * 1e3,
                "median_ms": float(np.median(totals)) / 1e6, "relative": seconds / base,
                "of_read": size / seconds / 1e9 / read, "of_fma": flops / seconds / 1e9 / flop,
                "phase_us": {n: float(t) / 1e3 for n, t in zip(NAMES, best)},
            }  # fmt: skip
            result["table"].append(line)
            print(f"{rows:>5}{line['ms']:>9.2f}{line['relative']:>11.2f}"
                  f"{size / seconds / 1e9:>7.1f}{line['of_read']:>9.0%}{line['of_fma']:>8.0%} |    "
                  + "".join(f"{t / 1e3:>9.0f}" for t in best))  # fmt: skip
    result["read_gb_per_s"], result["gflop_per_s"] = machine.gb_per_s, machine.gflop_per_s
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
