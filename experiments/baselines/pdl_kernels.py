"""The phases of the decode step as kernels of their own, for a graph of them:

    python -m experiments.baselines.pdl_kernels DIR [MODEL ...]    builds them anywhere

Matrices are `cute_kernels.gpu.phase`; here stands attention in the same manner: set-up, rotary
factors and the committed keys and values, which no kernel of this step writes, come before the wait
for the kernel in front.
"""

import dataclasses
import json
import pathlib
import sys
import time
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.gpu import attention, build, draft_attention, sync
from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.attention_kernel import DESC_WORDS
from cute_kernels.gpu.board import Desc
from cute_kernels.gpu.config import KINDS, Config
from cute_kernels.gpu.core import Core, arg, carve, desc_word, init_barriers, places
from cute_kernels.gpu.kernel import call
from experiments.baselines.pdl_plan import (
    ATTENTION,
    MATRICES,
    MODELS,
    attention_config,
    phase_config,
)


@cute.jit
def consume(k: cutlass.Constexpr, form: cutlass.Constexpr, cur: Int64, layer: Int32):
    rows = desc_word(k, Desc.ROWS)
    form.begin_step(k, rows)
    sync.consumer_sync(k.c.warps * 32)
    sync.wait_for_prerequisites()
    call(form, "run_attention", k, rows, layer, cur, Int32(0), Int32(0))


@cute.jit
def produce(k: cutlass.Constexpr, form: cutlass.Constexpr, layer: Int32):
    step, zero = form.begin_produce(k), Int32(0)
    call(form, "produce_kv", k, step, layer, zero, zero, zero, zero, zero)


def make_attention_phase(c: Config, blocks_per_sm: int, form: str = "attention") -> tuple:
    """Returns (jit launcher, example arguments, launch geometry).

    form: `attention`, or `draft_attention` with the drafter's entries of the table. The drafter's
    layers count from 1 on here: its layer 0 would wait for keys that another kernel has written
    long before, so tables, masks and pages have an empty layer in front.

    Arguments: the table arguments.Arg (BOARD, its descriptor; KV_POOL, PAGE_TABLE, ROPE, QK_NORM),
    one copy of tiles.Buffers whose `part` and `a` are EMPTY, layer.
    """

    module = dict(attention=attention, draft_attention=draft_attention)[form]

    @cute.kernel
    def kernel(args: Int64, cur: Int64, layer: Int32):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        smem, k = cutlass.memory.SmemAllocator(), Core()
        block = smem.allocate_tensor(
            cutlass.Uint8, cute.make_layout(c.smem_bytes), byte_alignment=1024
        )
        places(c, k, tid, bid)
        carve(c, block.iterator.toint(), k)
        k.args, k.zero = args, Uint32(layer >> 30)
        k.kv_pool, k.pages = arg(k, Arg.KV_POOL), arg(k, Arg.PAGE_TABLE)
        k.board, k.draft_layers = arg(k, Arg.BOARD), Int32(arg(k, Arg.DRAFT_LAYERS))
        sync.let_dependents_start()
        if tid < DESC_WORDS:
            sync.sts_int(k.desc + tid * 4, sync.ld_word(arg(k, Arg.BOARD) + Int64(tid) * 4))
        init_barriers(k)
        if k.wid == c.warps:
            produce(k, module, layer)
        if k.wid < c.warps:
            consume(k, module, cur, layer)

    kernel.set_name_prefix(f"md_phase_{form}", keep_mangled_name=False, remove_cutlass_symbol=True)
    ctas, block = c.shape.kv_heads * c.splits, (c.warps + 1) * 32
    geometry = dict(grid=ctas, block=block, cluster=1, smem=c.smem_bytes)

    @cute.jit
    def launch(args: Int64, cur: Int64, layer: Int32):
        kernel(args, cur, layer).launch(
            grid=(ctas, 1, 1), block=(block, 1, 1), min_blocks_per_mp=blocks_per_sm,
            preferred_smem_carveout=100, smem=c.smem_bytes,
        )  # fmt: skip

    return launch, [Int64(0), Int64(0), Int32(0)], geometry


def main(folder: pathlib.Path, models: list[str]) -> None:
    """Build into `folder`, keeping what is built beside it by content."""
    folder.mkdir(parents=True, exist_ok=True)
    cache = folder.parent / "cache"
    own = pathlib.Path(__file__).read_text()
    for model in models or MODELS:
        c, blocks = attention_config(model), ATTENTION[model][1]
        made = {}
        for form in ("attention", "draft_attention"):
            what = f"phase {form} {blocks} {sorted(dataclasses.asdict(c).items())} {own}"
            make = partial(make_attention_phase, c, blocks, form)
            made[form] = partial(build.build, what, make, c.arch, cache)
        for phase in KINDS:
            made[phase] = partial(
                build.build_phase, phase_config(model, phase), MATRICES[model][1], cache
            )
        for phase, make in made.items():
            begun = time.perf_counter()
            artefact = make()
            name, m = f"pdl-{model}-{phase}", artefact.manifest
            (folder / f"{name}.cubin").write_bytes(artefact.cubin)
            (folder / f"{name}.json").write_text(json.dumps(m))
            print(
                f"{name:28s} {time.perf_counter() - begun:5.1f} s  {m['reg']} registers,"
                f" {m['stack']} B stack, {m['smem']} B shared",
                flush=True,
            )


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
