"""One dependent matrix of the step: y = epilogue(x @ W^T) for up to 128 rows.

Activations are the m16 side of mma.sync m16n8k16 (bf16, fp32 sums), weights the n8 side. Consumer
warps split K: warp w keeps its slice of the activations in registers for a whole phase and
multiplies it with its slice of every unit; partial sums meet in shared memory and are added in
warp order, so that a result depends neither on timing nor on the other rows. With `row_warps` > 1
warps share a slice of K and split the rows. RMSNorm is deferred: the sum of squares comes from the
A fragments, and one factor per row multiplies the finished sums (norm weights are folded into W).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.config import CHUNK
from cute_kernels.gpu.epilogue import (
    DOWN,
    GU,
    NORMED,
    defers,
    finish_global,
    finish_group,
    is_any,
    reduce_group,
)
from cute_kernels.gpu.fragments import constant, mma, unpack_pair
from cute_kernels.gpu.ring import advance
from cute_kernels.gpu.sync import ptx_read


class Core:
    """Trace-time bundle of what every device helper needs: the configuration, shared addresses,
    this thread's places. Never mutated on the device."""


# -- registers ---------------------------------------------------------------------------------
def warp_chunks(k, g):
    """32-wide K chunks that one warp owns in a unit."""
    return g.slab // CHUNK // k.c.k_warps


def warp_m_tiles(k):
    return k.c.m_tiles // k.c.row_warps


def slab_vectors(k, g):
    """16-byte A vectors a lane holds of one slab, and the byte offset of each."""
    c, out = k.c, []
    for i in range(warp_chunks(k, g)):
        if c.half:
            out.append(i * c.chunk_bytes)
        else:
            out += [
                i * c.chunk_bytes + step * 512 * c.m_tiles + m * 512
                for step in range(2)
                for m in range(warp_m_tiles(k))
            ]
    return out


def fragment(k, slab, chunk, step, m):
    """The A operand (4 registers) of a k16 step and row tile."""
    if k.c.half:
        z = constant(0)
        return [slab[chunk * 4 + 2 * step], z, slab[chunk * 4 + 2 * step + 1], z]
    at = ((chunk * 2 + step) * warp_m_tiles(k) + m) * 4
    return [slab[at + e] for e in range(4)]


# -- activations in ----------------------------------------------------------------------------
def ask_all(words, addresses):
    for i, at in enumerate(addresses):
        for e, v in enumerate(sync.ld_words(at)):
            words[i * 4 + e] = v


def ask_missing(words, addresses):
    for i, at in enumerate(addresses):
        mine = [words[i * 4 + e] for e in range(4)]
        for e, v in enumerate(sync.ld_missing_words(at, mine, sync.largest(mine))):
            words[i * 4 + e] = v


@cute.jit
def take_words(k: cutlass.Constexpr, words: cute.Tensor, addresses: cutlass.Constexpr):
    """A lane's 16-byte vectors at `addresses` into registers, as the words arrive. All lanes of
    the warp must call it. The last vector is the one that is polled first."""
    polled = k.c.handoff == "words" and not k.c.phase
    if cutlass.const_expr(polled and k.c.probe and len(addresses) > k.c.ask_at_once):
        # one vector first: polling for everything would cost L2 bandwidth
        tries, since = Int32(0), Int64(0)
        while sync.any_lane_empty(sync.largest(sync.ld_words(addresses[-1]))) != 0:
            tries, since = sync.overdue(tries, since)
    ask_all(words, addresses)
    if cutlass.const_expr(polled):
        tries, since = Int32(0), Int64(0)
        n = len(addresses) * 4
        while sync.any_lane_empty(sync.largest([words[i] for i in range(n)])) != 0:
            ask_missing(words, addresses)
            tries, since = sync.overdue(tries, since)


# -- RMSNorm factors ---------------------------------------------------------------------------
def row_squares(k, g, slab):
    """Per row tile and half: this quad's sum of squares over the warp's K. Four sums side by side:
    one chain of dependent additions would be a good part of a short phase."""
    out = []
    for m in range(warp_m_tiles(k)):
        for h in range(1 if k.c.half else 2):
            sums = [Float32(0.0)] * 4
            for i in range(warp_chunks(k, g)):
                for step in range(2):
                    f = fragment(k, slab, i, step, m)
                    for e, w in enumerate((f[h], f[2 + h])):
                        lo, hi = unpack_pair(w)
                        at = step * 2 + e
                        sums[at] = hi * hi + (lo * lo + sums[at])
            total = (sums[0] + sums[1]) + (sums[2] + sums[3])
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1)
            out.append(total + cute.arch.shuffle_sync_bfly(total, offset=2))
    return out


