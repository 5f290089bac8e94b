"""A service warp that runs a list of steps from device memory: for tests and timings.

The script is an array of descriptors (board.Desc words, int32 [steps, SCRIPT_WORDS]). Word TAG is
not a tag there but flags: FREE takes the step's first token from the result of the step before it
(free running; otherwise tokens are as given: teacher forcing), TREE its rows from ROW_TABLE. After
the script all CTAs leave. For every row that has results a record is written: script.RECORD.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.gpu import head, sync
from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.board import FEW_ROWS, MAX_ROWS, Board, Decision, Desc, Segment, desc_at
from cute_kernels.gpu.core import arg
from cute_kernels.gpu.descriptor import ask_decision, clear_decision, put_rows, put_tag
from cute_kernels.gpu.script import FREE, RECORD, SCRIPT_WORDS, TREE
from cute_kernels.gpu.sync import ptx_read


def board_word(k, word):
    return k.board + Int64(int(word) * 4)


def script_word(entry, field):
    return ptx_read("ld.global.b32 {$w0}, [{$r0}];", [Int32], entry + 4 * int(field))


@cute.jit
def publish(k: cutlass.Constexpr, entry: Int64, tag: Int32, token: Int32):
    """A descriptor of the script onto the board, its tag last; the step's (kind, rows)."""
    flags, kind = script_word(entry, Desc.TAG), script_word(entry, Desc.KIND)
    rows = script_word(entry, Desc.ROWS)
    is_tree = Int32((flags & TREE) != 0)
    if is_tree != 0:
        rows = Int32(sync.ld_word(board_word(k, Board.TREE_ROWS)))
        kind = Int32(int(Segment.DECODE))
        if rows > FEW_ROWS:
            kind = Int32(int(Segment.ROWS))
    word = k.lane
    while word < SCRIPT_WORDS:
        value = ptx_read("ld.global.b32 {$w0}, [{$r0}];", [Uint32], entry + Int64(word * 4))
        if word == int(Desc.KIND):
            value = Uint32(kind)
        if word == int(Desc.ROWS):
            value = Uint32(rows)
        if word == int(Desc.TOKEN):
            if (flags & FREE) != 0:
                value = Uint32(token)
        if word != int(Desc.TAG):
            sync.st_word(k.board + Int64((int(Board.DESC) + word) * 4), value)
        word = word + 32
    cute.arch.sync_warp()
    if is_tree != 0:
        put_rows(k.board, arg(k, Arg.ROW_TABLE), rows, k.lane)
    put_tag(k.board, tag, k.lane)
    return kind, rows


@cute.jit
def wait_results(k: cutlass.Constexpr, words: cute.Tensor, row: Int32):
    tries, since = Int32(0), Int64(0)
    while sync.any_lane_empty(head.ask_results(k, words, row)) != 0:
        tries, since = sync.overdue(tries, since)


@cute.jit
def wait_word(addr: Int64, wanted: Int32):
    tries, since = Int32(0), Int64(0)
    while sync.ld_acquire(addr) != wanted:
        tries, since = sync.overdue(tries, since)


@cute.jit
def record(k: cutlass.Constexpr, at: Int64, token: Int32, logit: cutlass.Float32,
           log_prob: cutlass.Float32, flags: Int32):  # fmt: skip
    if k.lane == 0:
        now = Int64(cute.arch.globaltimer())
        code = "st.global.v4.b32 [{$r0}], {{$r1},{$r2},{$r3},{$r4}};"
        bits = [sync.as_bits(v) for v in (token, logit, log_prob, flags)]
        sync.ptx_do(code, at, *bits)
        sync.ptx_do("st.global.b64 [{$r0}], {$r1};", at + 16, now)


@cute.jit
def merge_rows(k: cutlass.Constexpr, words: cute.Tensor, out: Int64, rows: Int32):
    """The results of all rows of a step that does not decide; the token of row 0."""
    token = Int32(0)
    for row in cutlass.range(rows, unroll=1):
        wait_results(k, words, row)
        logit, best, log_sum, flags = head.merge_results(k, words)
        if row == 0:
            token = best
        record(k, out + Int64(row) * RECORD.itemsize, best, logit, -log_sum, flags)
    sync.fence_gpu()
    head.clear_results(k, rows)
    return token


@cute.jit
def take_decisions(k: cutlass.Constexpr, out: Int64, rows: Int32):
    """The decisions of all rows, set back to EMPTY; the token of row 0."""
    token = Int32(0)
    for row in cutlass.range(rows, unroll=1):
        words, worst = ask_decision(k.board, row)
        tries, since = Int32(0), Int64(0)
        while worst == sync.EMPTY:
            words, worst = ask_decision(k.board, row)
            tries, since = sync.overdue(tries, since)
        words = [sync.as_int(w) for w in words]
        if row == 0:
            token = words[int(Decision.TOKEN)]
        record(
            k, out + Int64(row) * RECORD.itemsize, words[int(Decision.TOKEN)],
            Float32(float("nan")), sync.as_float(words[int(Decision.LOGPROB)]),
            words[int(Decision.FLAGS)],
        )  # fmt: skip
        cute.arch.sync_warp()
        if k.lane == 0:
            clear_decision(k.board, row)
    return token


@cute.jit
def run_service(k: cutlass.Constexpr):
    """The whole life of the service warp."""
    script, out = arg(k, Arg.SCRIPT), arg(k, Arg.SCRIPT_OUT)
    steps = Int32(arg(k, Arg.SCRIPT_STEPS))
    tag = sync.ld_acquire(board_word(k, Board.FIRST_TAG))
    done = sync.ld_acquire(board_word(k, Board.DONE))
    words, token = head.result_words(k), Int32(0)
    for i in cutlass.range(steps, unroll=1):
        entry = script + Int64(i * (SCRIPT_WORDS * 4))
        at = out + Int64(i) * (MAX_ROWS * RECORD.itemsize)
        tag = tag + 1
        kind, rows = publish(k, entry, tag, token)
        has_results = Int32((kind == int(Segment.DECODE)) | (kind == int(Segment.ROWS)))
        if has_results != 0:
            if script_word(entry, Desc.DECIDE) != 0:
                token = take_decisions(k, at, rows)
            else:
                token = merge_rows(k, words, at, rows)
        elif (kind == int(Segment.DRAFT)) & (rows > 0):
            wait_word(board_word(k, Board.TREE_TAG), tag)
            tree_rows, zero = Int32(sync.ld_word(board_word(k, Board.TREE_ROWS))), Float32(0)
            record(k, at, tree_rows, zero, zero, Int32(0))
        else:
            done = done + k.c.ctas
            sync.wait_counter(board_word(k, Board.DONE), done)
    if k.lane == 0:
        sync.st_word(k.board + desc_at(int(Desc.KIND)), Uint32(int(Segment.LEAVE)))
    cute.arch.sync_warp()
    put_tag(k.board, tag + 1, k.lane)
    sync.wait_counter(board_word(k, Board.DONE), done + k.c.ctas)
    if k.lane == 0:
        sync.st_word(board_word(k, Board.FIRST_TAG), Uint32(tag + 1))
