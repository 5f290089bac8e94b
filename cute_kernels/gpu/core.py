"""What every device helper of the persistent kernel needs, and the contract between its parts."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.board import Board, Desc
from cute_kernels.gpu.config import Config
from cute_kernels.gpu.ring import Ring, init_ring
from cute_kernels.gpu.sync import ptx_read


class Core:
    """Trace-time bundle passed as `k: cutlass.Constexpr`. Never mutated on the device.

    The configuration
        c: config.Config. c.shape the model, c.warps consumer warps, c.ctas the grid.
    This thread
        bid, tid, wid (warp, uniform), lane: of CTA, block, warp.
        Warps 0 .. c.warps - 1 are consumers; then come the producer, the janitor and, awake in CTA
        0 only, the service warp (wid == c.warps + 2).
        Of a consumer's partial sums: j = tid >> 6 (tile of a group), row (0 .. 15) and t (0 .. 3):
        the thread adds columns 2 t, 2 t + 1 of that row; pair = byte offset of these two fp32 in a
        tile's 512 bytes. rank: the CTA's place in its team of `down`.
    Device memory
        args: Int64 address of the table arguments.Arg; `arg(k, Arg.X)` reads an entry (once a
        role, not in loops). layers: Int32, layers that run. board: Int64 address of board.Board.
        plan, offsets: this CTA's rows of tiles.make_plan and of the stream's offsets.
        act, kv_pool, pages: as in the table.
    Shared memory (Int32 addresses)
        ring: ring.Ring. Stages are taken in order by all consumer warps; state is (stage, parity),
        passed in and returned. Every stage that is issued must be released once by every consumer
        warp (`sync.release_after` by one elected lane).
        desc: the descriptor of the step, board.Desc words, valid from the gate to the step's end.
        red: scratch of a phase, c.red_buffers x c.group x c.warps x 512 bytes; squares: scratch,
        c.red_buffers x c.warps x 64 bytes. Both are free between phases only behind a
        `consumer_sync` (with c.red_buffers == 2 the last group's sums may still be read when
        another warp leaves a phase).
        attention: start of the attention's part, c.smem_plan()["attention"] bytes, 1,024-aligned.
        residual: fp32 [own tile][64 pairs], the CTA's own columns; own: its part of `down`.
        results: the head's, [group][16 rows][4 words].
        told, gathered, cleared: mbarriers of the step loop; command: the janitor's (janitor.py).
        keys_side: a word, see context.tell_keys.
    Values
        zero: a run-time zero for `release_after`.

    The step, as seen by a part (all values Int32 unless said):
        rows = desc_word(k, Desc.ROWS): 1 .. 16 in a DECODE step; rows >= it are neither published
        nor polled nor read. cur: Int64, the copy of tiles.Buffers that the layer uses.
        attention.run_attention(k, rows, layer, cur, stage, parity) -> (stage, parity): consumer
        warps, between qkv and o of a layer: words of cur + Buffers.q (raw qkv columns, bf16) in,
        words of cur + Buffers.a out.
        attention.begin_step(k, rows): consumer warps, once a DECODE step behind the gate.
        attention.produce_kv(k, step, layer, stage, parity, issued, landed, landed_parity) -> those
        five: the producer warp, behind qkv's weights of the layer. step: what
        attention.begin_produce(k) returned, once a step.
        prompt.run_prompt(k, kind, stage, parity) -> (stage, parity): consumer warps, a PROMPT step
        up to but without adding 1 to DONE; prompt.produce_prompt(k, kind, stage, parity, issued,
        landed, landed_parity) -> (stage, parity, issued, landed, landed_parity): the producer.
        Copies that it began for another kind of step (producer.py) have been given back.
        service.run_service(k): the whole life of the service warp.

    The drafter. Its layers have the sizes of the target's and run through the same code; phases
    go on behind the head: with P = 4 layers + 1, t taps and D layers, P .. P + t - 1 are `fc` (one
    tap each: W_fc f is a sum over taps), P + t is `ckv` (keys and values of all drafter layers from
    c), then 4 a layer, and P + t + 1 + 4 D is its head. k.draft_layers, k.taps: Int32.

    A DRAFT step, in order, all of it by consumer warps of all CTAs unless said:
        compact.compact(k): target KV of the accepted rows to their places. Row ACCEPTED[i] of the
        last step, at position POSITION - CONTEXT + ACCEPTED[i], becomes POSITION - CONTEXT + i.
        context.run_context(k, stage, parity, which) -> those three: fc over the features of rows
        ACCEPTED[i], ckv, a grid barrier, keys and values of the new positions of all drafter layers
        into DRAFT_KV. The producer waits until all CTAs have written theirs (context.wait_keys).
        Then the block's rows (TOKEN: the anchor, then MASK; ROWS of them; 0: none, and the step
        ends here) through the drafter's layers, like a DECODE step's through the target's, with
        draft_attention in the place of attention (same functions), into DRAFT_LOGITS.
        head.publish_results, as in a DECODE step.
        rank.rank_rows(k): CTA r waits for the results of row r, sets them back to EMPTY and, if the
        row predicts (r >= FIRST_DRAFTED), finds its candidates, writes them to RANKED of position
        r - FIRST_DRAFTED, then RANK_TAG of that position.
        tree.grow_tree(k): CTA 0 waits for the ranks, writes ROW_TABLE, TREE_ROWS, then TREE_TAG.
    Behind the head of a DECODE or ROWS step with DECIDE, decide.decide_rows(k): CTA r waits for the
    results of row r, sets them back to EMPTY and writes DECISION of the row.
    A ROWS step goes through prompt.run_prompt too (kind), up to and with publishing the results of
    all rows. Its rows are those of ROW_TABLE, row i's key and value at position POSITION + i;
    outputs are the bits of a DECODE step's.
    Features: behind the tapped layers of DECODE, ROWS and PROMPT, row i of the step as bf16 into
    row i of FEATURES.
    Whoever waits for words of another CTA and then publishes puts `sync.fence_gpu()` in between.
    """


def arg(k, name: Arg):
    """An entry of the argument table."""
    return ptx_read("ld.global.nc.b64 {$w0}, [{$r0}];", [Int64], k.args + 8 * int(name))


def call(module, name, *args):
    """A method call on `module` inside a run-time loop would make the loop carry it."""
    return getattr(module, name)(*args)


def desc_word(k, field: Desc):
    """A word of the step's descriptor, from shared memory."""
    return sync.lds_int(k.desc + 4 * int(field))


