"""The service warp around a model that costs nothing: what the tests of the wire run on a device.

Every CTA keeps a digest of the tokens and positions it was shown; a token is a function of it, so a
prompt token that is missing, stale or out of place changes everything that follows. Logits tie on
purpose, and a digest of BAD is a NaN. Arguments: the kernel's table; DIGEST (uint32 [ctas]) and
PLANT (int32: 1 + the CTA that is to hang; 0: none) are read from its spare places.
"""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.gpu import sync
from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.board import Board, Desc, Segment, desc_at, result_at
from cute_kernels.gpu.core import Core, arg
from cute_kernels.gpu.echo_rules import BAD, PHASE, SUM, VOCAB
from cute_kernels.gpu.service import run_service


def _word(k, field):
    return Int32(sync.ld_word(k.board + desc_at(int(field))))


@cute.jit
def _digest(h: Uint32, token: Int32, position: Int32):
    if position == 0:
        h = Uint32(0)
    return h * Uint32(31) + Uint32(token) + Uint32(7) * Uint32(position)


@cute.jit
def _answer(k: cutlass.Constexpr, h: Uint32):
    """This CTA's share of the logits: two CTAs tie, the others are one lower."""
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
def _run_model(k: cutlass.Constexpr, digest: Int64, plant: Int64, tokens: Int64):
    """One thread a CTA."""
    tag = Int32(sync.ld_word(k.board + int(Board.FIRST_TAG) * 4)) + 1
    phase_at = k.board + (int(Board.PHASE) + Int64(k.bid)) * 4
    h = Uint32(sync.ld_word(digest))
    running = Int32(1)
    while running != 0:
        while sync.ld_acquire(k.board + desc_at(int(Desc.TAG))) != tag:
            sync.ptx_do("nanosleep.u32 {$r0};", Int32(200))
        kind, position = _word(k, Desc.KIND), _word(k, Desc.POSITION)
        sync.st_word(phase_at, Uint32(1 + PHASE))
        if kind == int(Segment.DECODE):
            h = _digest(h, _word(k, Desc.TOKEN), position)
        if kind == int(Segment.PROMPT):
            for i in cutlass.range(_word(k, Desc.ROWS), unroll=1):
                at = tokens + 4 * Int64(position + i)
                h = _digest(h, Int32(sync.ld_word(at)), position + i)
        if Int32(sync.ld_word(plant)) == k.bid + 1:
            if kind != int(Segment.LEAVE):
                tries, since = Int32(0), Int64(0)
                while running != 0:
                    tries, since = sync.overdue(tries, since)
        sync.st_word(digest, h)
        sync.st_word(phase_at, Uint32(0))
        if kind == int(Segment.DECODE):
            _answer(k, h)
        else:
            sync.red_release(k.board + int(Board.DONE) * 4, Uint32(1))
        if kind == int(Segment.LEAVE):
            running = Int32(0)
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
                own = arg(k, Arg.SPARE) + 4 * Int64(bid)
                _run_model(k, own, arg(k, Arg.SPARE) + 4 * ctas, arg(k, Arg.TOKENS))
        elif bid == 0:
            run_service(k)

    kernel.set_name_prefix("md_echo", keep_mangled_name=False, remove_cutlass_symbol=True)

    @cute.jit
    def launch(args: Int64):
        kernel(args).launch(
            grid=(ctas, 1, 1), block=(64, 1, 1), cooperative=True, min_blocks_per_mp=1
        )

    return launch, [Int64(0)], dict(grid=ctas, block=64, smem=0, cluster=1)
