"""Puts the CPU device together: arena, program, loop and the link to it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np

from cute_kernels.cpu import loop
from cute_kernels.cpu.draft import Draft
from cute_kernels.cpu.draft_pack import pack_drafter
from cute_kernels.cpu.machine import Machine
from cute_kernels.cpu.pack import (
    allocate_acts,
    allocate_kv,
    attention_items,
    dims_of,
    pack_weights,
)
from cute_kernels.cpu.policy import LARGEST, make_policy
from cute_kernels.cpu.slots import AUTO, Context, Limits, Sched, make_decision, make_sched
from cute_kernels.cpu.speculate import NO_SCRIPT, Script, make_ranked
from cute_kernels.cpu.state import PAGE, Model, make_batch
from cute_kernels.cpu.team import make_sync
from cute_kernels.cpu.topk import make_workspace
from cute_kernels.cpu.tree import make_frontier, make_tree
from cute_kernels.plan import ONCE, PHASES, Shape, program
from host.atomics import LINE
from host.cpu import CpuDevice
from host.link import Link
from host.wire import MAX_ALTERNATIVES, Wire, make_wire
from megadecode.acceptance import SCRIPTED
from megadecode.config import ModelConfig
from megadecode.device import AUTO_BUDGET, Settings, Start, Tensors
from megadecode.drafter.io import Drafter
from megadecode.errors import ModelError, ParameterError
from megadecode.options import choice, device_options
from megadecode.sampling import SamplingParams
from megadecode.trace import PhaseFigures, phase_figures

MAX_WORKERS = 16
DECODE_ROWS = 256
CHUNK_ROWS = 256
WEIGHT_TYPES = ("fp32", "bf16")
NO_ROWS = np.zeros(0, np.int64)
OPTIONS = {
    "workers": (1, MAX_WORKERS),
    "decode_rows": (1, 256),
    "max_inflight": (1, 2**20),
    "completion_entries": (1, 2**24),
    "request_entries": (1, 2**24),
    "pool_bytes": (1, 2**40),
    "first_sequence": (0, 2**62),
}
"""What `Engine` passes on to this device, and its ranges."""


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
    completion_entries: int = 4096
    request_entries: int = 256
    pool_bytes: int | None = None
    park_after_s: float = 5.0
    deadline_s: float = 30.0
    first_sequence: int = 0
    budget: int = AUTO
    chain: bool = False
    script: Script = NO_SCRIPT


@dataclass
class CpuParts:
    """A running CPU device, with its insides for statistics and tests."""

    link: Link
    loop: loop.Loop
    target: Model
    drafter: Model
    weights: str
    taps: int  # 0: there is no drafter
    workers: int
    _machine: Machine | None = None

    @property
    def reserve_rows(self) -> int:
        return self.loop.limits.reserve_rows

    @property
    def wire(self) -> Wire:
        return self.loop.wire

    @property
    def sched(self) -> Sched:
        return self.loop.sched

    @property
    def trace(self) -> np.ndarray:
        return self.loop.trace

    @property
    def acceptance(self) -> str | None:
        if not self.taps:
            return None
        return SCRIPTED if self.loop.script.widths.size else "drafter"

    def split(self) -> None:
        """Its trace says more."""

    def refuse(self, params: SamplingParams) -> None:
        """Everything there is to ask for can be had."""

    def figures(self, *, reset: bool) -> list[PhaseFigures]:
        """From the loop's own counters; the drafter's phases against the drafter's sizes."""
        counters = self.loop.trace
        drafter = Shape(*self.drafter.dims, taps=self.taps) if self.taps else None
        item_bytes = 2 if self.weights == "bf16" else 4
        figures = phase_figures(counters.copy(), Shape(*self.target.dims), item_bytes, drafter)
        if reset:
            counters[:] = 0
        return figures

    def read_gb_per_s(self) -> float:
        """With as many threads as the loop has, from an array far larger than the caches."""
        if self._machine is None:
            self._machine = Machine(self.workers)
        return self._machine.measure_read()


def default_workers() -> int:
    """One worker per core this process may use, at most 16."""
    if hasattr(os, "sched_getaffinity"):
        return min(MAX_WORKERS, len(os.sched_getaffinity(0)))
    return min(MAX_WORKERS, os.cpu_count() or 1)


def operation_names(operations: np.ndarray) -> list[str]:
    """`phase` or `phase[layer]` for every operation of a program, for hang reports."""
    return [
        PHASES[number].name + (f"[{layer}]" if PHASES[number].repeat != ONCE else "")
        for number, layer in operations
    ]


def prepare(settings: Settings, options: Mapping[str, Any]) -> Start:
    """See `megadecode.device.prepare`."""
    o = settings
    chosen = CpuOptions(
        ctx=o.ctx,
        slots=o.slots,
        pages=o.pages,
        weights=choice("weights", "fp32" if o.weights is None else o.weights, *WEIGHT_TYPES),
        chunk_rows=CHUNK_ROWS if o.chunk_rows is None else o.chunk_rows,
        park_after_s=o.park_after_s,
        budget=AUTO if o.budget == AUTO_BUDGET else o.budget,
        chain=o.chain,
        **({"workers": default_workers()} | device_options(options, OPTIONS)),
    )
    return lambda config, get, drafter: start(config, get, chosen, drafter)


