"""The draft tree, from the candidates of the drafted positions: on one warp of CTA 0.

The tree is the `budget` prefixes of highest score in the order of cute_kernels/cpu/tree.py, with
its arithmetic: a score is the parent's plus a log-probability, one fp32 addition; order is (score
descending, rank tuple ascending, a prefix before its extensions); -inf is never opened.

Row p of the tree stands for its next child that is not in the tree yet: at first that of rank 1,
then, as they are taken, the next sibling. So a row has one open prefix at most, whose score lane
p mod 32 keeps as a key in a register (slot p / 32), and a turn is: the largest key of a lane's
slots, of the warp, who has it; that child is row n, and two prefixes open in place, its next
sibling in slot p and its first child in slot n. Only of equal scores are rank tuples compared,
which rows keep in shared memory, a byte a rank from the top as in the CPU's keys.

Log-probabilities lie in shared memory as TABLE[position][rank]; what is not in use is -inf there
(ranks behind the last candidate, positions behind the last, a position with NaN or +inf), and a
score of -inf is no prefix: nothing else ends siblings, children or the tree.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.board import MAX_ROWS, RANKS, ROW_WORDS, Board, Desc, Stamp
from cute_kernels.gpu.core import arg, desc_word, note_phase, note_time
from cute_kernels.gpu.kv_layout import MAX_DEPTH
from cute_kernels.gpu.rank_plan import IDS, LOGPROBS, MOST, ORIGINS, RANKED_BYTES, TABLE, TUPLES
from cute_kernels.gpu.rank_plan import WORDS as N_ROWS
from cute_kernels.gpu.topk import key_of, value_of

SLOTS = MAX_ROWS // 32
NO_PREFIX = 0x007FFFFF  # the key of -inf
NEG_INF, INF = -float("inf"), float("inf")


def board_at(k, word):
    return k.board + Int64(int(word) * 4)


# -- candidates in -------------------------------------------------------------------------------
@cute.jit
def wait_ranks(k: cutlass.Constexpr, drafted: Int32):
    """Each warp: until the ranks of all drafted positions are complete, for all its lanes."""
    tag, at = desc_word(k, Desc.TAG), board_at(k, Board.RANK_TAG) + Int64(k.lane * 4)
    missing, tries, since = Uint32(1), Int32(0), Int64(0)
    while missing != 0:
        late = Int32(0)
        if k.lane < drafted:
            late = Int32(sync.ld_acquire(at) != tag)
        missing = sync.lanes_where(late)
        tries, since = sync.overdue(tries, since)
    cute.arch.sync_warp()


@cute.jit
def load_position(k: cutlass.Constexpr, d: Int32, used: Int32):
    """A warp: one position's log-probabilities into TABLE."""
    at = arg(k, Arg.RANKED) + Int64(d) * RANKED_BYTES
    words = sync.ld_fresh_words_if(Int32(d < used), at + Int64(k.lane * 16 + LOGPROBS))
    width = cutlass.min(Int32(sync.ld_word(at)), Int32(MOST))
    width = sync.select_int(d < used, width, Int32(0))
    values, seen = [sync.as_float(w) for w in words], Int32(0)
    for e in cutlass.range_constexpr(4):  # usable ones in the low half, wrong ones in the high one
        some = Int32(values[e] > NEG_INF) + 0x10000 * (1 - Int32(values[e] < INF))
        seen = seen + sync.select_int(4 * k.lane + e < width, some, Int32(0))
    seen = Int32(sync.warp_reduce("add", Uint32(seen)))
    kept = sync.select_int(seen < 0x10000, seen, Int32(0))
    if desc_word(k, Desc.CHAIN) != 0:
        kept = cutlass.min(kept, Int32(1))
    values = [sync.choose(4 * k.lane + e < kept, v, NEG_INF) for e, v in enumerate(values)]
    sync.sts_quad(k.attention + TABLE + d * (RANKS * 4) + k.lane * 16, values)


