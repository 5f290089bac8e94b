"""The janitor warp: activation words back to EMPTY, off the critical path.

Activation buffers have COPIES = 3 copies, by layer, counted on from step to step. When a CTA's
gather of gate/up in layer l has seen words of `o`, every CTA has finished qkv of layer l and with
it every read of layer l - 1 (whoever computes in layer l - 1 without publishing into qkv of layer l
has published into somebody who does): the janitor clears this CTA's share of that copy and fences.
Consumers wait for that clearing before they report the gather of layer l + 1, so it is ordered
before every word this CTA publishes after that, its h of layer l + 1 first; and the copy is not
awaited again before layer l + 2, by readers that have seen such words: of all CTAs in `down` of
layer l + 1, or in qkv of layer l + 2, whose words of x depend on those. A CTA with a tile of
neither could begin the attention of layer l + 2 too early: tiles.make_plan refuses such a plan.
The clearing has a whole layer to complete, off the critical path.

Layers count on through the steps, a DRAFT step's after those of the DECODE step before it, with the
same argument: the drafter's layers are phases like the target's, and its first, like the target's,
takes embeddings where others take words of x. Between steps nothing is left to argue, since results
are published behind the last clearing, and a step begins when all have been: what is not cleared
then is the last layer's copy, which is cleared in the first layer of the next step, fenced before
its second layer or, where it has one layer only, before its results, and awaited again in the
third. Rows to clear are those of the layer that wrote the copy. PROMPT, ROWS and a DRAFT step
without rows use none of these copies. What the drafter's context hands on lies elsewhere
(context.py). On LEAVE the last layer's copy is cleared too, so a launch always begins with copy 0
and all copies EMPTY.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.config import COPIES, ROWS
from cute_kernels.gpu.sync import ptx_read
from cute_kernels.gpu.tiles import Buffers

LEAVING = 256  # in a command, beside the rows to clear


def next_copy(k, at):
    """The copy behind `at`, in rotation."""
    size = Buffers.of(k.c).bytes
    behind = at + Int64(size)
    end = k.act + Int64(COPIES * size)
    return ptx_read(
        "{ .reg .pred q; setp.eq.s64 q, {$r0}, {$r1}; selp.b64 {$w0}, {$r2}, {$r0}, q; }",
        [Int64],
        behind,
        end,
        k.act,
    )


def last_copy(k):
    return k.act + Int64((COPIES - 1) * Buffers.of(k.c).bytes)


@cute.jit
def clear_share(k: cutlass.Constexpr, old: Int64, rows: Int32):
    """This CTA's share of a copy, as far as `rows` rows wrote it."""
    c, b = k.c, Buffers.of(k.c)
    share = -(-b.bytes // (16 * c.ctas)) * 16
    end = cutlass.min((k.bid + 1) * share, b.bytes)
    at = k.bid * share + k.lane * 16
    while at < end:
        # bf16 rows and pairs of fp32: the row's place in a block is in the lane's bits
        row = (at >> 6) & 7
        if cutlass.const_expr(b.part < b.bytes):
            if at >= b.part:
                row = Int32(Uint32(at - b.part) // (c.splits * c.part_bytes) % ROWS)
        if row < rows:
            sync.st_words(old + Int64(at), [Uint32(sync.EMPTY)] * 4)
        at = at + 512


@cute.jit
def run_janitor(k: cutlass.Constexpr):
    """Clear and fence on command, until told to leave."""
    old, turn, running = last_copy(k), Int32(0), Boolean(True)
    while running:
        sync.wait_parity_idle(k.gathered, turn)
        command = sync.lds_int(k.command)
        clear_share(k, old, command & (LEAVING - 1))
        sync.fence_gpu()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            sync.arrive(k.cleared)
        running = command < LEAVING
        old, turn = next_copy(k, old), turn ^ 1


@cute.jit
def tell_janitor(k: cutlass.Constexpr, command: Int32, count: Int32):
    """After a warp's gather of gate/up. The clearing before, one layer ago, must be fenced by now.
    count: commands given before, as far as it matters: 0 for none, else 1 if odd and 2 if even."""
    if count > 0:
        sync.wait_parity(k.cleared, (count - 1) & 1)
    if k.tid == 0:
        sync.sts_int(k.command, command)
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        sync.arrive(k.gathered)
