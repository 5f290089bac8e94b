"""The weight stream: bulk copies from a contiguous stream per CTA through a shared-memory ring.

One producer warp issues copies as stages free up and knows nothing of hand-offs, so it runs ahead
across them. Consumer warps take stages in order and give each back with `release_after`.

Bytes in flight are limited, not the ring's depth: a saturated memory queue delays every store,
fence and load behind it, and those are the hand-offs. At most `inflight` copies are under way,
except while fewer than `hungry` stages are issued and not yet consumed: then the ring starves and
the limit would cost bandwidth.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint64

from cute_kernels.gpu import sync

EVICT_FIRST = 0x12F0000000000000  # weights are read once a step; let activations have the L2


class Ring:
    """Trace-time handle. base, bars: shared addresses of the stages and of full[n], empty[n].
    inflight, hungry: see above; 0: no limit."""

    def __init__(self, base, bars, stages, stage_bytes, inflight=0, hungry=0):
        self.base, self.n, self.stage_bytes = base, stages, stage_bytes
        self.full, self.empty = bars, bars + 8 * stages
        self.inflight, self.hungry = inflight, min(hungry, stages - 1)


def init_ring(ring, consumer_warps):
    """One thread, before the CTA's first barrier."""
    for i in range(ring.n):
        sync.init_barrier(ring.full + 8 * i, 1)
        sync.init_barrier(ring.empty + 8 * i, consumer_warps)


@cute.jit
def advance(ring: cutlass.Constexpr, stage: Int32, parity: Int32):
    stage = stage + 1
    if stage == ring.n:
        stage = Int32(0)
        parity = parity ^ 1
    return stage, parity


@cute.jit
def fetch(
    ring: cutlass.Constexpr,
    at: Int64,
    n_bytes: Int32,
    stage: Int32,
    pieces: cutlass.Constexpr = None,
):
    """One elected lane copies n_bytes (a multiple of 16) into a stage. In this DSL version a bulk
    copy does not elect a lane by itself: 32 lanes would over-complete the barrier. pieces: None or
    (count, stride), Int32: as many pieces of n_bytes, `stride` bytes apart (at most 32, a lane
    each)."""
    to, full = ring.base + stage * ring.stage_bytes, ring.full + stage * 8
    if cutlass.const_expr(pieces is None):
        with cute.arch.elect_one():
            sync.expect(full, n_bytes)
            copy_in(to, at, n_bytes, full)
    else:
        count, stride = pieces
        with cute.arch.elect_one():
            sync.expect(full, n_bytes * count)
        cute.arch.sync_warp()
        lane, _, _ = cute.arch.thread_idx()
        lane = lane & 31
        if lane < count:
            copy_in(to + lane * n_bytes, at + Int64(lane * stride), n_bytes, full)


def copy_in(to, at, n_bytes, full):
    sync.ptx_do(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [{$r0}], [{$r1}], {$r2}, [{$r3}], {$r4};",
        to,
        at,
        n_bytes,
        full,
        Uint64(EVICT_FIRST),
    )


@cute.jit
def starving(ring: cutlass.Constexpr, stage: Int32, parity: Int32):
    """1 if fewer than `hungry` stages before `stage` are issued and not yet consumed."""
    before, turn = stage + (ring.n - ring.hungry), parity ^ 1
    if before >= ring.n:
        before, turn = before - ring.n, turn ^ 1
    return sync.test_parity(ring.empty + before * 8, turn)


@cute.jit
def issue(
    ring: cutlass.Constexpr,
    at: Int64,
    n_bytes: Int32,
    stage: Int32,
    parity: Int32,
    issued: Int32,
    landed: Int32,
    landed_parity: Int32,
    pieces: cutlass.Constexpr = None,
):
    """One copy of n_bytes into the next stage, as soon as the rules allow (pieces: see `fetch`).
    Returns the state: place, copies issued, and the place of the oldest copy that counts as in
    flight."""
    sync.wait_parity(ring.empty + stage * 8, parity ^ 1)
    if cutlass.const_expr(ring.inflight > 0):
        if issued >= ring.inflight:
            hold = Int32(1)
            if cutlass.const_expr(ring.hungry > 0):
                hold = 1 - starving(ring, stage, parity)
            if hold != 0:
                sync.wait_parity(ring.full + landed * 8, landed_parity)
            landed, landed_parity = advance(ring, landed, landed_parity)
        else:
            issued = issued + 1
    fetch(ring, at, n_bytes, stage, pieces)
    stage, parity = advance(ring, stage, parity)
    return stage, parity, issued, landed, landed_parity


@cute.jit
def produce(
    ring: cutlass.Constexpr,
    at: Int64,
    copies: Int32,
    n_bytes: Int32,
    stage: Int32,
    parity: Int32,
    issued: Int32,
    landed: Int32,
    landed_parity: Int32,
):
    """`copies` copies of n_bytes each from `at` on. Returns the end and the state."""
    for _ in cutlass.range(copies, unroll=1):
        stage, parity, issued, landed, landed_parity = issue(
            ring, at, n_bytes, stage, parity, issued, landed, landed_parity
        )
        at = at + Int64(n_bytes)
    return at, stage, parity, issued, landed, landed_parity


@cute.jit
def wait_landed(ring: cutlass.Constexpr, stage: Int32, parity: Int32, copies: Int32):
    """Until the `copies` copies from `stage` on have landed. Returns the place behind them."""
    for _ in cutlass.range(copies, unroll=1):
        sync.wait_parity(ring.full + stage * 8, parity)
        stage, parity = advance(ring, stage, parity)
    return stage, parity


@cute.jit
def skip(ring: cutlass.Constexpr, stage: Int32, parity: Int32, copies: Int32):
    """A consumer warp gives `copies` stages back unread."""
    for _ in cutlass.range(copies, unroll=1):
        sync.wait_parity(ring.full + stage * 8, parity)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            sync.arrive(ring.empty + stage * 8)
        stage, parity = advance(ring, stage, parity)
    return stage, parity
