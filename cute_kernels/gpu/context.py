"""The drafter's context: keys and values of the positions that the last step committed.

In a DRAFT step, before the block: c = W_fc f of up to 16 new positions, then keys and values of
RMSNorm(c) in all of the drafter's layers, into its pages. The features f of a position are the
target's residual after the tapped layers; DECODE, ROWS and PROMPT leave them by row of the step.

W_fc f is a sum over taps, a phase each. Its columns belong to the CTAs that own the residual's, and
the fp32 sums stay in the residual's place, which nobody else uses until the block's embeddings are
loaded; the last tap publishes c as words. `ckv` waits for them, leaves raw columns (a layer's K
heads, then its V heads), and behind a grid barrier keys are normed and rotated and both go to their
pages. The block's first layer may begin at once: a second turn of the barrier is waited for by the
producer alone, before it asks for the first block of those pages (`tell_keys`).

A CTA may have no tile of `fc` or `ckv`: it waits for nobody then.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.gpu import head, sync
from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.board import Desc
from cute_kernels.gpu.config import CHUNK, CHUNK_BYTES
from cute_kernels.gpu.core import arg, desc_word, draft_phase, note_phase
from cute_kernels.gpu.gemm import plan_entry, run_phase
from cute_kernels.gpu.grid_barrier import arrive_grid, barrier_side, grid_barrier, wait_grid
from cute_kernels.gpu.keys import Keys, write_keys
from cute_kernels.gpu.prompt_plan import COLUMNS_BYTES
from cute_kernels.gpu.sync import ptx_read


def tap_bytes(c):
    """Features of one tap: 256 rows."""
    return c.shape.hidden // CHUNK * COLUMNS_BYTES


@cute.jit
def tap_of(k: cutlass.Constexpr, layer: Int32):
    """Which tap follows a layer of the target, -1 for none."""
    tap = Int32(-1)
    if k.draft_layers > 0:
        at = arg(k, Arg.TAP_OF) + Int64(layer) * 4
        tap = ptx_read("ld.global.nc.b32 {$w0}, [{$r0}];", [Int32], at)
    return tap


@cute.jit
def feature_address(k: cutlass.Constexpr, features: Int64, tap: Int32):
    """Where a tap's rows go; 0: nowhere."""
    at = Int64(0)
    if cutlass.const_expr(k.c.draft):
        if tap >= 0:
            at = features + Int64(tap) * tap_bytes(k.c)
    return at


# -- consumers -----------------------------------------------------------------------------------
@cute.jit
def clear_own(k: cutlass.Constexpr, n: Int32):
    """Zeros in the CTA's own columns; n: its tiles of `fc`. By the threads that add to them."""
    own = k.j
    while own < n:
        sync.sts_pair(k.residual + own * 512 + k.pair, cutlass.Float32(0.0), cutlass.Float32(0.0))
        own = own + k.c.group


@cute.jit
def clear_fused(k: cutlass.Constexpr, fused: Int64):
    """c back to EMPTY; behind a barrier that all its readers have passed."""
    i = k.tid * k.c.ctas + k.bid
    while i < k.c.shape.hidden // CHUNK * (CHUNK_BYTES // 16):
        sync.st_words(fused + Int64(i * 16), [Uint32(sync.EMPTY)] * 4)
        i = i + k.c.warps * 32 * k.c.ctas


def new_keys(k):
    """The new positions' raw keys and values, and where they belong."""
    s = Keys()
    s.source, s.column, s.chunk_bytes = arg(k, Arg.CONTEXT_KV), 0, COLUMNS_BYTES
    s.position, s.turned = desc_word(k, Desc.POSITION) - desc_word(k, Desc.CONTEXT), None
    s.pool, s.pool_layers = arg(k, Arg.DRAFT_KV), k.draft_layers
    s.norms, s.rope = arg(k, Arg.DRAFT_QK_NORM), arg(k, Arg.DRAFT_ROPE)
    return s


@cute.jit
def run_context(k: cutlass.Constexpr, stage: Int32, parity: Int32, which: Int32):
    """Consumer warps: the context of the descriptor's CONTEXT positions. Returns the place in the
    ring and the partial-sum buffer."""
    c, rows = k.c, desc_word(k, Desc.CONTEXT)
    features, fused, first = arg(k, Arg.FEATURES), arg(k, Arg.FUSED), draft_phase(k)
    none, zero, stats = Int64(0), Int32(0), head.new_stats()
    _, n, _, _ = plan_entry(k, first)
    clear_own(k, n)
    for tap in cutlass.range(k.taps, unroll=1):
        note_phase(k, first + tap + 1)
        to = none
        if tap == k.taps - 1:
            to = fused
        stage, parity, which = run_phase(
            k, c.gemm("fc"), rows, first + tap, features + Int64(tap) * tap_bytes(c), to, none,
            stats, zero, zero, stage, parity, which,
        )  # fmt: skip
    note_phase(k, first + k.taps + 1)
    stage, parity, which = run_phase(
        k, c.gemm("ckv"), rows, first + k.taps, fused, arg(k, Arg.CONTEXT_KV), none,
        stats, zero, zero, stage, parity, which,
    )  # fmt: skip
    side = grid_barrier(k, barrier_side(k))
    clear_fused(k, fused)
    write_keys(k, new_keys(k), rows, zero, k.draft_layers)
    arrive_grid(k)
    tell_keys(k, side)
    return stage, parity, which


# -- the producer waits for the keys -------------------------------------------------------------
def pair_barrier(barrier, arrives):
    """A named barrier of consumer warp 0 and the producer warp, one of which only arrives."""
    kind = "bar.arrive" if arrives else "bar.sync"
    sync.ptx_do(f"{kind} {int(barrier)}, 64;")


@cute.jit
def tell_keys(k: cutlass.Constexpr, side: Int32):
    """Consumers: the producer may wait for the barrier's turn away from `side`. And not before it
    has seen this step's tag: without rows it may have nothing to issue, and be late for the next.
    """
    if k.wid == 0:
        pair_barrier(sync.Barrier.DRAFTING, arrives=False)
        if desc_word(k, Desc.ROWS) > 0:
            if k.lane == 0:
                sync.sts_int(k.keys_side, side)
            cute.arch.sync_warp()
            pair_barrier(sync.Barrier.KEYS, arrives=True)


def draft_begins(k):
    """The producer, once it has read from a DRAFT step's descriptor what it needs without rows."""
    pair_barrier(sync.Barrier.DRAFTING, arrives=True)


@cute.jit
def wait_keys(k: cutlass.Constexpr):
    """The producer, once a DRAFT step that has rows: new keys and values are in the pages."""
    pair_barrier(sync.Barrier.KEYS, arrives=False)
    wait_grid(k, sync.lds_int(k.keys_side))
    sync.fence_async()
