"""One dependent matrix of the step in decode form: y = epilogue(x @ W^T) for up to 16 rows.

Activations are the m16 side of mma.sync m16n8k16 (bf16, fp32 sums), weights the n8 side. Consumer
warps split K: warp w keeps its slice of the activations in registers for a whole phase and
multiplies it with its slice of every unit; partial sums meet in shared memory and are added in
warp order, so that a result depends neither on timing nor on the other rows. RMSNorm is deferred:
the sum of squares comes from the A fragments, and one factor per row multiplies the finished sums.
The weights of qkv's and gate/up's norms are folded into the matrices; those of the final norm,
whose matrix may be the embedding, multiply the head's A fragments.

The drafter's layers and its head are the target's here, with other weights; its `fc` sums taps over
phases in the residual's place, its `ckv` makes keys and values of all its layers: context.py.

The order of every sum, which the row form (rows_gemm.py) repeats bit for bit. K of a matrix is cut
into `split` parts (1, or the team of `down`: rank q), a part into `warps` equal runs (warp w), a
run into chunks of 32 (i = 0, 1, ...), a chunk into two k16 steps (s = 0, 1):

- an mma.sync m16n8k16 is one step: values k = 16 s + 4 t + {0, 1} and {2, 3} of the chunk are the
  low and the high half of lane t's operands (a permutation of K within the step);
- chain s of a warp (CHAINS = 2) starts at 0 and takes step s of chunks i ascending;
- the warp's sum is chain 0 + chain 1;
- the part's sum is ((w0 + w1) + w2) + ..., warps ascending;
- where split > 1 the total is (((0 + q0) + q1) + ...), ranks ascending, starting at 0.0;
- the square sum of a row: lane t has four sums by word e of its 16-byte vectors (words 2 s and
  2 s + 1 of step s), `add_square` over chunks ascending; (s0 + s1) + (s2 + s3), then over t by
  butterfly 1, 2; over warps ((0 + w0) + w1) + ...; factor = rsqrt(total / hidden + eps), see
  `norm_factor`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.board import Desc
from cute_kernels.gpu.config import CHAINS, CHUNK, CHUNK_BYTES
from cute_kernels.gpu.core import arg, desc_word
from cute_kernels.gpu.embed import gather
from cute_kernels.gpu.epilogue import finish_team, norm_factor, reduce_group, squares_at
from cute_kernels.gpu.fragments import bf16_product, mma, unpack_pair
from cute_kernels.gpu.janitor import tell_janitor
from cute_kernels.gpu.prompt_plan import COLUMNS_BYTES
from cute_kernels.gpu.ring import advance
from cute_kernels.gpu.sync import ptx_read

__all__ = ["norm_factor", "run_phase", "take_words"]


# -- registers ---------------------------------------------------------------------------------
def warp_chunks(k, g):
    """32-wide K chunks that one warp owns in a unit."""
    return g.slab // CHUNK // k.c.warps


def slab_offsets(k, g):
    """Byte offsets of the 16-byte vectors a lane holds: [chunk][block of 8 rows]."""
    return [i * CHUNK_BYTES + b * 512 for i in range(warp_chunks(k, g)) for b in range(2)]


def fragment(slab, chunk, step):
    """The A operand (4 registers) of a k16 step."""
    at = chunk * 8 + 2 * step
    return [slab[at], slab[at + 4], slab[at + 1], slab[at + 5]]


def row_bits(k, rows):
    """Does this lane hold a row that the step has, in block 0 and in block 1?"""
    g = k.lane >> 2
    return [Int32(g < rows), Int32(g + 8 < rows)]


# -- activations in ----------------------------------------------------------------------------
def ask_all(words, addresses, oks):
    for i, at in enumerate(addresses):
        for e, v in enumerate(sync.ld_words_if(oks[i % len(oks)], at)):
            words[i * 4 + e] = v


def ask_missing(words, addresses):
    for i, at in enumerate(addresses):
        mine = [words[i * 4 + e] for e in range(4)]
        for e, v in enumerate(sync.ld_missing_words(at, mine, sync.largest(mine))):
            words[i * 4 + e] = v


@cute.jit
def take_words(k: cutlass.Constexpr, words: cute.Tensor, addresses: cutlass.Constexpr,
               oks: cutlass.Constexpr):  # fmt: skip
    """A lane's 16-byte vectors at `addresses` into registers, as the words arrive. All lanes of
    the warp must call it. oks (Int32, used in turn): where 0, the vector is zeros and is not read.
    The last vector of block 0 is the one that is polled first."""
    polled = not k.c.phase
    if cutlass.const_expr(polled and len(addresses) > k.c.ask_at_once):
        if desc_word(k, Desc.ROWS) >= k.c.probe_from:
            probe, ok = addresses[-len(oks)], oks[0]
            tries, since = Int32(0), Int64(0)
            while sync.any_lane_empty(sync.largest(sync.ld_words_if(ok, probe))) != 0:
                tries, since = sync.overdue(tries, since)
    ask_all(words, addresses, oks)
    if cutlass.const_expr(polled):
        tries, since = Int32(0), Int64(0)
        n = len(addresses) * 4
        while sync.any_lane_empty(sync.largest([words[i] for i in range(n)])) != 0:
            ask_missing(words, addresses)
            tries, since = sync.overdue(tries, since)


@cute.jit
def take_features(k: cutlass.Constexpr, g: cutlass.Constexpr, slab: cute.Tensor, src: Int64,
                  oks: cutlass.Constexpr):  # fmt: skip
    """Rows ACCEPTED[i] of a tap's features, in the row form's order, which a step before left."""
    first = src + Int64(k.wid * warp_chunks(k, g) * COLUMNS_BYTES + (k.lane & 3) * 16)
    for b in cutlass.range_constexpr(2):
        at = sync.lds_int(k.desc + (int(Desc.ACCEPTED) + b * 8 + (k.lane >> 2)) * 4)
        at = sync.select_int(oks[b], at, Int32(0)) * 64  # a block of 8 rows: 512 bytes
        for i in cutlass.range_constexpr(warp_chunks(k, g)):
            words = sync.ld_words_if(oks[b], first + Int64(at) + i * COLUMNS_BYTES)
            for e in cutlass.range_constexpr(4):
                slab[i * 8 + b * 4 + e] = words[e]


@cute.jit
def scale_by_norm(k: cutlass.Constexpr, g: cutlass.Constexpr, slab: cute.Tensor, norm: Int64):
    """The final norm's weights into the head's A fragments, each product rounded to bf16."""
    at = norm + Int64((k.wid * warp_chunks(k, g) * 4 + (k.lane & 3)) * 16)
    for i in cutlass.range_constexpr(warp_chunks(k, g)):
        weights = sync.ld_constant_words(at + i * 64)
        for b in cutlass.range_constexpr(2):
            for e in cutlass.range_constexpr(4):
                slab[i * 8 + b * 4 + e] = bf16_product(slab[i * 8 + b * 4 + e], weights[e])


# -- RMSNorm factors ---------------------------------------------------------------------------
def add_square(total, word):
    """total + the squares of a pair of bf16."""
    lo, hi = unpack_pair(word)
    return hi * hi + (lo * lo + total)


def row_squares(k, g, slab):
    """Per block of rows: this quad's sum of squares over the warp's K. Four sums side by side:
    one chain of dependent additions would be a good part of a short phase."""
    out = []
    for b in range(2):
        sums = [Float32(0.0)] * 4
        for i in range(warp_chunks(k, g)):
            for e in range(4):
                sums[e] = add_square(sums[e], slab[i * 8 + b * 4 + e])
        total = (sums[0] + sums[1]) + (sums[2] + sums[3])
        total = total + cute.arch.shuffle_sync_bfly(total, offset=1)
        out.append(total + cute.arch.shuffle_sync_bfly(total, offset=2))
    return out


@cute.jit
def publish_squares(k: cutlass.Constexpr, g: cutlass.Constexpr, sums: cutlass.Constexpr):
    """Lanes with t = 0 store the warp's sums."""
    if (k.lane & 3) == 0:
        for b in cutlass.range_constexpr(2):
            row = b * 8 + (k.lane >> 2)
            sync.sts(k.squares + squares_at(k, g, k.wid, row), sums[b])


