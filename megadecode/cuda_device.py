"""Puts the CUDA device together: kernel, weights, pages, tables, the wire and the link to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cute_kernels.gpu.arguments import COUNT, Arg
from cute_kernels.gpu.board import FEW_ROWS, MAX_ROWS, make_board
from cute_kernels.gpu.buffers import draft_buffers, step_buffers
from cute_kernels.gpu.config import Config, DraftShape
from cute_kernels.gpu.kv_layout import PAGE
from cute_kernels.gpu.rank_plan import RANKED_BYTES, SCRIPT_HEAD, pack_script
from cute_kernels.gpu.service_block import Own, Stage, make_block, wire_constants
from cute_kernels.gpu.tiles import draft_bytes, step_bytes
from host.cuda import CudaDevice, PinnedMemory, driver
from host.errors import DeviceError
from host.link import Link
from host.wire import MAX_ALTERNATIVES, Wire, make_wire
from megadecode.acceptance import SCRIPTED, Candidates
from megadecode.config import ModelConfig
from megadecode.cuda_kernel import Gpu, choose_config, draft_shape, find_gpu, load_kernel
from megadecode.device import AUTO_BUDGET, Settings, Start, Tensors
from megadecode.drafter.io import Drafter
from megadecode.errors import DeviceUnavailable, ParameterError
from megadecode.options import device_options
from megadecode.sampling import SamplingParams
from megadecode.split import StepSplit
from megadecode.trace import PhaseFigures

if TYPE_CHECKING:
    import torch

CHUNK_ROWS = 256
MAX_BUDGET = MAX_ROWS - 1
AUTO_NODES = {"smollm2-135m": 7}
MOST_AUTO_NODES = 15
"""Nodes a step with budget='auto', by shape, and of all others. Measured on an H200: more than 16
rows take the row form, whose steps cost more than they bring; of SmolLM2 with its own drafter, 8
rows give 2 % more tokens a second than 16, of Llama 1B with a drafter that is right in 7 positions
of 10, 16 rows give a fifth more than 8."""
PINGS = 5
OPTIONS = {
    "max_inflight": (1, 2**20),
    "completion_entries": (1, 2**24),
    "request_entries": (1, 2**24),
    "pool_bytes": (1, 2**40),
    "first_sequence": (0, 2**62),
    "first_tag": (0, 2**31 - 1),
}
"""What `Engine` passes on to this device, and its ranges; besides, `kernels`: a folder of kernels
that another machine has built, and `script`: `megadecode.acceptance.Candidates` in the place of the
drafter's, for measuring."""


@dataclass(frozen=True)
class CudaOptions:
    """Sizes of the CUDA device. `deadline_s`: silence after which the device counts as lost.
    `budget`: nodes a step, or AUTO_BUDGET; `chain`: the budget is its length."""

    ctx: int
    pages: int
    budget: int = MOST_AUTO_NODES
    chain: bool = False
    max_inflight: int = 1024
    completion_entries: int = 8192
    request_entries: int = 256
    pool_bytes: int | None = None
    park_after_s: float = 5.0
    deadline_s: float = 4.0
    first_sequence: int = 0
    first_tag: int = 0
    kernels: str | None = None
    script: Candidates | None = None


@dataclass
class CudaParts:
    """A CUDA device that has been put together, with its insides for statistics and tests."""

    link: Link
    device: CudaDevice
    config: Config
    memory: dict[str, torch.Tensor]  # by the names of `arguments.Arg`
    reserve_rows: int
    drafted: int  # positions a block of the drafter predicts; 0: there is none

    weights = "bf16"

    @property
    def wire(self) -> Wire:
        return self.link.wire

    @property
    def acceptance(self) -> str | None:
        if not self.drafted:
            return None
        return SCRIPTED if "DRAFT_SCRIPT" in self.memory else "drafter"

    def split(self) -> StepSplit:
        return StepSplit.read(self.wire.control)

    def set_policy(self, budget: int, chain: bool = False) -> None:
        """Another budget from the next request on, for measuring many with one engine; the loop is
        parked, with no request in the slot. At most the budget that the engine began with; 0: plain
        decoding."""
        import torch

        if not 0 <= budget < self.reserve_rows:
            raise ParameterError(f"budget is {budget}; at most {self.reserve_rows - 1} fit here")
        block = self.memory["SERVICE"].view(torch.int64)
        if int(block[int(Own.STAGE)]) != Stage.FREE:  # its room and its context hang on the old one
            raise ParameterError("a request is in the slot; wait for its answer first")
        block[int(Own.BUDGET)], block[int(Own.CHAIN)] = budget, int(chain)
        block[int(Own.DRAFTED)] = self.drafted if budget else 0
        torch.cuda.synchronize()

    def play(self, script: Candidates) -> None:
        """Another script from now on, on an engine that began with one; the loop is parked."""
        import torch

        packed = torch.from_numpy(pack_script(*script))
        room = self.memory["DRAFT_SCRIPT"]
        if len(packed) > len(room):
            raise ParameterError(f"the script has {len(script.ids)} positions; ctx has fewer")
        room[: len(packed)] = packed.to(room.device)
        torch.cuda.synchronize()

    def refuse(self, params: SamplingParams) -> None:
        """Nothing: the kernel has every parameter there is."""

    def figures(self, *, reset: bool) -> list[PhaseFigures]:
        """None: the kernel that serves has no timing slots."""
        return []

    def read_gb_per_s(self) -> float:
        """Of a large copy: bytes read and written."""
        import torch

        source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(3):
            target.copy_(source)
        begin.record()
        for _ in range(10):
            target.copy_(source)
        end.record()
        end.synchronize()
        return 10 * 2 * 2**30 / (begin.elapsed_time(end) * 1e-3) / 1e9


