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
from cutlass import Boolean, Int32, Int64, Uint32

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
@cute.jit
def first_of_equals(k: cutlass.Constexpr, key: cute.Tensor, best: Uint32):
    """The row whose open prefix comes first among those of score `best`, by rank tuple: one word of
    the tuples after the other, until one row is left. Most often the first word tells."""
    alive = cute.make_rmem_tensor(cute.make_layout(SLOTS), Int32)
    last, own = [], []  # the open prefix's own rank: its word, and what it adds to it
    for s in cutlass.range_constexpr(SLOTS):
        alive[s] = Int32(key[s] == best)
        d, mine = rank_at(sync.lds_int(k.red + (32 * s + k.lane) * 16))
        last.append(d >> 2)
        own.append(mine)
    row, j, searching = Int32(0), Int32(0), Boolean(True)
    while searching:
        words, least = [], Uint32(0xFFFFFFFF)
        for s in cutlass.range_constexpr(SLOTS):
            w = sync.lds_word(k.attention + TUPLES + (32 * s + k.lane) * 16 + j * 4)
            words.append(w | sync.select(last[s] == j, own[s], Uint32(0)))
            least = sync.smaller(least, sync.select(alive[s], words[s], Uint32(0xFFFFFFFF)))
        least = sync.warp_reduce("min", least)
        left = Uint32(0)  # how many, and behind 16 bits the sum of their rows
        for s in cutlass.range_constexpr(SLOTS):
            alive[s] = alive[s] & Int32(words[s] == least)
            mine = Uint32(32 * s + k.lane) * Uint32(0x10000) + Uint32(1)
            left = left + sync.select(alive[s], mine, Uint32(0))
        left = Int32(sync.warp_reduce("add", left))
        row, j = left >> 16, j + 1
        searching = (left & 0xFFFF) > 1
    return row


def rank_at(place):
    """(position, rank where its tuple has it: in word d >> 2) of the log-probability at `place`, an
    offset in TABLE."""
    d, rank = place >> 9, ((Uint32(place) & Uint32(511)) >> Uint32(2)) + Uint32(1)
    return d, rank << Uint32(24 - 8 * (d & 3))


def largest_slot(k, key):
    """(key, row, whether it has two of that key) of this lane's best open prefix."""
    best, row = key[0], k.lane
    for s in range(1, SLOTS):
        row = sync.select_int(key[s] > best, 32 * s + k.lane, row)
        best = sync.larger(best, key[s])
    equals = Int32(0)
    for s in range(SLOTS):
        equals = equals + Int32(key[s] == best)
    return best, row, equals > 1


@cute.jit
def grow(k: cutlass.Constexpr, budget: Int32):
    """One warp: ORIGINS of the tree's rows but the root, and N_ROWS.

    A row's record, 16 bytes of the scratch for partial sums: where in TABLE the log-probability of
    its open prefix is; the row's own score; the keys of what opens when that prefix is taken, its
    next sibling and its first child. A warp issues in order, so what a turn costs is its number of
    instructions and what waits for what: it reads one record and one tuple, a word a lane; two
    lanes make the two records that it changes, while the next largest key is looked for."""
    table, records, tuples = k.attention + TABLE, k.red, k.attention + TUPLES
    key = cute.make_rmem_tensor(cute.make_layout(SLOTS), Uint32)
    for s in cutlass.range_constexpr(SLOTS):
        key[s] = Uint32(NO_PREFIX)
    if k.lane == 0:
        first = sync.lds(table)
        key[0] = key_of(first)
        sibling, child = key_of(sync.lds(table + 4)), key_of(first + sync.lds(table + 4 * RANKS))
        sync.sts_words(records, [Uint32(0), Uint32(0), sibling, child])
        sync.sts_words(tuples, [Uint32(0)] * 4)
        sync.sts_int(k.attention + ORIGINS, Int32(0))
    cute.arch.sync_warp()
    n, of_row, part = Int32(1), k.lane == 0, k.lane & 3
    mine, row, twice = largest_slot(k, key)
    best = sync.warp_reduce("max", mine)
    growing = (best > Uint32(NO_PREFIX)) & (n <= budget)
    while growing:
        has = mine == best
        taken = Int32(sync.warp_reduce("min", sync.select(has, Uint32(row), Uint32(255))))
        holders = sync.lanes_where(has)
        if ((holders & (holders - Uint32(1))) | sync.lanes_where(has & twice)) != 0:
            taken = first_of_equals(k, key, best)
        at, score, sibling_key, child_key = sync.lds_words(records + taken * 16)
        ranks = sync.lds_word(tuples + taken * 16 + part * 4)
        at, own = Int32(at), value_of(best)
        for s in cutlass.range_constexpr(SLOTS):
            key[s] = sync.select(taken == 32 * s + k.lane, sibling_key, key[s])
            key[s] = sync.select(n == 32 * s + k.lane, child_key, key[s])
        mine, row, twice = largest_slot(k, key)
        best = sync.warp_reduce("max", mine)
        # lane 0 renews the record of the row, lane 1 makes that of row n
        below = (at | (4 * RANKS - 1)) + 1
        opens = value_of(sync.select(of_row, sibling_key, child_key))
        score = sync.choose(of_row, sync.as_float(score), own)
        next_at = sync.select_int(of_row, at + 4, below)
        below = table + sync.select_int(of_row, below, below + 4 * RANKS)
        sibling = key_of(score + sync.lds(table + next_at + 4))
        child = key_of(opens + sync.lds(below))
        d, rank = rank_at(at)
        ranks = ranks | sync.select((d >> 2) == part, rank, Uint32(0))
        to = records + sync.select_int(of_row, taken, n) * 16
        if k.lane < 2:
            sync.sts_words(to, [Uint32(next_at), sync.as_bits(score), sibling, child])
        if k.lane < 4:
            sync.sts_int(tuples + n * 16 + part * 4, ranks)
        if k.lane == 0:
            sync.sts_int(k.attention + ORIGINS + n * 4, taken | (at << 6))
        n = n + 1
        growing = (best > Uint32(NO_PREFIX)) & (n <= budget)
        cute.arch.sync_warp()
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