# -- weights in --------------------------------------------------------------------------------
AT_ONCE = 8  # chunks of weights in registers


def take_unit(k, g, slab, stage, parity):
    """Wait for the stages of one unit, multiply, give them back. Returns (4 sums, stage, parity).

    Two chains per warp, because one mma's latency is many times its issue slot."""
    per_copy = warp_chunks(k, g) // g.copies_per_unit
    chains = [[Float32(0.0)] * 4 for _ in range(CHAINS)]
    held, chunk = [], 0
    for copy in range(g.copies_per_unit):
        sync.wait_parity(k.ring.full + stage * 8, parity)
        at = k.ring.base + stage * k.ring.stage_bytes + k.wid * 512 + k.lane * 16
        mine = [sync.lds_words(at + i * (k.c.warps * 512)) for i in range(per_copy)]
        held.append((k.ring.empty + stage * 8, mine))
        stage, parity = advance(k.ring, stage, parity)
        if (len(held) + 1) * per_copy <= AT_ONCE and copy + 1 < g.copies_per_unit:
            continue
        for _, loaded in held:
            for b in loaded:
                for step in range(2):
                    a = fragment(slab, chunk, step)
                    chains[step] = mma(chains[step], a, b[2 * step : 2 * step + 2])
                chunk += 1
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            for bar, loaded in held:
                sync.release_after(bar, [b[0] for b in loaded], k.zero)
        held = []
    return [x + y for x, y in zip(*chains, strict=True)], stage, parity


