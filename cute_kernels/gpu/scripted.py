"""A service warp that runs a list of steps from device memory: for tests and timings.

The script is an array of descriptors (board.Desc words, int32 [steps, SCRIPT_WORDS]). Word TAG is
not a tag there but flags: FREE takes the step's first token from the result of the DECODE step
before it (free running); otherwise tokens are as given (teacher forcing). After the script all CTAs
leave. For every row of every DECODE step a record is written: RECORD below.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.gpu import head, sync
from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.board import Board, Desc, Segment
from cute_kernels.gpu.core import arg
from cute_kernels.gpu.script import FREE, RECORD, SCRIPT_WORDS
from cute_kernels.gpu.sync import ptx_read


def board_word(k, word):
    return k.board + Int64(int(word) * 4)


@cute.jit
def publish(k: cutlass.Constexpr, entry: Int64, tag: Int32, token: Int32):
    """A descriptor of the script onto the board, its tag last."""
    flags = ptx_read("ld.global.b32 {$w0}, [{$r0}];", [Int32], entry)
    word = k.lane
    while word < SCRIPT_WORDS:
        value = ptx_read("ld.global.b32 {$w0}, [{$r0}];", [Uint32], entry + Int64(word * 4))
        if word == int(Desc.TOKEN):
            if (flags & FREE) != 0:
                value = Uint32(token)
        if word != int(Desc.TAG):
            sync.st_word(k.board + Int64((int(Board.DESC) + word) * 4), value)
        word = word + 32
    sync.fence_gpu()
    cute.arch.sync_warp()
    if k.lane == 0:
        sync.st_release(board_word(k, int(Board.DESC) + int(Desc.TAG)), tag)
    cute.arch.sync_warp()


@cute.jit
def wait_results(k: cutlass.Constexpr, words: cute.Tensor, row: Int32):
    tries, since = Int32(0), Int64(0)
    while sync.any_lane_empty(head.ask_results(k, words, row)) != 0:
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
def run_service(k: cutlass.Constexpr):
    """The whole life of the service warp."""
    script, out = arg(k, Arg.SCRIPT), arg(k, Arg.SCRIPT_OUT)
    steps = Int32(arg(k, Arg.SCRIPT_STEPS))
    tag = sync.ld_acquire(board_word(k, Board.FIRST_TAG))
    done = sync.ld_acquire(board_word(k, Board.DONE))
    words, token = head.result_words(k), Int32(0)
    for i in cutlass.range(steps, unroll=1):
        entry = script + Int64(i * (SCRIPT_WORDS * 4))
        kind = ptx_read("ld.global.b32 {$w0}, [{$r0}];", [Int32], entry + int(Desc.KIND) * 4)
        rows = ptx_read("ld.global.b32 {$w0}, [{$r0}];", [Int32], entry + int(Desc.ROWS) * 4)
        tag = tag + 1
        publish(k, entry, tag, token)
        if kind == int(Segment.DECODE):
            for row in cutlass.range(rows, unroll=1):
                wait_results(k, words, row)
                logit, best, log_sum, flags = head.merge_results(k, words)
                if row == 0:
                    token = best
                at = out + Int64(i * 16 + row) * RECORD.itemsize
                record(k, at, best, logit, -log_sum, flags)
            sync.fence_gpu()
            head.clear_results(k, rows)
        else:
            done = done + k.c.ctas
            sync.wait_counter(board_word(k, Board.DONE), done)
    if k.lane == 0:
        sync.st_word(board_word(k, int(Board.DESC) + int(Desc.KIND)), Uint32(int(Segment.LEAVE)))
    cute.arch.sync_warp()
    sync.fence_gpu()
    if k.lane == 0:
        sync.st_release(board_word(k, int(Board.DESC) + int(Desc.TAG)), tag + 1)
    sync.wait_counter(board_word(k, Board.DONE), done + k.c.ctas)
    if k.lane == 0:
        sync.st_word(board_word(k, Board.FIRST_TAG), Uint32(tag + 1))
