"""From the warps' partial sums of a group of tiles to finished words.

A thread owns two neighbouring columns of one row (of every row tile): it adds the warps' sums in
warp order and applies what follows the matrix. `kind` (an index into KINDS) is a run-time value, so
that phases share code; the `names` arguments say which kinds can come to a place at all.

Split matrices: the CTAs of a team multiply the same tiles by their own part of K. In a group of
tiles CTA r owns tile r; the others send it their sums and the owner adds the parts in rank order.
Within a cluster they go into the owner's inbox (`send_pair`). Inbox slots need no credit: with the
exchange in lockstep a CTA that sends into slot i % slots knows that its receiver has read what was
there. It has finished group i - 1 - `defer` itself, for which the receiver sent after finishing
group i - 2 - 2 `defer`; so 2 slots are enough without deferral, and 4 where groups are finished one
later (`defer` = 1). Where teams are not clusters (an H200 holds 30 clusters of 4, its GPCs having
16 or 18 SMs), the sums of `down` travel as words in device memory instead.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.config import KINDS, TILE
from cute_kernels.gpu.fragments import bf16_pair, put_word
from cute_kernels.gpu.rotary import put_qkv

QKV, O, GU, DOWN, LM = range(5)
NORMED = ("qkv", "gu", "lm")


def is_any(possible, wanted, kind):
    """Is `kind` one of `wanted`, given that it is one of `possible`? A constant where it can be."""
    left = [n for n in possible if n in wanted]
    if len(left) in (0, len(possible)):
        return Boolean(bool(left))
    out = kind == KINDS.index(left[0])
    for n in left[1:]:
        out = out | (kind == KINDS.index(n))
    return out


def row_factor(k, kind, row):
    """RMSNorm's factor of a row."""
    c = k.c
    if c.split > 1:
        return sync.lds(k.factors + row * 4)
    total, copy = Float32(0.0), 0
    if c.red_buffers > 1:
        copy = Int32(kind == GU) * (c.k_warps * c.tile_rows * 4)
    for w in range(c.k_warps):
        total = total + sync.lds(k.squares + copy + (w * c.tile_rows + row) * 4)
    return cute.math.rsqrt(total * (1.0 / c.shape.hidden) + c.shape.rms_eps, fastmath=True)


def add_residual(k, own, m, v0, v1):
    """The fp32 residual of a CTA's own columns never leaves its shared memory."""
    at = k.residual + (own * k.c.m_tiles + m) * 512 + k.pair
    r0, r1 = sync.lds_pair(at)
    sync.sts_pair(at, v0 + r0, v1 + r1)
    return v0 + r0, v1 + r1


@cute.jit
def epilogue(
    k: cutlass.Constexpr,
    names: cutlass.Constexpr,
    kind: Int32,
    tile: Int32,
    own: Int32,
    m: cutlass.Constexpr,
    v0: Float32,
    v1: Float32,
    dst: Int64,
):
    """Finished sums of two neighbouring columns of one row (row tile m) -> where they go."""
    row, col, ok = k.row + m * 16, tile * TILE + 2 * k.t, Boolean(True)
    if is_any(names, NORMED, kind):
        f = row_factor(k, kind, row)
        v0, v1 = v0 * f, v1 * f
    elsewhere = ("lm", "qkv") if k.c.attention else ("lm",)
    if cutlass.const_expr("lm" in names):
        if kind == LM:
            if row < k.c.rows:
                at = dst + (Int64(row) * k.c.shape.vocab + Int64(col)) * 4
                sync.ptx_do("st.global.v2.f32 [{$r0}], {{$r1},{$r2}};", at, v0, v1)
    if cutlass.const_expr("qkv" in names and k.c.attention):
        if kind == QKV:
            put_qkv(k, dst, row, col, v0, v1)
    if is_any(names, [n for n in names if n not in elsewhere], kind):
        if is_any(names, ("o", "down"), kind):
            v0, v1 = add_residual(k, own, m, v0, v1)
        word = bf16_pair(v0, v1)
        if cutlass.const_expr("gu" in names):
            if kind == GU:  # columns are (gate, up); two lanes make one word
                h = v1 * v0 / (1.0 + cute.math.exp2(v0 * -1.4426950408889634, fastmath=True))
                word = bf16_pair(h, cute.arch.shuffle_sync_bfly(h, offset=2))
                col, ok = tile * 4 + k.t, (k.t & 1) == 0
        put_word(k, ok, dst, row, col, word)