# -- growth --------------------------------------------------------------------------------------
def first_of_equals(k, key, best):
    """The row whose open prefix comes first among those of score `best`, by rank tuple."""
    base, words, alive = k.attention + TABLE, [], []
    for s in range(SLOTS):
        row = 32 * s + k.lane
        tuple_ = sync.lds_words(k.attention + TUPLES + row * 16)
        place = sync.lds_int(k.red + row * 16) - base
        d, rank = place >> 9, Uint32((place & 511) >> 2) + 1
        mine = rank << Uint32(24 - 8 * (d & 3))
        words.append([sync.select((d >> 2) == j, w | mine, w) for j, w in enumerate(tuple_)])
        alive.append(Int32(key[s] == best))
    for j in range(4):
        now = [sync.select(alive[s], words[s][j], Uint32(0xFFFFFFFF)) for s in range(SLOTS)]
        least = now[0]
        for w in now[1:]:
            least = sync.smaller(least, w)
        least = sync.warp_reduce("min", least)
        alive = [a & Int32(w == least) for a, w in zip(alive, now, strict=True)]
    row = Uint32(0)
    for s in range(SLOTS):
        row = row + sync.select(alive[s], Uint32(32 * s + k.lane), Uint32(0))
    return Int32(sync.warp_reduce("add", row))


def largest_slot(k, key):
    """(key, row) of this lane's best open prefix."""
    best, row = key[0], k.lane
    for s in range(1, SLOTS):
        row = sync.select_int(key[s] > best, 32 * s + k.lane, row)
        best = sync.larger(best, key[s])
    return best, row


def note_row(k, row, ranks, n, place):
    """One lane: what remains of row n, the child of `row`, whose ranks are given, with the
    log-probability at `place`."""
    at = place - (k.attention + TABLE)
    d, rank = at >> 9, ((Uint32(at) & Uint32(511)) >> Uint32(2)) + Uint32(1)
    mine = rank << Uint32(24 - 8 * (d & 3))
    ranks = [sync.select((d >> 2) == j, w | mine, w) for j, w in enumerate(ranks)]
    sync.sts_words(k.attention + TUPLES + n * 16, ranks)
    sync.sts_int(k.attention + ORIGINS + n * 4, row | (at << 6))


@cute.jit
def grow(k: cutlass.Constexpr, budget: Int32):
    """One warp: ORIGINS of the tree's rows but the root, and N_ROWS.

    A row's record, 16 bytes of the scratch for partial sums: where the log-probability of its open
    prefix is; the row's own score; the keys of what opens when that prefix is taken, its next
    sibling and its first child. So a turn waits for one record, and makes the two that it changes
    while the next largest key is looked for."""
    base, records = k.attention + TABLE, k.red
    key = cute.make_rmem_tensor(cute.make_layout(SLOTS), Uint32)
    for s in cutlass.range_constexpr(SLOTS):
        key[s] = Uint32(NO_PREFIX)
    if k.lane == 0:
        first = sync.lds(base)
        key[0] = key_of(first)
        sibling, child = key_of(sync.lds(base + 4)), key_of(first + sync.lds(base + 4 * RANKS))
        sync.sts_words(records, [Uint32(base), Uint32(0), sibling, child])
        sync.sts_words(k.attention + TUPLES, [Uint32(0)] * 4)
        sync.sts_int(k.attention + ORIGINS, Int32(0))
    cute.arch.sync_warp()
    n = Int32(1)
    mine, row = largest_slot(k, key)
    best = sync.warp_reduce("max", mine)
    while (best > Uint32(NO_PREFIX)) & (n <= budget):
        holders, equals = sync.lanes_where(mine == best), Int32(0)
        for s in cutlass.range_constexpr(SLOTS):
            equals = equals + Int32(key[s] == best)
        if ((holders & (holders - Uint32(1))) | sync.lanes_where(equals > 1)) != 0:
            row = first_of_equals(k, key, best)
        row = cute.arch.shuffle_sync(row, sync.lowest_bit(holders))
        taken, own = row, value_of(best)
        place, score, sibling_key, child_key = sync.lds_words(records + taken * 16)
        ranks = sync.lds_words(k.attention + TUPLES + taken * 16)
        for s in cutlass.range_constexpr(SLOTS):
            key[s] = sync.select(taken == 32 * s + k.lane, sibling_key, key[s])
            key[s] = sync.select(n == 32 * s + k.lane, child_key, key[s])
        mine, row = largest_slot(k, key)
        best = sync.warp_reduce("max", mine)
        # lane 0 renews the record of the row, lane 1 makes that of row n
        place, old = Int32(place), k.lane == 0
        child = base + (((place - base) >> 9) + 1) * (4 * RANKS)
        at = sync.select_int(old, place + 4, child)
        score = sync.choose(old, sync.as_float(score), own)
        below = sync.select_int(old, child, child + 4 * RANKS)
        opens = sync.choose(old, value_of(sibling_key), value_of(child_key))
        sibling = key_of(score + sync.lds(at + 4))
        child_of = key_of(opens + sync.lds(below))
        if k.lane < 2:
            to = records + sync.select_int(old, taken, n) * 16
            sync.sts_words(to, [Uint32(at), sync.as_bits(score), sibling, child_of])
        if k.lane == 0:
            note_row(k, taken, ranks, n, place)
        cute.arch.sync_warp()
        n = n + 1
    if k.lane == 0:
        sync.sts_int(k.attention + N_ROWS, n)