def prepare(settings: Settings, options: Mapping[str, Any]) -> Start:
    """See `megadecode.device.prepare`."""
    o = settings
    if o.slots != 1:
        raise ParameterError(
            f"slots is {o.slots}; device 'cuda' decodes one request at a time in this release: "
            "use slots=1 (further requests wait their turn)"
        )
    if o.weights not in (None, "bf16"):
        raise ParameterError(f"weights is {o.weights!r}; device 'cuda' keeps them as bf16")
    if o.chunk_rows not in (None, CHUNK_ROWS):
        raise ParameterError(f"chunk_rows is {o.chunk_rows}; device 'cuda' takes {CHUNK_ROWS}")
    if o.budget > MAX_BUDGET:
        raise ParameterError(
            f"budget is {o.budget}; device 'cuda' verifies at most {MAX_BUDGET} nodes a step, "
            f"{MAX_ROWS} rows with the root"
        )
    own = dict(options)
    kernels = own.pop("kernels", None)
    if kernels is not None and not Path(kernels).is_dir():
        raise ParameterError(f"kernels is {str(kernels)!r}; there is no such folder")
    chosen = CudaOptions(
        ctx=o.ctx,
        pages=o.pages,
        budget=o.budget,
        chain=o.chain,
        park_after_s=o.park_after_s,
        kernels=None if kernels is None else str(kernels),
        **device_options(own, OPTIONS),
    )
    gpu = find_gpu()
    return lambda config, get, drafter: start(config, get, gpu, chosen, drafter)


def operation_names(layers: int, draft: DraftShape | None = None) -> list[str]:
    """The phases, as hang reports name them."""
    kinds = ("qkv", "attend and out_proj", "gate_up", "down")
    parts = ["decide", "rank", "tree", "compaction"]  # in a step's end and beginning
    names = [*(f"{kind}[{layer}]" for layer in range(layers) for kind in kinds), "head"]
    if draft is not None:
        names += [f"fc of the drafter, tap {tap}" for tap in range(draft.taps)]
        names.append("context keys and values of the drafter")
        names += [f"{kind}[{i}] of the drafter" for i in range(draft.layers) for kind in kinds]
        names.append("head of the drafter")
    return names + parts


def auto_budget(c: Config, drafted: int, chain: bool) -> int:
    """Nodes a step where the engine is not told; drafted: positions that a block predicts."""
    return drafted if chain else AUTO_NODES.get(c.shape.name, MOST_AUTO_NODES)


def start(
    config: ModelConfig,
    get: Tensors,
    gpu: Gpu,
    options: CudaOptions,
    drafter: Drafter | None = None,
) -> CudaParts:
    """Load the kernel, pack the weights, allocate everything, make the link, and try it.

    Raises ModelError for a shape or a drafter there is no kernel for, DeviceUnavailable when a
    kernel is neither there nor can be built, ParameterError when memory is short.
    """
    c = choose_config(config, gpu)
    draft = None if drafter is None else draft_shape(drafter.config, c)
    drafted = 0 if drafter is None else drafter.config.drafted
    if options.budget == AUTO_BUDGET:
        options = dataclasses.replace(options, budget=auto_budget(c, drafted, options.chain))
    kernel = load_kernel(c, options.kernels)
    memory = _allocate(config, get, c, options, drafter, draft)
    pinned = PinnedMemory(driver())
    try:
        wire = make_wire(
            slots=1, workers=c.ctas, ctx=options.ctx, max_inflight=options.max_inflight,
            tokens_per_step=1 + drafted,
            alternatives=MAX_ALTERNATIVES, request_entries=options.request_entries,
            completion_entries=options.completion_entries, pool_bytes=options.pool_bytes,
            first_sequence=options.first_sequence, allocate=pinned,
        )  # fmt: skip
    except ValueError as error:
        raise ParameterError(str(error)) from None
    constants = wire_constants(
        wire, pinned.device_address, ctx=options.ctx, pages=options.pages,
        park_after_ns=int(options.park_after_s * 1e9), tokens=memory["TOKENS"].data_ptr(),
    ) | _drafting(drafter, options)  # fmt: skip
    table = _table(config, memory, constants, options, draft)
    act = memory["ACT"]
    device = CudaDevice(
        kernel,
        table.data_ptr(),
        empty=[(act.data_ptr(), act.numel())],
        workers=c.ctas,
        control=wire.control,
        operations=operation_names(config.layers, draft),
        keep=pinned.keep,
        owned=(memory, table),
    )
    link = Link(wire, device, first_sequence=options.first_sequence, deadline_s=options.deadline_s)
    try:
        for _ in range(PINGS):  # it works, its code is there, and it has learnt the host's clock
            link.ping()
        link.park()
    except DeviceError as error:
        with suppress(DeviceError):
            link.close(1.0)
        raise DeviceUnavailable(
            f"the kernel did not start on {gpu.name} ({error}). A kernel of another engine that is "
            "running there keeps it waiting: park that one, or close it"
        ) from None
    reserve = 1 if draft is None else max(options.budget + 1, FEW_ROWS)
    parts = CudaParts(link, device, c, memory, reserve, drafted)
    if draft is not None and options.script is not None:
        parts.play(options.script)
    return parts


