"""The service warp around a model that costs nothing: what the tests of the wire run on a device.

Every CTA keeps the tokens it was shown as its keys by position, those of a tree at the places of
their rows, and a row's digest is one of all tokens before it. A token is a function of the digest,
so a prompt token, a row or a move that is missing, stale or out of place changes everything that
follows. Logits tie on purpose, and a digest of BAD is a NaN. The drafter says what a script by
position tells it: at each depth some candidates, all of them children of the one that the depth
before goes on with. What was not told to the drafter (CONTEXT) spoils the digest.

Arguments: the kernel's table. SPARE holds per CTA `echo_rules.state_words` words, then DELAY: ns
that a DECODE step takes, and PLANT: 1 + the CTA that is to hang, 0 for none, and from bit 16 on
the Segment that it hangs in, 0 for any.
SPARE_TOO is the context's length, DRAFT_SCRIPT what the drafter says: int32 [positions,
SCRIPT_WORDS].
"""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.gpu import mapped, sync
from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.board import (
    ROW_WORDS,
    Board,
    Desc,
    RowWord,
    Segment,
    Stamp,
    desc_at,
    result_at,
)
from cute_kernels.gpu.core import Core, arg
from cute_kernels.gpu.descriptor import decision_at
from cute_kernels.gpu.echo_rules import (
    BAD,
    HOLE,
    LOGPROB,
    PHASE,
    ROW_STATE,
    SCRIPT_WORDS,
    SUM,
    VOCAB,
    state_words,
)
from cute_kernels.gpu.service import run_service
from host.wire import MAX_ALTERNATIVES, sampling_at

KEYS = ROW_STATE
"""Of a CTA's memory: the digests of the last step's rows, then the keys by position. What else a
CTA knows: the digest `h` of the keys before position `base`, and `seen`, the first position that
the drafter has not been shown."""


def _word(k, field):
    return Int32(sync.ld_word(k.board + desc_at(int(field))))


def _at(base, index):
    return base + 4 * Int64(index)


def _load(base, index):
    """Of memory that others write, too."""
    return Int32(sync.ld_word(_at(base, index)))


def _store(base, index, value):
    sync.st_word(_at(base, index), Uint32(value))


def _own(base, index):
    return mapped.ld_own_int(_at(base, index))


def _put_own(base, index, value):
    mapped.st_own_int(_at(base, index), Int32(value))


@cute.jit
def _digest(h: Uint32, token: Int32, position: Int32):
    if position == 0:
        h = Uint32(0)
    return h * Uint32(31) + Uint32(token) + Uint32(7) * Uint32(position)


@cute.jit
def _catch_up(own: Int64, h: Uint32, base: Int32, position: Int32):
    """(digest of all keys below `position`, position)."""
    if position < base:
        base, h = Int32(0), Uint32(0)
    while base < position:
        h = _digest(h, _own(own, KEYS + base), base)
        base = base + 1
    return h, base


@cute.jit
def _answer(k: cutlass.Constexpr, h: Uint32):
    """This CTA's share of the logits of row 0: two CTAs tie, the others are one lower."""
    token, winner = Int32(h % Uint32(VOCAB)), Int32((h >> 8) % Uint32(k.c.ctas))
    logit, mine = Float32(1), token + 2 + k.bid
    if (k.bid == winner) | (k.bid == (winner + 1) % k.c.ctas):
        logit, mine = Float32(2), token
        if k.bid != winner:
            mine = token + 1
    flags = Int32(0)
    if (h % Uint32(BAD) == Uint32(0)) & (k.bid == winner):
        flags = Int32(1)
    at = k.board + result_at(0, 0) + Int64(k.bid) * (result_at(0, 1) - result_at(0, 0))
    words = [sync.as_bits(logit), Uint32(mine), sync.as_bits(Float32(SUM)), Uint32(flags)]
    sync.st_words(at, words)


