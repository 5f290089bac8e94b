"""One dependent matrix of the step: y = epilogue(x @ W^T) for up to 128 rows.

Activations are the m16 side of mma.sync m16n8k16 (bf16, fp32 sums), weights the n8 side. Consumer
warps split K: warp w keeps its slice of the activations in registers for a whole phase and
multiplies it with its slice of every unit; partial sums meet in shared memory and are added in
warp order, so that a result depends neither on timing nor on the other rows. With `row_warps` > 1
warps share a slice of K and split the rows. RMSNorm is deferred: the sum of squares comes from the
A fragments, and one factor per row multiplies the finished sums (norm weights are folded into W).

Split matrices: the CTAs of a cluster multiply the same tiles by their own part of K. In a group of
tiles CTA r owns tile r; the others `send_pair` their sums into the owner's inbox, and the owner
adds the parts in rank order. Inbox slots need no credit: with the exchange in lockstep a CTA that
sends into slot i % slots knows that its receiver has read what was there. It has finished group
i - 1 - `defer` itself, for which the receiver sent after finishing group i - 2 - 2 `defer`; so 2
slots are enough without deferral, and 4 where groups are finished one later (`defer` = 1).

Where teams are not clusters (the device may not hold enough of them: GPCs of 16 and 18 SMs give 30
clusters of 4 on an H200), the sums of `down` travel as words in device memory instead.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.config import CHUNK, TILE, tile_stride
from cute_kernels.gpu.ring import advance
from cute_kernels.gpu.sync import ptx_read


class Core:
    """Trace-time bundle of what every device helper needs: the configuration, shared addresses,
    this thread's places. Never mutated on the device."""


# -- registers ---------------------------------------------------------------------------------
def mma(d, a, b):
    return ptx_read(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{{$w0},{$w1},{$w2},{$w3}}, {{$r0},{$r1},{$r2},{$r3}}, {{$r4},{$r5}},"
        " {{$r6},{$r7},{$r8},{$r9}};",
        [Float32] * 4,
        *a,
        *b,
        *d,
    )


def bf16_pair(lo, hi):
    return ptx_read("cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};", [Uint32], hi, lo)


def unpack_pair(word):
    return ptx_read(
        "{ shl.b32 {$w0}, {$r0}, 16; and.b32 {$w1}, {$r0}, 0xffff0000; }", [Float32] * 2, word
    )


def constant(v):  # mma takes no immediates
    return ptx_read("mov.b32 {$w0}, %d;" % v, [Uint32])


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
    """Per row tile and half: this quad's sum of squares over the warp's K."""
    out = []
    for m in range(warp_m_tiles(k)):
        for h in range(1 if k.c.half else 2):
            total = Float32(0.0)
            for i in range(warp_chunks(k, g)):
                for step in range(2):
                    f = fragment(k, slab, i, step, m)
                    for w in (f[h], f[2 + h]):
                        lo, hi = unpack_pair(w)
                        total = hi * hi + (lo * lo + total)
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1)
            out.append(total + cute.arch.shuffle_sync_bfly(total, offset=2))
    return out


def squares_at(k, g, warp, row):
    """Shared offset of one warp's sum for one row; as many copies as of the partial sums."""
    turn = 1 if g.name == "gu" and k.c.red_buffers > 1 else 0
    return ((turn * k.c.k_warps + warp) * k.c.tile_rows + row) * 4


@cute.jit
def publish_squares(k: cutlass.Constexpr, g: cutlass.Constexpr, sums: cutlass.Constexpr):
    """Lanes with t = 0 store the warp's sums; in a split matrix also to the cluster's peers."""
    c = k.c
    if (k.lane & 3) == 0:
        for i in cutlass.range_constexpr(len(sums)):
            m, h = i // (1 if c.half else 2), i % (1 if c.half else 2)
            row = (k.warp_row * warp_m_tiles(k) + m) * 16 + h * 8 + (k.lane >> 2)
            if cutlass.const_expr(g.split == 1):
                sync.sts(k.squares + squares_at(k, g, k.warp_k, row), sums[i])
            else:
                at = (k.rank * c.k_warps + k.warp_k) * c.tile_rows + row
                at = at * 4 + (1 if g.name == "gu" else 0) * k.squares_inbox_bytes
                for q in cutlass.range_constexpr(g.split):
                    peer = sync.peer_address(k.squares_inbox + at, Int32(q))
                    bar = sync.peer_address(k.squares_bar + (8 if g.name == "gu" else 0), Int32(q))
                    sync.send_word(peer, sums[i], bar)