# -- sums of a group ---------------------------------------------------------------------------
def defers(c):
    """Finish a group one group later? Where the inbox holds both; see the module's docstring."""
    g = c.gemm("down")
    few = -(-g.tiles // (c.ctas // g.split)) <= 2 * c.group
    return c.inbox_slots >= 4 or (c.split == 1 and few)


def inbox_at(k, slot, j, q):
    """Inbox place of CTA q's sums for this CTA's tile among tiles j of a group."""
    c = k.c
    return k.inbox + ((slot * c.inbox_tiles + j // c.team) * c.team + q) * (c.m_tiles * 512)


def part_at(k, tile, q, m):
    """Byte offset, among a copy's partial sums, of CTA q's pair for a tile."""
    return Int64((tile * k.c.team + q) * (k.c.m_tiles * 512) + m * 512 + k.pair)


def add_warps(k, at):
    pairs = [sync.lds_pair(at + w * 512) for w in range(k.c.k_warps)]
    v0, v1 = pairs[0]
    for p0, p1 in pairs[1:]:
        v0, v1 = v0 + p0, v1 + p1
    return v0, v1


@cute.jit
def add_passes(k: cutlass.Constexpr, done: Int32, m: cutlass.Constexpr, slab_pass: Int32,
               last: Boolean, v0: Float32, v1: Float32):  # fmt: skip
    """Sums over the slabs of a CTA's K, kept by the thread that adds them."""
    c = k.c
    at = k.pass_sums + (done // c.group * c.group + k.j) * (c.m_tiles * 512) + m * 512 + k.pair
    if slab_pass > 0:
        a0, a1 = sync.lds_pair(at)
        v0, v1 = v0 + a0, v1 + a1
    if last == False:  # noqa: E712 - a run-time value
        sync.sts_pair(at, v0, v1)
    return v0, v1


@cute.jit
def send_part(k: cutlass.Constexpr, tile: Int32, own: Int32, owner: Int32, slot: Int32,
              m: cutlass.Constexpr, v0: Float32, v1: Float32, parts: Int64):  # fmt: skip
    """This CTA's part of a tile's sums to the tile's owner."""
    c = k.c
    if cutlass.const_expr(c.cluster == 1):
        if owner == k.rank:
            sync.sts_pair(k.own + (own * c.m_tiles + m) * 512 + k.pair, v0, v1)
        else:
            words = [sync.as_bits(v0), sync.as_bits(v1)]
            sync.st_words(parts + part_at(k, tile, k.rank, m), words)
    else:
        place = inbox_at(k, slot, k.j, k.rank) + m * 512 + k.pair
        if owner == k.rank:
            sync.sts_pair(place, v0, v1)
        else:
            bar = sync.peer_address(k.inbox_bar + slot * 8, owner)
            sync.send_pair(sync.peer_address(place, owner), v0, v1, bar)


@cute.jit
def reduce_group(
    k: cutlass.Constexpr,
    f: cutlass.Constexpr,
    kind: Int32,
    exchanged: Boolean,
    tile0: Int32,
    done: Int32,
    left: Int32,
    which: Int32,
    turn: Int32,
    slab_pass: Int32,
    last: Boolean,
    dst: Int64,
    parts: Int64,
):
    """Thread (tile j, pair) adds the warps' partial sums of its two columns, in warp order."""
    c = k.c
    red = k.red + which * (c.group * c.m_tiles * c.k_warps * 512)
    slot = turn & (c.inbox_slots - 1)
    index = done + k.j
    if cutlass.const_expr(f.split > 1 and c.cluster > 1):
        if (k.tid == 0) & exchanged & last:
            own_tiles = (left - k.rank + f.split - 1) // f.split
            per_tile = (f.split - 1) * c.tile_rows * TILE * 4
            sync.expect(k.inbox_bar + slot * 8, own_tiles * per_tile)
    if k.j < left:
        for m in cutlass.range_constexpr(c.m_tiles):
            v0, v1 = add_warps(k, red + (k.j * c.m_tiles + m) * (c.k_warps * 512) + k.pair)
            if cutlass.const_expr(f.passes > 1):
                if kind == DOWN:
                    v0, v1 = add_passes(k, done, m, slab_pass, last, v0, v1)
            if cutlass.const_expr(len(f.whole_names) > 0):
                if is_any(f.names, f.whole_names, kind):
                    if last:
                        tile = tile0 + index
                        if cutlass.const_expr("o" in f.names and c.split == 1 and c.team > 1):
                            if kind == O:  # it follows the ownership of `down`
                                tile = tile0 + index * c.team
                        epilogue(k, f.whole_names, kind, tile, index, m, v0, v1, dst)
            if cutlass.const_expr(f.split > 1):
                if exchanged & last:
                    owner = index & (f.split - 1)
                    own = index // f.split
                    send_part(k, tile0 + index, own, owner, slot, m, v0, v1, parts)


def ask_parts(k, f, u, tile0, n, parts):
    """One round of loads, all in flight together; returns the largest word awaited."""
    c, awaited, tiles = k.c, [], k.c.gemm("down").tiles
    for i in range(c.own_tiles):
        # tiles beyond n: some address of this buffer, not looked at
        own = i * f.split + k.rank
        tile = cutlass.min(tile0 + own, tiles - 1)
        for m in range(c.m_tiles):
            for q in range(f.split):
                at = 2 * ((i * c.m_tiles + m) * f.split + q)
                u[at], u[at + 1] = sync.ld_pair_words(parts + part_at(k, tile, q, m))
                awaited.append((at, (k.rank != q) & (own < n)))
    return sync.largest(
        [sync.select(ok, sync.larger(u[at], u[at + 1]), Uint32(0)) for at, ok in awaited]
    )


@cute.jit
def finish_global(
    k: cutlass.Constexpr,
    f: cutlass.Constexpr,
    kind: Int32,
    tile0: Int32,
    n: Int32,
    dst: Int64,
    parts: Int64,
):
    """The owner of a tile adds the parts of its team, in rank order; tile r of a group belongs to
    the threads of its slot, so that own parts stay in the thread that made them."""
    c = k.c
    if k.j == k.rank:
        u = cute.make_rmem_tensor(cute.make_layout(2 * c.own_tiles * c.m_tiles * f.split), Uint32)
        worst = ask_parts(k, f, u, tile0, n, parts)
        tries, since = Int32(0), Int64(0)
        while worst == Uint32(sync.EMPTY):
            worst = ask_parts(k, f, u, tile0, n, parts)
            tries, since = sync.overdue(tries, since)
        for i in cutlass.range_constexpr(c.own_tiles):
            if i * f.split + k.rank < n:
                for m in cutlass.range_constexpr(c.m_tiles):
                    o0, o1 = sync.lds_pair(k.own + (i * c.m_tiles + m) * 512 + k.pair)
                    v0, v1 = Float32(0.0), Float32(0.0)
                    for q in cutlass.range_constexpr(f.split):
                        at = 2 * ((i * c.m_tiles + m) * f.split + q)
                        p0, p1 = o0, o1
                        if k.rank != q:
                            p0, p1 = sync.as_float(u[at]), sync.as_float(u[at + 1])
                        v0, v1 = v0 + p0, v1 + p1
                    tile = tile0 + i * f.split + k.rank
                    epilogue(k, f.split_names, kind, tile, Int32(i), m, v0, v1, dst)


@cute.jit
def finish_group(
    k: cutlass.Constexpr,
    f: cutlass.Constexpr,
    kind: Int32,
    tile0: Int32,
    done: Int32,
    left: Int32,
    turn: Int32,
    dst: Int64,
):
    """The same with the parts in this CTA's inbox."""
    c = k.c
    slot = turn & (c.inbox_slots - 1)
    round_ = turn >> (c.inbox_slots.bit_length() - 1)
    index = done + k.j
    if k.j < left:
        if (index & (f.split - 1)) == k.rank:
            sync.wait_parity(k.inbox_bar + slot * 8, round_ & 1)
            for m in cutlass.range_constexpr(c.m_tiles):
                v0, v1 = Float32(0.0), Float32(0.0)
                for q in cutlass.range_constexpr(f.split):
                    p0, p1 = sync.lds_pair(inbox_at(k, slot, k.j, q) + m * 512 + k.pair)
                    v0, v1 = v0 + p0, v1 + p1
                epilogue(k, f.split_names, kind, tile0 + index, index // f.split, m, v0, v1, dst)