@cute.jit
def note_phase(k: cutlass.Constexpr, value: Int32):
    """Consumers: where this CTA is, for whoever looks at a hang. 1 + the phase, 0 between steps."""
    if k.tid == 0:
        at = k.board + Int64((k.bid + int(Board.PHASE)) * 4)
        sync.st_word(at, Uint32(value))


@cute.jit
def note_time(k: cutlass.Constexpr, what: Int32):
    """Consumers: when CTA 0 passed a point of the step; what: a board.Stamp."""
    if (k.bid == 0) & (k.tid == 0):
        at = k.board + int(Board.STAMP) * 4 + Int64(what) * 8
        sync.ptx_do("st.global.b64 [{$r0}], {$r1};", at, Int64(cute.arch.globaltimer()))


def draft_phase(k):
    """The drafter's first phase, the first fc."""
    return k.layers * 4 + 1


def block_phase(k):
    """The first phase of the drafter's layers."""
    return k.layers * 4 + 2 + k.taps


# -- set-up ------------------------------------------------------------------------------------
def carve(c: Config, base, k: Core):
    """Shared addresses of every part of the plan, in its order."""
    at, where = 0, {}
    for name, n_bytes in c.smem_plan().items():
        where[name] = base + at
        at += n_bytes
    k.red, k.squares = where["partial sums"], where["row squares"]
    k.residual, k.results = where["residual"], where["results"]
    k.own, k.attention = where.get("own parts", base), where.get("attention", base)
    k.ring = Ring(where["ring"], where["barriers"], c.stages, c.stage_bytes, c.inflight, c.hungry)
    k.told = where["barriers"] + 16 * c.stages
    k.gathered, k.cleared, k.keys_side = k.told + 8, k.told + 16, k.told + 24
    if not c.phase:
        k.desc = where["descriptor"]
        k.command = k.desc + 4 * 127


def places(c: Config, k: Core, tid, bid):
    k.c, k.tid, k.bid, k.lane = c, tid, bid, tid & 31
    k.wid = cute.arch.make_warp_uniform(tid >> 5)
    k.j, k.t, k.pair = tid >> 6, (tid >> 1) & 3, (tid & 63) * 8
    k.row = ((tid & 63) >> 3) + 8 * (tid & 1)
    k.rank = bid & (c.team - 1)


def memory(c: Config, k: Core, args):
    """Device addresses that most roles need."""
    k.args = args
    k.layers = Int32(arg(k, Arg.LAYERS))
    k.zero = Uint32(k.layers >> 30)
    k.draft_layers, k.taps, k.phases = Int32(0), Int32(0), k.layers * 4 + 1
    if c.draft:
        k.draft_layers = Int32(arg(k, Arg.DRAFT_LAYERS))
        k.taps = Int32(arg(k, Arg.DRAFT_TAPS))
        own = k.taps + 2 + k.draft_layers * 4
        k.phases = k.phases + sync.select_int(k.draft_layers > 0, own, Int32(0))
    k.plan = arg(k, Arg.PLAN) + Int64(k.bid * k.phases) * 16
    k.offsets = arg(k, Arg.OFFSETS) + Int64(k.bid * k.phases) * 8
    k.board, k.act = arg(k, Arg.BOARD), arg(k, Arg.ACT)
    k.kv_pool, k.pages = arg(k, Arg.KV_POOL), arg(k, Arg.PAGE_TABLE)


@cute.jit
def init_barriers(k: cutlass.Constexpr):
    if k.tid == 0:
        init_ring(k.ring, k.c.warps)
        sync.init_barrier(k.told, 1)
        sync.init_barrier(k.gathered, k.c.warps)
        sync.init_barrier(k.cleared, 1)
        sync.fence_barrier_init()
    cute.arch.sync_threads()