def squares_at(k, kind, warp, row):
    """Shared offset of one warp's sum for one row; as many copies as of the partial sums."""
    at = (warp * k.c.tile_rows + row) * 4
    if k.c.red_buffers > 1:
        at = at + Int32(kind == GU) * (k.c.k_warps * k.c.tile_rows * 4)
    return at


@cute.jit
def publish_squares(k: cutlass.Constexpr, kind: Int32, sums: cutlass.Constexpr):
    """Lanes with t = 0 store the warp's sums; in split matrices into the inbox of every peer."""
    c = k.c
    if (k.lane & 3) == 0:
        for i in cutlass.range_constexpr(len(sums)):
            m, h = i // (1 if c.half else 2), i % (1 if c.half else 2)
            row = (k.warp_row * warp_m_tiles(k) + m) * 16 + h * 8 + (k.lane >> 2)
            if cutlass.const_expr(c.split == 1):
                sync.sts(k.squares + squares_at(k, kind, k.warp_k, row), sums[i])
            else:
                at = ((k.rank * c.k_warps + k.warp_k) * c.tile_rows + row) * 4
                at = at + Int32(kind == GU) * k.squares_inbox_bytes
                own_bar = k.squares_bar + Int32(kind == GU) * 8
                for q in cutlass.range_constexpr(c.split):
                    peer = sync.peer_address(k.squares_inbox + at, Int32(q))
                    sync.send_word(peer, sums[i], sync.peer_address(own_bar, Int32(q)))


@cute.jit
def combine_squares(k: cutlass.Constexpr, kind: Int32, turn: Int32):
    """Split matrices: all parts of all CTAs, in rank and warp order -> one factor per row."""
    c = k.c
    bar = k.squares_bar + Int32(kind == GU) * 8
    if k.tid == 0:
        sync.expect(bar, Int32(k.squares_inbox_bytes))
    if k.tid < c.tile_rows:
        sync.wait_parity(bar, turn & 1)
        base = k.squares_inbox + Int32(kind == GU) * k.squares_inbox_bytes
        total = Float32(0.0)
        for i in cutlass.range_constexpr(c.split * c.k_warps):
            total = total + sync.lds(base + (i * c.tile_rows + k.tid) * 4)
        f = cute.math.rsqrt(total * (1.0 / c.shape.hidden) + c.shape.rms_eps, fastmath=True)
        sync.sts(k.factors + k.tid * 4, f)


