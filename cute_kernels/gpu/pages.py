"""Blocks of keys and values in their pages, and on their way into the ring."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.gpu import sync
from cute_kernels.gpu.attention_plan import stages_per_block
from cute_kernels.gpu.config import KV_COPY
from cute_kernels.gpu.ring import issue


def page_of(k, block):
    """The page of positions 64 block on; the table changes between steps: not through the read-only
    cache."""
    return Int32(sync.ld_word(k.pages + Int64(block) * 4))


def block_at(k, pool, layers, page, layer, kv_head):
    """Address of a block; 64-bit from the page on: a pool may be larger than 4 GiB."""
    at = (Int64(page) * layers + Int64(layer)) * k.c.shape.kv_heads + Int64(kv_head)
    return pool + at * k.c.kv_block_bytes


@cute.jit
def issue_block(k: cutlass.Constexpr, at: Int64, stage: Int32, parity: Int32, issued: Int32,
                landed: Int32, landed_parity: Int32):  # fmt: skip
    """The producer warp: K and V of the block at that address, in one stage or in one each."""
    for _ in cutlass.range(stages_per_block(k.c), unroll=1):
        stage, parity, issued, landed, landed_parity = issue(
            k.ring, at, Int32(KV_COPY), stage, parity, issued, landed, landed_parity
        )
        at = at + KV_COPY
    return stage, parity, issued, landed, landed_parity