# -- rows out ------------------------------------------------------------------------------------
def pushed(word, below):
    """A word of a path when a byte is put in front of all."""
    return (word << Uint32(8)) | (below >> Uint32(24))


@cute.jit
def write_row(k: cutlass.Constexpr, row: Int32):
    """A thread: the row's words, board.RowWord."""
    origin = sync.lds_int(k.attention + ORIGINS + row * 4)
    token, parent = desc_word(k, Desc.TOKEN), Int32(-1)
    if row > 0:
        place = origin >> 8  # position and rank of its log-probability
        entry = arg(k, Arg.RANKED) + Int64((place >> 7) * RANKED_BYTES + IDS)
        token = Int32(sync.ld_word(entry + Int64((place & (RANKS - 1)) * 4)))
        parent = origin & 255
    p0, p1, p2, p3 = Uint32(0), Uint32(0), Uint32(0), Uint32(0)
    above, depth = row, Int32(-1)
    while above >= 0:  # from the row up to the root, each in front of those below it
        p3, p2, p1 = pushed(p3, p2), pushed(p2, p1), pushed(p1, p0)
        p0 = (p0 << Uint32(8)) | Uint32(above)
        up = sync.lds_int(k.attention + ORIGINS + above * 4) & 255
        above = sync.select_int(above == 0, Int32(-1), up)
        depth = depth + 1
    to = arg(k, Arg.ROW_TABLE) + Int64(row * (ROW_WORDS * 4))
    position = desc_word(k, Desc.POSITION) + depth
    sync.st_words(to, [Uint32(v) for v in (token, position, parent, depth)])
    sync.st_words(to + 16, [p0, p1, p2, p3])


@cute.jit
def grow_tree(k: cutlass.Constexpr):
    """Consumer warps, behind `rank.rank_rows`: CTA 0 makes the tree of the step's ranks, the others
    go on. The ranks of all rows that predict are waited for, those beyond the tree's depth too:
    behind TREE_TAG the next step may begin, and with a row's ranks its results are EMPTY again.
    Uses attention's part and the scratch for partial sums; both are free when it returns."""
    c, threads = k.c, k.c.warps * 32
    if k.bid == 0:
        note_phase(k, k.phases + 3)
        drafted = cutlass.max(desc_word(k, Desc.ROWS) - desc_word(k, Desc.FIRST_DRAFTED), 0)
        used = cutlass.min(cutlass.min(drafted, desc_word(k, Desc.DEPTH)), Int32(MAX_DEPTH))
        wait_ranks(k, drafted)
        note_time(k, Stamp.RANKED)
        # a position behind the last that is used ends every prefix: no more are looked at
        for i in cutlass.range((used + c.warps - k.wid) // c.warps, unroll=1):
            load_position(k, k.wid + i * c.warps, used)
        sync.consumer_sync(threads)
        # on the scheduler that neither the producer nor the janitor nor the service warp is on
        if k.wid == (c.warps + 3) % 4:
            grow(k, cutlass.min(desc_word(k, Desc.BUDGET), Int32(MOST)))
        sync.consumer_sync(threads)
        n = sync.lds_int(k.attention + N_ROWS)
        if k.tid < n:
            write_row(k, k.tid)
        if k.tid == 0:
            sync.st_word(board_at(k, Board.TREE_ROWS), Uint32(n))
        note_time(k, Stamp.TREE)
        sync.consumer_sync(threads)
        if k.tid == 0:
            sync.st_release(board_at(k, Board.TREE_TAG), desc_word(k, Desc.TAG))