@cute.jit
def combine_squares(k: cutlass.Constexpr, g: cutlass.Constexpr, turn: Int32):
    """Split matrices: all parts of all CTAs, in rank and warp order -> one factor per row."""
    c = k.c
    bar = k.squares_bar + (8 if g.name == "gu" else 0)
    if k.tid == 0:
        sync.expect(bar, Int32(k.squares_inbox_bytes))
    if k.tid < c.tile_rows:
        sync.wait_parity(bar, turn)
        base = k.squares_inbox + (k.squares_inbox_bytes if g.name == "gu" else 0)
        total = Float32(0.0)
        for i in cutlass.range_constexpr(g.split * c.k_warps):
            total = total + sync.lds(base + (i * c.tile_rows + k.tid) * 4)
        f = cute.math.rsqrt(total * (1.0 / g.k) + c.shape.rms_eps, fastmath=True)
        sync.sts(k.factors + k.tid * 4, f)


def row_factor(k, g, row):
    if g.split > 1:
        return sync.lds(k.factors + row * 4)
    total = Float32(0.0)
    for w in range(k.c.k_warps):
        total = total + sync.lds(k.squares + squares_at(k, g, w, row))
    return cute.math.rsqrt(total * (1.0 / g.k) + k.c.shape.rms_eps, fastmath=True)


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


# -- results out -------------------------------------------------------------------------------
@cute.jit
def put_word(k: cutlass.Constexpr, ok, base: Int64, row: Int32, col: Int32, value: Uint32):
    """Columns col, col + 1 of a row as one word of an activation buffer, in A fragment order."""
    c = k.c
    slot = ((row & 7) * 4 + ((col >> 2) & 3)) * 4
    if cutlass.const_expr(c.half):
        slot = slot + ((col >> 4) & 1) * 2 + ((col >> 1) & 1)
        ok = ok & (row < 8)
    else:
        slot = slot + ((col >> 4) & 1) * (128 * c.m_tiles) + (row >> 4) * 128
        slot = slot + ((col >> 1) & 1) * 2 + ((row >> 3) & 1)
    if ok:
        sync.st_word(base + Int64((col >> 5) * c.chunk_bytes + slot * 4), value)


def add_residual(k, own, m, v0, v1):
    """The fp32 residual of a CTA's own columns never leaves its shared memory."""
    at = k.residual + (own * k.c.m_tiles + m) * 512 + k.pair
    r0, r1 = sync.lds_pair(at)
    sync.sts_pair(at, v0 + r0, v1 + r1)
    return v0 + r0, v1 + r1


@cute.jit
def epilogue(
    k: cutlass.Constexpr,
    g: cutlass.Constexpr,
    tile: Int32,
    own: Int32,
    m: cutlass.Constexpr,
    v0: Float32,
    v1: Float32,
    dst: Int64,
):
    """Finished sums of two neighbouring columns of one row (row tile m) -> where they go."""
    row = k.row + m * 16
    if cutlass.const_expr(g.normed):
        f = row_factor(k, g, row)
        v0, v1 = v0 * f, v1 * f
    if cutlass.const_expr(g.name == "lm"):
        if row < k.c.rows:
            at = dst + (Int64(row) * k.c.shape.vocab + Int64(tile * TILE + 2 * k.t)) * 4
            sync.ptx_do("st.global.v2.f32 [{$r0}], {{$r1},{$r2}};", at, v0, v1)
    elif cutlass.const_expr(g.name == "gu"):  # columns are (gate, up); two lanes make one word
        h = v0 / (Float32(1.0) + cute.math.exp2(v0 * -1.4426950408889634, fastmath=True)) * v1
        word = bf16_pair(h, cute.arch.shuffle_sync_bfly(h, offset=2))
        put_word(k, (k.t & 1) == 0, dst, row, tile * 4 + k.t, word)
    elif cutlass.const_expr(g.name == "qkv" and k.c.attention):
        k.put_qkv(k, dst, row, tile * TILE + 2 * k.t, v0, v1)
    else:
        if cutlass.const_expr(g.name in ("o", "down")):
            v0, v1 = add_residual(k, own, m, v0, v1)
        put_word(k, row >= 0, dst, row, tile * TILE + 2 * k.t, bf16_pair(v0, v1))


