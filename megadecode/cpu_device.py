"""Puts the CPU device together: arena, program, loop and the link to it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import numba
import numpy as np

from cute_kernels.cpu import loop
from cute_kernels.cpu.pack import allocate_acts, allocate_kv, attention_items, pack_weights
from cute_kernels.cpu.slots import Limits, Sched, make_sched
from cute_kernels.cpu.state import PAGE, Acts, Batch, Dims, Kv, make_batch
from cute_kernels.cpu.team import make_sync
from cute_kernels.plan import PHASES, program
from host.atomics import LINE
from host.cpu import CpuDevice
from host.link import Link
from host.wire import Wire, make_wire, step_worst_case
from megadecode.config import ModelConfig

MAX_SLOTS = 16
MAX_WORKERS = 16
DECODE_ROWS = 256
CHUNK_ROWS = 256
WEIGHT_TYPES = ("fp32", "bf16")


@dataclass(frozen=True)
class CpuOptions:
    """Sizes of the CPU device.

    `pages` of 64 positions are shared by all slots. `chunk_rows` is a multiple of 64.
    `park_after_s`: idle time after which the loop leaves its cores altogether (negative: never).
    """

    ctx: int
    slots: int
    pages: int
    workers: int
    weights: str = "fp32"
    chunk_rows: int = CHUNK_ROWS
    decode_rows: int = DECODE_ROWS
    max_inflight: int = 1024
    completion_entries: int = 1024
    request_entries: int = 256
    pool_bytes: int | None = None
    park_after_s: float = 5.0
    deadline_s: float = 30.0
    first_sequence: int = 0


@dataclass
class CpuParts:
    """A running CPU device, with its insides for statistics and tests."""

    link: Link
    wire: Wire
    sched: Sched
    batch: Batch
    kv: Kv
    acts: Acts
    sync: np.ndarray
    trace: np.ndarray
    dims: Dims


def default_workers() -> int:
    """One worker per core this process may use, at most 16."""
    if hasattr(os, "sched_getaffinity"):
        return min(MAX_WORKERS, len(os.sched_getaffinity(0)))
    return min(MAX_WORKERS, os.cpu_count() or 1)


def operation_names(layers: int) -> list[str]:
    """`phase` or `phase[layer]` for every operation of the program, for hang reports."""
    return [
        f"{PHASES[number].name}[{layer}]" if PHASES[number].per_layer else PHASES[number].name
        for number, layer in program(layers)
    ]


def start(config: ModelConfig, get: Callable[[str], np.ndarray], options: CpuOptions) -> CpuParts:
    """Pack the weights, allocate everything and make the link; the loop starts with the first
    request. `get(name)` gives fp32 tensors by canonical name."""
    o = options
    dims = Dims(
        config.layers, config.hidden, config.heads, config.kv_heads, config.head_dim, config.ffn,
        config.vocab,
    )  # fmt: skip
    rows = min(o.slots, o.decode_rows) + o.chunk_rows
    head_rows = min(o.slots, o.decode_rows) + 1
    wire = make_wire(
        slots=o.slots,
        workers=o.workers,
        ctx=o.ctx,
        max_inflight=o.max_inflight,
        request_entries=o.request_entries,
        completion_entries=o.completion_entries,
        pool_bytes=o.pool_bytes,
        first_sequence=o.first_sequence,
    )
    sched = make_sched(
        slots=o.slots,
        ctx=o.ctx,
        pages=o.pages,
        max_inflight=o.max_inflight,
        first_sequence=o.first_sequence,
    )
    weights = pack_weights(config, get, o.ctx, o.weights)
    kv = allocate_kv(config, o.pages)
    table = -(-o.ctx // PAGE) + 1
    acts = allocate_acts(config, rows, head_rows, o.slots, table, o.workers)
    batch = make_batch(
        rows=rows,
        head_rows=head_rows,
        slots=o.slots,
        pages_per_slot=table,
        items=attention_items(config, rows, o.slots, table),
    )
    limits = Limits(
        ctx=o.ctx,
        decode_rows=o.decode_rows,
        chunk_rows=o.chunk_rows,
        reserve_rows=1,
        worst_case=step_worst_case(o.slots, 1),
        park_after_ns=int(o.park_after_s * 1e9),
        deadline_ns=int(o.deadline_s * 1e9),
    )
    operations = program(config.layers)
    sync = make_sync(o.workers)
    counters = np.zeros(len(operations) * LINE, np.int64)
    trace = loop.make_trace()
    arguments = (
        o.workers, wire, sched, limits, dims, weights, kv, batch, acts, sync, counters, operations,
        trace, np.zeros(3, np.int64),
    )  # fmt: skip
    # Compile, or load from the cache, before the first request and not in its time to first token.
    loop.run.compile(tuple(numba.typeof(value) for value in (0, *arguments)))  # type: ignore[attr-defined]
    device = CpuDevice(
        loop.run,
        arguments,
        workers=o.workers,
        control=wire.control,
        operations=operation_names(config.layers),
    )
    link = Link(wire, device, first_sequence=o.first_sequence, deadline_s=o.deadline_s + 5)
    return CpuParts(link, wire, sched, batch, kv, acts, sync, trace, dims)