# -- weights in --------------------------------------------------------------------------------
def take_unit(k, g, slab, stage, parity):
    """Wait for the stages of one unit, give them back once loaded, multiply.

    Returns (sums per row tile, stage, parity). Sums run in a few independent chains, because one
    mma's latency is many times its issue slot; the chains are added in a fixed order.
    """
    b, held = [], []
    per_copy = warp_chunks(k, g) // g.copies_per_unit
    for _ in range(g.copies_per_unit):
        sync.wait_parity(k.ring.full + stage * 8, parity)
        at = k.ring.base + stage * k.ring.stage_bytes + k.warp_k * 512 + k.lane * 16
        mine = [sync.lds_words(at + i * (k.c.k_warps * 512)) for i in range(per_copy)]
        held.append((k.ring.empty + stage * 8, mine))
        b += mine
        stage, parity = advance(k.ring, stage, parity)
    m_tiles = warp_m_tiles(k)
    n_chains = max(1, min(4, 8 // m_tiles // 2, 2 * len(b)))
    chains = [[[Float32(0.0)] * 4 for _ in range(n_chains)] for _ in range(m_tiles)]
    for i, f in enumerate(b):
        for step in range(2):
            n = (i * 2 + step) % n_chains
            for m in range(m_tiles):
                a = fragment(k, slab, i, step, m)
                chains[m][n] = mma(chains[m][n], a, f[2 * step : 2 * step + 2])
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        for bar, mine in held:
            sync.release_after(bar, [f[0] for f in mine], k.zero)
    out = []
    for per_m in chains:
        while len(per_m) > 1:
            per_m = [
                [x + y for x, y in zip(per_m[i], per_m[i + 1], strict=True)]
                for i in range(0, len(per_m), 2)
            ]
        out.append(per_m[0])
    return out, stage, parity


# -- the phase ---------------------------------------------------------------------------------
def plan_entry(k, phase):
    """(first tile, tiles, copies, bytes a copy) of this CTA in a phase."""
    return ptx_read(
        "ld.global.nc.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];",
        [Int32] * 4,
        k.plan + Int64(phase * 16),
    )


@cute.jit
def let_janitor_clear(k: cutlass.Constexpr, layer_count: Int32):
    """After a warp's gather of gate/up: every reader of the layer before is done. The janitor's
    last clearing must be fenced by now, one layer after it began; see step.py."""
    if layer_count > 0:
        sync.wait_parity(k.cleared, (layer_count - 1) & 1)
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        sync.arrive(k.gathered)


def time_now(k):
    return cute.arch.globaltimer() if k.c.timing else Int64(0)


@cute.jit
def run_phase(
    k: cutlass.Constexpr,
    f: cutlass.Constexpr,
    kind: Int32,
    phase: Int32,
    src: Int64,
    dst: Int64,
    parts: Int64,
    layer_count: Int32,
    norm_count: Int32,
    stage: Int32,
    parity: Int32,
    turn: Int32,
    which: Int32,
):
    """Consumer warps' part of one phase of family f.

    kind: which of KINDS. layer_count: layers before this one; norm_count: norms of qkv and lm
    before this phase. State, returned advanced: the place in the ring, groups exchanged, partial-
    sum buffer.
    """
    c = k.c
    tile0, n, _, _ = plan_entry(k, phase)
    t0 = time_now(k)
    t1, t2 = t0, t0
    exchanged = is_any(f.names, f.split_names, kind)
    normed = is_any(f.names, NORMED, kind)
    passes = Int32(1)
    if cutlass.const_expr(f.passes > 1):
        if kind == DOWN:
            passes = Int32(c.passes)
    if n > 0:
        slab = cute.make_rmem_tensor(cute.make_layout(len(slab_vectors(k, f)) * 4), Uint32)
        first_chunk = k.warp_k * warp_chunks(k, f)
        if cutlass.const_expr(f.split > 1):
            if exchanged:
                first_chunk = first_chunk + k.rank * passes * (f.slab // CHUNK)
        offset = k.warp_row * (warp_m_tiles(k) * 512) + k.lane * 16
        base = src + Int64(first_chunk * c.chunk_bytes + offset)
        for slab_pass in cutlass.range(passes, unroll=1):
            take_words(k, slab, [base + off for off in slab_vectors(k, f)])
            base = base + Int64(f.slab // CHUNK * c.chunk_bytes)
            if cutlass.const_expr("gu" in f.names and c.phase == ""):
                if kind == GU:
                    let_janitor_clear(k, layer_count)
            if slab_pass == 0:
                t1 = time_now(k)
            done = Int32(0)
            while done < n:
                left = cutlass.min(n - done, c.group)
                for j in cutlass.range(left, unroll=1):
                    sums, stage, parity = take_unit(k, f, slab, stage, parity)
                    for m in cutlass.range_constexpr(warp_m_tiles(k)):
                        m_all = k.warp_row * warp_m_tiles(k) + m
                        at = ((which * c.group + j) * c.m_tiles + m_all) * c.k_warps + k.warp_k
                        sync.sts_quad(k.red + at * 512 + k.lane * 16, sums[m])
                first_of_norm = normed & (done == 0)
                if first_of_norm:  # after the first units: HBM idles until then
                    publish_squares(k, kind, row_squares(k, f, slab))
                sync.consumer_sync(c.warps * 32)
                if cutlass.const_expr(c.split > 1):
                    if first_of_norm:
                        combine_squares(k, kind, layer_count if kind == GU else norm_count)
                        sync.consumer_sync(c.warps * 32)
                last = slab_pass == passes - 1
                reduce_group(
                    k, f, kind, exchanged, tile0, done, left, which, turn,
                    slab_pass, last, dst, parts,
                )  # fmt: skip
                if cutlass.const_expr(f.split > 1 and c.cluster > 1):
                    if exchanged & last:
                        if cutlass.const_expr(defers(c)):
                            if done > 0:
                                before = done - c.group
                                finish_group(
                                    k, f, kind, tile0, before, Int32(c.group), turn - 1, dst
                                )
                        else:
                            finish_group(k, f, kind, tile0, done, left, turn, dst)
                        turn = turn + 1
                if cutlass.const_expr(c.red_buffers == 1):
                    sync.consumer_sync(c.warps * 32)
                else:  # whoever writes this buffer again has passed the next group's barrier
                    which = 1 - which
                done = done + c.group
        t2 = time_now(k)
        if cutlass.const_expr(f.split > 1):
            if exchanged:
                if cutlass.const_expr(c.cluster == 1):
                    finish_global(k, f, kind, tile0, n, dst, parts)
                elif cutlass.const_expr(defers(c)):
                    last_group = (n - 1) // c.group * c.group
                    finish_group(k, f, kind, tile0, last_group, n - last_group, turn - 1, dst)
    if cutlass.const_expr(c.timing):
        if k.tid == 0:
            at = k.times + Int64(phase * 32)
            code = "st.global.v2.b64 [{$r0}], {{$r1},{$r2}};"
            sync.ptx_do(code, at, Int64(t0), Int64(t1))
            sync.ptx_do(code, at + 16, Int64(t2), Int64(time_now(k)))
    return stage, parity, turn, which