def _drafting(drafter: Drafter | None, o: CudaOptions) -> dict[Own, int]:
    """The service block's constants of a drafter."""
    if drafter is None:
        return {}
    d = drafter.config
    return {
        Own.DRAFT_BLOCK: d.block_size,
        Own.DRAFTED: d.drafted,
        Own.FIRST_DRAFTED: d.first_row,
        Own.MASK_TOKEN: d.mask_token_id,
        Own.BUDGET: o.budget,
        Own.CHAIN: int(o.chain),
    }


def _allocate(
    config: ModelConfig,
    get: Tensors,
    c: Config,
    o: CudaOptions,
    drafter: Drafter | None,
    draft: DraftShape | None,
) -> dict[str, torch.Tensor]:
    """Everything in device memory; the weights too, once it is clear that there is room."""
    import torch

    from megadecode.cuda_weights import pack_drafter, pack_model

    block = o.pages * c.shape.kv_heads * c.kv_block_bytes
    kv = {"KV_POOL": config.layers * block}
    sizes, weights = step_buffers(c), step_bytes(c, config.layers)
    if not config.tied_embeddings:
        weights += c.gemm("lm").cols * config.hidden * 2
    if draft is not None:
        kv["DRAFT_KV"] = draft.layers * block
        sizes |= draft_buffers(c, draft)
        if o.script is not None:
            sizes["DRAFT_SCRIPT"] = SCRIPT_HEAD + o.ctx * RANKED_BYTES
        weights += draft_bytes(c, draft)
    sizes |= kv
    positions = o.ctx + MAX_ROWS + PAGE  # a tree's and a block's reach beyond the last one
    need = sum(sizes.values()) + weights + 2 * positions * config.head_dim * 4
    largest = 6 * max(config.vocab, 2 * config.ffn) * config.hidden  # while a matrix is packed
    free = _free_bytes()
    if need + largest > free:
        gib = 2**30
        raise ParameterError(
            f"{config.name} needs {(need + largest) / gib:.1f} GiB of device memory (weights "
            f"{weights / gib:.1f}, KV pages {sum(kv.values()) / gib:.1f}); {free / gib:.1f} are "
            "free. Ask for less with ctx or kv_tokens, or free some"
        )
    memory = pack_model(config, get, c, positions)
    if drafter is not None and draft is not None:
        memory |= pack_drafter(
            drafter.config, drafter.get, memory, lambda: get("head"), c, draft, positions
        )
    # NaN everywhere: what nobody has written nobody may use
    memory |= {
        name: torch.full((size,), 255, dtype=torch.uint8, device="cuda")
        for name, size in sizes.items()
    }
    if "DRAFT_SCRIPT" in memory:
        memory["DRAFT_SCRIPT"].zero_()
    memory["TOKENS"] = torch.zeros(o.ctx + CHUNK_ROWS, dtype=torch.int32, device="cuda")
    memory["PAGE_TABLE"] = torch.arange(o.pages, dtype=torch.int32, device="cuda")
    return memory


def _free_bytes() -> int:
    """Of device memory: what the driver has left, and what torch holds ready for its next arrays,
    such as the memory of an engine that was closed."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    return int(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())


def _table(
    config: ModelConfig,
    memory: dict[str, torch.Tensor],
    constants: Mapping[Own, int],
    o: CudaOptions,
    draft: DraftShape | None,
) -> torch.Tensor:
    """The kernel's table of arguments; the board and the service's block go into `memory`."""
    import torch

    block = make_block(constants, first_sequence=o.first_sequence)
    memory["SERVICE"] = torch.from_numpy(block).cuda()
    memory["BOARD"] = torch.from_numpy(make_board(o.first_tag, o.first_tag)).cuda()
    table = np.zeros(COUNT, np.int64)
    table[Arg.LAYERS] = config.layers
    if draft is not None:
        table[Arg.DRAFT_LAYERS], table[Arg.DRAFT_TAPS] = draft.layers, draft.taps
        table[Arg.DRAFT_COLUMNS] = draft.columns or config.vocab
    for name, tensor in memory.items():
        if name in Arg.__members__:
            table[Arg[name]] = tensor.data_ptr()
    found = torch.from_numpy(table).cuda()
    torch.cuda.synchronize()
    return found


assert set(OPTIONS) < {f.name for f in dataclasses.fields(CudaOptions)}