# -- the phase ---------------------------------------------------------------------------------
def inbox_at(k, slot, j, q):
    """Inbox place of CTA q's sums for this CTA's tile among tiles j of a group."""
    c = k.c
    return k.inbox + ((slot * c.inbox_tiles + j // c.team) * c.team + q) * (
        c.m_tiles * 512
    )


@cute.jit
def reduce_group(
    k: cutlass.Constexpr,
    g: cutlass.Constexpr,
    tile0: Int32,
    done: Int32,
    left: Int32,
    which: Int32,
    turn: Int32,
    slab_pass: Int32,
    dst: Int64,
    parts: Int64,
):
    """Thread (tile j, pair) adds the warps' partial sums of its two columns, in warp order."""
    c = k.c
    tile_bytes = c.m_tiles * c.k_warps * 512
    red = k.red + which * (c.group * tile_bytes)
    slot = turn & (c.inbox_slots - 1)
    owner = (done + k.j) & (g.split - 1)
    if cutlass.const_expr(g.split > 1 and c.cluster > 1):
        if k.tid == 0:
            if slab_pass == g.passes - 1:
                own_tiles = (left - k.rank + g.split - 1) // g.split
                per_tile = (g.split - 1) * c.tile_rows * TILE * 4
                sync.expect(k.inbox_bar + slot * 8, own_tiles * per_tile)
    if k.j < left:
        for m in cutlass.range_constexpr(c.m_tiles):
            at = red + (k.j * c.m_tiles + m) * (c.k_warps * 512) + k.pair
            pairs = [sync.lds_pair(at + w * 512) for w in range(c.k_warps)]
            v0, v1 = pairs[0]
            for w in cutlass.range_constexpr(1, c.k_warps):
                v0, v1 = v0 + pairs[w][0], v1 + pairs[w][1]
            if cutlass.const_expr(g.passes > 1):
                acc = k.pass_sums + ((done // c.group) * c.group + k.j) * (c.m_tiles * 512)
                acc = acc + m * 512 + k.pair
                if slab_pass > 0:
                    a0, a1 = sync.lds_pair(acc)
                    v0, v1 = v0 + a0, v1 + a1
                if slab_pass < g.passes - 1:
                    sync.sts_pair(acc, v0, v1)
            if cutlass.const_expr(g.split == 1):
                tile = tile0 + (done + k.j) * tile_stride(c, g.name)
                epilogue(k, g, tile, done + k.j, m, v0, v1, dst)
            elif cutlass.const_expr(c.cluster == 1):
                if slab_pass == g.passes - 1:
                    if owner == k.rank:
                        own = (done + k.j) // g.split
                        sync.sts_pair(k.own + (own * c.m_tiles + m) * 512 + k.pair, v0, v1)
                    else:
                        to = parts + part_at(k, tile0 + done + k.j, k.rank, m)
                        sync.st_words(to, [sync.as_bits(v0), sync.as_bits(v1)])
            elif slab_pass == g.passes - 1:
                place = inbox_at(k, slot, k.j, k.rank) + m * 512 + k.pair
                if owner == k.rank:
                    sync.sts_pair(place, v0, v1)
                else:
                    bar = sync.peer_address(k.inbox_bar + slot * 8, owner)
                    sync.send_pair(sync.peer_address(place, owner), v0, v1, bar)


def part_at(k, tile, q, m):
    """Byte offset, among a copy's partial sums, of CTA q's pair for a tile."""
    return Int64((tile * k.c.team + q) * (k.c.m_tiles * 512) + m * 512 + k.pair)


def ask_parts(k, g, u, tile0, n, parts):
    """One round of loads, all in flight together; returns the largest word awaited."""
    c, awaited = k.c, []
    for i in range(c.own_tiles):
        # tiles beyond n: some address of this buffer, not looked at
        own = i * g.split + k.rank
        tile = cutlass.min(tile0 + own, g.tiles - 1)
        for m in range(c.m_tiles):
            for q in range(g.split):
                at = 2 * ((i * c.m_tiles + m) * g.split + q)
                u[at], u[at + 1] = sync.ld_pair_words(parts + part_at(k, tile, q, m))
                awaited.append((at, (k.rank != q) & (own < n)))
    return sync.largest(
        [sync.select(ok, sync.larger(u[at], u[at + 1]), Uint32(0)) for at, ok in awaited]
    )


@cute.jit
def finish_global(
    k: cutlass.Constexpr,
    g: cutlass.Constexpr,
    tile0: Int32,
    n: Int32,
    dst: Int64,
    parts: Int64,
):
    """The owner of a tile adds the parts of its team, in rank order; tile r of a group belongs to
    the threads of its slot, so that own parts stay in the thread that made them."""
    c = k.c
    if k.j == k.rank:
        u = cute.make_rmem_tensor(
            cute.make_layout(2 * c.own_tiles * c.m_tiles * g.split), Uint32
        )
        worst = ask_parts(k, g, u, tile0, n, parts)
        tries, since = Int32(0), Int64(0)
        while worst == Uint32(sync.EMPTY):
            worst = ask_parts(k, g, u, tile0, n, parts)
            tries, since = sync.overdue(tries, since)
        for i in cutlass.range_constexpr(c.own_tiles):
            if i * g.split + k.rank < n:
                for m in cutlass.range_constexpr(c.m_tiles):
                    o0, o1 = sync.lds_pair(k.own + (i * c.m_tiles + m) * 512 + k.pair)
                    v0, v1 = Float32(0.0), Float32(0.0)
                    for q in cutlass.range_constexpr(g.split):
                        at = 2 * ((i * c.m_tiles + m) * g.split + q)
                        p0, p1 = o0, o1
                        if k.rank != q:
                            p0, p1 = sync.as_float(u[at]), sync.as_float(u[at + 1])
                        v0, v1 = v0 + p0, v1 + p1
                    epilogue(k, g, tile0 + i * g.split + k.rank, Int32(i), m, v0, v1, dst)


@cute.jit
def finish_group(
    k: cutlass.Constexpr,
    g: cutlass.Constexpr,
    tile0: Int32,
    done: Int32,
    left: Int32,
    turn: Int32,
    dst: Int64,
):
    """The owner of a tile adds the parts of its cluster, in rank order."""
    c = k.c
    slot = turn & (c.inbox_slots - 1)
    round_ = turn >> (c.inbox_slots.bit_length() - 1)
    if k.j < left:
        if ((done + k.j) & (g.split - 1)) == k.rank:
            sync.wait_parity(k.inbox_bar + slot * 8, round_ & 1)
            for m in cutlass.range_constexpr(c.m_tiles):
                v0, v1 = Float32(0.0), Float32(0.0)
                for q in cutlass.range_constexpr(g.split):
                    p0, p1 = sync.lds_pair(inbox_at(k, slot, k.j, q) + m * 512 + k.pair)
                    v0, v1 = v0 + p0, v1 + p1
                own = (done + k.j) // g.split
                epilogue(k, g, tile0 + done + k.j, own, m, v0, v1, dst)


def plan_entry(k, phase):
    """(first tile, tiles, copies, bytes a copy) of this CTA in a phase."""
    return ptx_read(
        "ld.global.nc.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];",
        [Int32] * 4,
        k.plan + Int64(phase * 16),
    )


def defers(c, g):
    """Finish a group one group later? Where the inbox holds both; see the module's docstring."""
    few = -(-g.tiles // (c.ctas // g.split)) <= 2 * c.group
    return c.inbox_slots >= 4 or (c.split == 1 and few)


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
    name: cutlass.Constexpr,
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
    """Consumer warps' part of one phase.

    layer_count, norm_count: layers, and uses of this phase's squares inbox, before this one.
    State, returned advanced: the place in the ring, groups exchanged, partial-sum buffer.
    """
    c = k.c
    g = c.gemm(name)
    tile0, n, _, _ = plan_entry(k, phase)
    t0 = time_now(k)
    t1, t2 = t0, t0
    if n > 0:
        slab = cute.make_rmem_tensor(cute.make_layout(len(slab_vectors(k, g)) * 4), Uint32)
        first_chunk = k.warp_k * warp_chunks(k, g)
        if cutlass.const_expr(g.split > 1):
            first_chunk = first_chunk + k.rank * (g.k // g.split // CHUNK)
        offset = k.warp_row * (warp_m_tiles(k) * 512) + k.lane * 16
        base = src + Int64(first_chunk * c.chunk_bytes + offset)
        for slab_pass in cutlass.range(g.passes, unroll=1):
            take_words(k, slab, [base + off for off in slab_vectors(k, g)])
            base = base + Int64(g.slab // CHUNK * c.chunk_bytes)
            if cutlass.const_expr(name == "gu" and c.phase == ""):
                let_janitor_clear(k, layer_count)
            if slab_pass == 0:
                t1 = time_now(k)
            done = Int32(0)
            while done < n:
                left = cutlass.min(n - done, c.group)
                for j in cutlass.range(left, unroll=1):
                    sums, stage, parity = take_unit(k, g, slab, stage, parity)
                    for m in cutlass.range_constexpr(warp_m_tiles(k)):
                        m_all = k.warp_row * warp_m_tiles(k) + m
                        at = ((which * c.group + j) * c.m_tiles + m_all) * c.k_warps + k.warp_k
                        sync.sts_quad(k.red + at * 512 + k.lane * 16, sums[m])
                if cutlass.const_expr(g.normed):  # after the first units: HBM idles until then
                    if done == 0:
                        publish_squares(k, g, row_squares(k, g, slab))
                sync.consumer_sync(c.warps * 32)
                if cutlass.const_expr(g.normed and g.split > 1):
                    if done == 0:
                        combine_squares(k, g, norm_count & 1)
                        sync.consumer_sync(c.warps * 32)
                reduce_group(k, g, tile0, done, left, which, turn, slab_pass, dst, parts)
                if cutlass.const_expr(g.split > 1 and c.cluster > 1):
                    if slab_pass == g.passes - 1:
                        if cutlass.const_expr(defers(c, g)):
                            if done > 0:
                                before = done - c.group
                                finish_group(k, g, tile0, before, Int32(c.group), turn - 1, dst)
                        else:
                            finish_group(k, g, tile0, done, left, turn, dst)
                        turn = turn + 1
                if cutlass.const_expr(c.red_buffers == 1):
                    sync.consumer_sync(c.warps * 32)
                else:  # whoever writes this buffer again has passed the next group's barrier
                    which = 1 - which
                done = done + c.group
        t2 = time_now(k)
        if cutlass.const_expr(g.split > 1 and c.cluster == 1):
            finish_global(k, g, tile0, n, dst, parts)
        elif cutlass.const_expr(g.split > 1 and defers(c, g)):
            last = (n - 1) // c.group * c.group
            finish_group(k, g, tile0, last, n - last, turn - 1, dst)
    if cutlass.const_expr(c.timing):
        if k.tid == 0:
            at = k.times + Int64(phase * 32)
            code = "st.global.v2.b64 [{$r0}], {{$r1},{$r2}};"
            sync.ptx_do(code, at, Int64(t0), Int64(t1))
            sync.ptx_do(code, at + 16, Int64(t2), Int64(time_now(k)))
    return stage, parity, turn, which