# -- the phase ---------------------------------------------------------------------------------
def plan_entry(k, phase):
    """(first tile, tiles, copies, bytes a copy) of this CTA in a phase."""
    return ptx_read(
        "ld.global.nc.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];",
        [Int32] * 4,
        k.plan + Int64(phase * 16),
    )


def time_now(k):
    return cute.arch.globaltimer() if k.c.timing else Int64(0)


@cute.jit
def run_phase(
    k: cutlass.Constexpr,
    g: cutlass.Constexpr,
    rows: Int32,
    phase: Int32,
    src: Int64,
    dst: Int64,
    parts: Int64,
    stats: cute.Tensor,
    dirty: Int32,
    count: Int32,
    stage: Int32,
    parity: Int32,
    which: Int32,
    tap: Int64 = 0,
):
    """Consumer warps' part of one phase.

    g: the matrix. src, dst: activations in and out. In: of `qkv` 0 for the embeddings of the
    step's tokens, of `fc` a tap's features. Out: of `lm` the logits, of `fc` 0 where more taps
    follow, of `ckv` in the row form's order. parts: of `down` partial sums of the team, of `lm` the
    final norm's weights. stats: of `lm`, see head.py. dirty, count: of gate/up, see `tell_janitor`.
    tap: of `down`, where the rows also go as features; 0: nowhere. Returns (stage, parity, which):
    the place in the ring, the partial-sum buffer.
    """
    c = k.c
    tile0, n, _, _ = plan_entry(k, phase)
    t0 = time_now(k)
    t1, t2 = t0, t0
    if n > 0:
        slab = cute.make_rmem_tensor(cute.make_layout(warp_chunks(k, g) * 8), Uint32)
        oks = row_bits(k, rows)
        first = k.wid * warp_chunks(k, g)
        if cutlass.const_expr(g.split > 1):
            first = first + k.rank * (g.slab // CHUNK)
        base = src + Int64(first * CHUNK_BYTES + k.lane * 16)
        addresses = [base + off for off in slab_offsets(k, g)]
        if cutlass.const_expr(g.name == "qkv" and not c.phase):
            if src == 0:
                gather(k, g, slab, oks)
            else:
                take_words(k, slab, addresses, oks)
        elif cutlass.const_expr(g.name == "fc"):
            take_features(k, g, slab, src, oks)
        else:
            take_words(k, slab, addresses, oks)
        if cutlass.const_expr(g.name == "gu" and not c.phase):
            tell_janitor(k, dirty, count)
        squares = []
        if cutlass.const_expr(g.name == "lm"):
            squares = row_squares(k, g, slab)
            scale_by_norm(k, g, slab, parts)
        t1 = time_now(k)
        done = Int32(0)
        while done < n:
            left = cutlass.min(n - done, c.group)
            for j in cutlass.range(left, unroll=1):
                sums, stage, parity = take_unit(k, g, slab, stage, parity)
                at = (which * c.group + j) * c.warps + k.wid
                sync.sts_quad(k.red + at * 512 + k.lane * 16, sums)
            if cutlass.const_expr(g.normed):
                if done == 0:  # after the first units: HBM idles until then
                    if cutlass.const_expr(g.name == "lm"):
                        publish_squares(k, g, squares)
                    else:
                        publish_squares(k, g, row_squares(k, g, slab))
            sync.consumer_sync(c.warps * 32)
            reduce_group(k, g, rows, tile0, done, left, which, dst, parts, stats, tap)
            if cutlass.const_expr(c.red_buffers == 1):
                sync.consumer_sync(c.warps * 32)
            else:  # whoever writes this buffer again has passed the next group's barrier
                which = 1 - which
            done = done + c.group
        t2 = time_now(k)
        if cutlass.const_expr(g.split > 1):
            finish_team(k, g, rows, tile0, n, dst, parts, tap)
    if cutlass.const_expr(c.timing):
        if k.tid == 0:
            at = arg(k, Arg.TIMES) + (Int64(k.bid) * k.phases + Int64(phase)) * 32
            code = "st.global.v2.b64 [{$r0}], {{$r1},{$r2}};"
            sync.ptx_do(code, at, Int64(t0), Int64(t1))
            sync.ptx_do(code, at + 16, Int64(t2), Int64(time_now(k)))
    return stage, parity, which