def start(
    config: ModelConfig, get: Tensors, options: CpuOptions, drafter: Drafter | None = None
) -> CpuParts:
    """Pack the weights, allocate everything and make the link; the loop starts with the first
    request. `get(name)` gives fp32 tensors by canonical name.

    Raises ModelError for a shape the device has no kernel for, ParameterError when a ring does not
    fit or memory is short.
    """
    config = config.for_context(options.ctx)
    try:
        dims_of(config)
    except ValueError as error:
        raise ModelError(str(error)) from None
    try:
        return _assemble(config, get, options, drafter)
    except (MemoryError, OSError) as error:
        need = options.pages * PAGE * config.kv_bytes_per_token / 2**30
        raise ParameterError(
            f"no memory for {options.pages} KV pages ({need:.1f} GiB) and what else the engine "
            f"needs: {error}. Ask for less with ctx, kv_tokens or slots"
        ) from None


def _make_wire(o: CpuOptions, tokens_per_step: int) -> Wire:
    try:
        return make_wire(
            slots=o.slots,
            workers=o.workers,
            ctx=o.ctx,
            max_inflight=o.max_inflight,
            tokens_per_step=tokens_per_step,
            alternatives=MAX_ALTERNATIVES,
            request_entries=o.request_entries,
            completion_entries=o.completion_entries,
            pool_bytes=o.pool_bytes,
            first_sequence=o.first_sequence,
        )
    except ValueError as error:
        raise ParameterError(str(error)) from None


def _assemble(
    config: ModelConfig,
    get: Tensors,
    options: CpuOptions,
    drafter: Drafter | None,
) -> CpuParts:
    o = options
    shape = drafter.config if drafter else None
    block = shape.block_size if shape else 0
    tree_rows = 1 + (o.budget if o.budget >= 0 else LARGEST) if shape else 1
    decode_rows = min(o.slots * tree_rows, o.decode_rows)
    rows = decode_rows + o.chunk_rows
    reserve = max(tree_rows, block)
    table = -(-(o.ctx + reserve) // PAGE)
    wire = _make_wire(o, 1 + (shape.drafted if shape else 0))
    sched = make_sched(
        slots=o.slots,
        ctx=o.ctx,
        pages=o.pages,
        max_inflight=o.max_inflight,
        first_sequence=o.first_sequence,
    )
    batch = make_batch(
        rows=rows,
        head_rows=decode_rows + 1,
        slots=o.slots,
        pages_per_slot=table,
        items=attention_items(config, rows, o.slots, table),
    )
    target = Model(
        dims_of(config),
        pack_weights(config, get, o.ctx + reserve, o.weights),
        allocate_kv(config, o.pages),
        batch,
        allocate_acts(config, rows, decode_rows + 1, o.slots, table, o.workers),
    )
    model, draft, context = _drafter(drafter, target, o, rows)
    operations = program(config.layers, shape.layers if shape else 0, shape.taps if shape else ())
    state = loop.Loop(
        wire=wire,
        sched=sched,
        limits=Limits(
            ctx=o.ctx,
            decode_rows=decode_rows,
            chunk_rows=o.chunk_rows,
            reserve_rows=reserve,
            park_after_ns=int(o.park_after_s * 1e9),
            deadline_ns=int(o.deadline_s * 1e9),
            block=block,
            drafted=shape.drafted if shape else 0,
            mask_token=shape.mask_token_id if shape else 0,
            first_drafted=shape.first_row if shape else 0,
            budget=o.budget if shape else 0,
            chain=int(o.chain),
        ),
        context=context,
        ranked=make_ranked(o.slots, min(tree_rows - 1, config.vocab)),
        script=o.script,
        trees=make_tree(tree_rows - 1, o.slots),
        frontiers=make_frontier(tree_rows - 1, o.workers),
        decision=make_decision(o.slots),
        space=make_workspace(o.workers, config.vocab),
        policy=make_policy(),
        sync=make_sync(o.workers),
        counters=np.zeros(len(operations) * LINE, np.int64),
        program=operations,
        trace=loop.make_trace(),
        work=np.zeros(3, np.int64),
    )
    arguments = (o.workers, state, target, model, draft)
    # Compile, or load from the cache, before the first request and not in its time to first token.
    loop.run.compile(tuple(numba.typeof(value) for value in (0, *arguments)))  # type: ignore[attr-defined]
    device = CpuDevice(
        loop.run,
        arguments,
        workers=o.workers,
        control=wire.control,
        operations=operation_names(operations),
    )
    link = Link(wire, device, first_sequence=o.first_sequence, deadline_s=o.deadline_s + 5)
    taps = len(shape.taps) if shape else 0
    return CpuParts(link, state, target, model, o.weights, taps, o.workers)


def _drafter(
    drafter: Drafter | None, target: Model, options: CpuOptions, rows: int
) -> tuple[Model, Draft | None, Context]:
    """The drafter's half of the device; without one, arrays of the same types that nobody uses."""
    o = options
    slots, table = target.batch.pages.shape
    if drafter is None:
        empty = make_batch(rows=1, head_rows=1, slots=slots, pages_per_slot=table, items=1)
        return target._replace(batch=empty), None, Context(empty, NO_ROWS)
    shape = drafter.config
    model = shape.as_model()
    block_rows, context_rows = slots * shape.block_size, rows
    most = max(block_rows, context_rows)
    weights, draft = pack_drafter(
        shape, drafter.get, target.weights, target.weights.rope.shape[0], target_rows=rows,
        context_rows=context_rows,
    )  # fmt: skip
    batches = [
        make_batch(rows=most, head_rows=block_rows, slots=slots, pages_per_slot=table, items=1)
        ._replace(pages=target.batch.pages)
        for _ in range(2)
    ]  # fmt: skip
    acts = allocate_acts(model, most, block_rows, slots, table, o.workers)
    dims = dims_of(model)._replace(vocab=len(shape.draft_tokens) or shape.vocab)
    half = Model(dims, weights, allocate_kv(model, o.pages), batches[0], acts)
    return half, draft, Context(batches[1], np.zeros(most, np.int64))