@cute.jit
def _decide(k: cutlass.Constexpr, h: Uint32, row: Int32):
    """A row's token, and its alternatives. Not greedy: shifted by what the request asks with."""
    how = arg(k, Arg.SAMPLING)
    shift = Int32(0)
    if _load(how, Int32(sampling_at("temperature") // 4)) != 0:
        names = ("top_p", "min_p", "top_k", "seed")
        for i in cutlass.range_constexpr(len(names)):
            shift = shift * 3 + _load(how, Int32(sampling_at(names[i]) // 4))
    for i in cutlass.range(_load(how, Int32(sampling_at("bias_count") // 4)), unroll=1):
        token = _load(how, sampling_at("bias_ids") // 4 + i)
        shift = shift * 3 + token + _load(how, sampling_at("bias") // 4 + i)
    token = Int32((h + Uint32(shift)) % Uint32(VOCAB))
    listed = arg(k, Arg.ALTERNATIVES)
    for i in cutlass.range(_load(how, Int32(sampling_at("logprobs") // 4)), unroll=1):
        at = 2 * (row * MAX_ALTERNATIVES + i)
        _store(listed, at, (token + 1 + i) % VOCAB)
        _store(listed, at + 1, sync.as_bits(LOGPROB - Float32(i)))
    flags = Uint32(0)
    if h % Uint32(BAD) == Uint32(0):
        flags = Uint32(1)
    sync.fence_gpu()
    words = [Uint32(token), sync.as_bits(Float32(LOGPROB)), flags, Uint32(0)]
    sync.st_words(decision_at(k.board, row), words)


def _arrive(k):
    """This CTA has read all that it wants of the descriptor."""
    sync.red_release(_at(k.board, int(Board.BARRIER)), Uint32(1))


@cute.jit
def _wait_for_all(k: cutlass.Constexpr):
    while Int32(sync.ld_acquire(_at(k.board, int(Board.BARRIER)))) % k.c.ctas != 0:
        sync.nap(100)


@cute.jit
def _note_seen(own: Int64, base: Int32, seen: Int32, first: Int32):
    """The drafter is shown positions from `first` on: the base from which the digest holds. What
    begins at 0 is a new text."""
    if first == 0:
        base = Int32(0)
    elif first != seen:
        _put_own(own, Int32(KEYS), HOLE ^ _own(own, Int32(KEYS)))
        base = Int32(0)
    return base


@cute.jit
def _verify(
    k: cutlass.Constexpr, own: Int64, kind: Int32, position: Int32, rows: Int32, token: Int32,
    decides: Int32, h: Uint32, base: Int32,
):  # fmt: skip
    """DECODE and ROWS; token: of the first row. The digest before the rows, and its base."""
    h, base = _catch_up(own, h, base, position)
    first = _digest(h, token, position)
    _put_own(own, Int32(0), first)
    _put_own(own, KEYS + position, token)
    for row in cutlass.range(1, rows, unroll=1):
        parent, place, table = Int32(0), Int32(0), arg(k, Arg.ROW_TABLE) + 4 * ROW_WORDS * row
        if kind == int(Segment.DECODE):
            token = _load(k.board, int(Desc.TOKEN) + row)
            place = _load(k.board, int(Desc.ROW_POSITION) + row)
            up = place - position - 1  # depth of the parent
            path = _load(k.board, int(Desc.PATH) + 2 * row + (up >> 3))
            parent = (path >> (4 * (up & 7))) & 15
        else:
            token = _load(table, int(RowWord.TOKEN))
            place = _load(table, int(RowWord.POSITION))
            parent = _load(table, int(RowWord.PARENT))
        _put_own(own, row, _digest(Uint32(_own(own, parent)), token, place))
        _put_own(own, KEYS + position + row, token)
    if decides != 0:
        _arrive(k)
        if k.bid < rows:
            _wait_for_all(k)
        for row in cutlass.range(k.bid, rows, k.c.ctas, unroll=1):
            _decide(k, Uint32(_own(own, row)), row)
    else:
        _answer(k, first)
    return h, base


@cute.jit
def _move(k: cutlass.Constexpr, own: Int64, first: Int32, context: Int32):
    """Keys of the accepted rows to their places."""
    for i in cutlass.range(context, unroll=1):
        row = _load(k.board, int(Desc.ACCEPTED) + i)
        _put_own(own, KEYS + first + i, _own(own, KEYS + first + row))


@cute.jit
def _grow(k: cutlass.Constexpr, tag: Int32):
    """CTA 0: the tree of the drafter's script."""
    table, script = arg(k, Arg.ROW_TABLE), arg(k, Arg.DRAFT_SCRIPT)
    position = _word(k, Desc.POSITION)
    rows, parent, depth = Int32(0), Int32(-1), Int32(0)
    count, lead, deepest = Int32(1), Int32(0), _word(k, Desc.DEPTH)
    while count > 0:
        following = Int32(-1)
        for i in cutlass.range(count, unroll=1):
            if rows <= _word(k, Desc.BUDGET):
                token = _word(k, Desc.TOKEN)
                at = (position + depth) * SCRIPT_WORDS
                if depth > 0:
                    token = _load(script, at + 2 + i)
                place = rows * ROW_WORDS
                _store(table, place + int(RowWord.TOKEN), token)
                _store(table, place + int(RowWord.POSITION), position + depth)
                _store(table, place + int(RowWord.PARENT), parent)
                _store(table, place + int(RowWord.DEPTH), depth)
                for w in cutlass.range_constexpr(4):
                    bits = Int32(0)
                    if parent >= 0:
                        bits = _load(table, parent * ROW_WORDS + int(RowWord.PATH) + w)
                    if depth >> 2 == w:
                        bits = bits | (rows << (8 * (depth & 3)))
                    _store(table, place + int(RowWord.PATH) + w, bits)
                if i == lead:
                    following = rows
                rows = rows + 1
        parent, depth, count = following, depth + 1, Int32(0)
        if (parent >= 0) & (depth <= deepest):
            count = _load(script, (position + depth) * SCRIPT_WORDS)
            lead = _load(script, (position + depth) * SCRIPT_WORDS + 1)
            if (_word(k, Desc.CHAIN) != 0) & (count > 1):
                count, lead = Int32(1), Int32(0)
    _store(k.board, Int32(int(Board.TREE_ROWS)), rows)
    _stamp(k, Stamp.TREE)
    sync.st_release(_at(k.board, int(Board.TREE_TAG)), tag)


def _stamp(k, which: Stamp):
    at = k.board + 4 * int(Board.STAMP) + 8 * int(which)
    sync.ptx_do("st.relaxed.gpu.global.b64 [{$r0}], {$r1};", at, mapped.now())


@cute.jit
def _stamp_first(k: cutlass.Constexpr, which: cutlass.Constexpr):
    if k.bid == 0:
        _stamp(k, which)


@cute.jit
def _take_prompt(k: cutlass.Constexpr, own: Int64, position: Int32, rows: Int32):
    for i in cutlass.range(rows, unroll=1):
        _put_own(own, KEYS + position + i, _load(arg(k, Arg.TOKENS), position + i))


@cute.jit
def _run_model(k: cutlass.Constexpr, own: Int64, plant: Int64):
    """One thread a CTA."""
    tag = Int32(sync.ld_word(k.board + int(Board.FIRST_TAG) * 4)) + 1
    phase_at = k.board + (int(Board.PHASE) + Int64(k.bid)) * 4
    # between launches the numbers lie in the memory, behind the keys' last place
    kept = own + 4 * (Int64(Int32(arg(k, Arg.SPARE_TOO))) + state_words(0) - 4)
    h, base, seen = Uint32(_own(kept, 0)), _own(kept, 1), _own(kept, 2)
    running = Int32(1)
    while running != 0:
        while sync.ld_acquire(k.board + desc_at(int(Desc.TAG))) != tag:
            sync.nap(200)
        words = [w for i in range(0, 20, 4) for w in sync.ld_words(k.board + desc_at(i))]
        delay, planted = [Int32(w) for w in sync.ld_pair_words(plant)]
        kind, rows, position, token, decides, context = [
            Int32(words[int(field)])
            for field in (
                Desc.KIND, Desc.ROWS, Desc.POSITION, Desc.TOKEN, Desc.DECIDE, Desc.CONTEXT,
            )
        ]  # fmt: skip
        sync.st_word(phase_at, Uint32(1 + PHASE))
        if (planted & 0xFFFF) == k.bid + 1:
            if (kind == planted >> 16) | ((planted >> 16 == 0) & (kind != int(Segment.LEAVE))):
                tries, since = Int32(0), Int64(0)
                while running != 0:
                    tries, since = sync.overdue(tries, since)
        _stamp_first(k, Stamp.GATE)
        is_silent = Int32(1)
        if (kind == int(Segment.DECODE)) | (kind == int(Segment.ROWS)):
            if position == 0:
                base, seen = Int32(0), Int32(0)
            if delay > 0:
                since = mapped.now()
                while mapped.now() - since < delay:
                    sync.nap(100)
            _stamp_first(k, Stamp.HEAD)
            sync.st_word(phase_at, Uint32(0))
            h, base = _verify(k, own, kind, position, rows, token, decides, h, base)
            is_silent = Int32(0)
        elif kind == int(Segment.PROMPT):
            base = _note_seen(own, base, seen, position)
            _take_prompt(k, own, position, rows)
            seen = position + rows
        elif kind == int(Segment.DRAFT):
            base = _note_seen(own, base, seen, position - context)
            _move(k, own, position - context, context)
            seen = position
            for stamp in (Stamp.COMPACTED, Stamp.CONTEXT, Stamp.DRAFTED):
                _stamp_first(k, stamp)
            is_silent = Int32(rows == 0)
        sync.st_word(phase_at, Uint32(0))
        if kind == int(Segment.LEAVE):
            running = Int32(0)
            for i, value in enumerate((h, base, seen)):
                _put_own(kept, i, value)
        if is_silent != 0:
            sync.fence_gpu()
            sync.red_release(k.board + int(Board.DONE) * 4, Uint32(1))
        elif kind == int(Segment.DRAFT):
            _arrive(k)
            if k.bid == 0:
                _wait_for_all(k)
                _grow(k, tag)
        tag = tag + 1


def make_echo(ctas: int):
    """Returns (jit launcher, example arguments, launch geometry)."""

    @cute.kernel
    def kernel(args: Int64):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        k = Core()
        k.c, k.bid, k.lane, k.args = SimpleNamespace(ctas=ctas), bid, tid & 31, args
        k.wid = cute.arch.make_warp_uniform(tid >> 5)
        k.board, k.layers = arg(k, Arg.BOARD), Int32(arg(k, Arg.LAYERS))
        if k.wid == 0:
            if k.lane == 0:
                memory, ctx = arg(k, Arg.SPARE), Int32(arg(k, Arg.SPARE_TOO))
                size = ctx + state_words(0)
                _run_model(k, _at(memory, size * bid), _at(memory, size * ctas))
        elif bid == 0:
            run_service(k)

    kernel.set_name_prefix("md_echo", keep_mangled_name=False, remove_cutlass_symbol=True)

    @cute.jit
    def launch(args: Int64):
        kernel(args).launch(
            grid=(ctas, 1, 1), block=(64, 1, 1), cooperative=True, min_blocks_per_mp=1
        )

    return launch, [Int64(0)], dict(grid=ctas, block=64, smem=0, cluster=1)
