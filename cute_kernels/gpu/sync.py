"""Every access that another CTA, the copy engine or the host can see goes through this module.

Two rules of the compiler (checked by tests/compile) shape it:

- `cute.arch.load/store` with acquire/release semantics do not stop the compiler from merging or
  dropping the plain accesses around them. Everything here is inline PTX, which does.
- ptxas puts no wait between a shared-memory load and a following `mbarrier.arrive`, so a stage can
  be refilled before it was read. `release_after` makes the arrive depend on the loaded registers.

Words as flags. A consumer of activations polls the data words themselves: a word that holds EMPTY
has not been written. A hand-off is then one store and one load, with no counter, no fence and no
barrier in between. The contract:

- a writer publishes each word once, with `st_word`/`st_words`, and never the value EMPTY (as bf16
  pairs and as fp32 that is a NaN no conversion or arithmetic produces);
- a word is valid by itself: readers may assume nothing about other words of the same writer;
- before a word is published again it is set back to EMPTY, after every reader has consumed it and
  with `fence_gpu` between the clearing store and any later word of the clearing CTA from which a
  reader can learn that its next wait may begin.

Deadlines. Every wait in here traps after DEADLINE_NS, the `idle` ones excepted: a persistent kernel
that waits for the wrong thing would otherwise hold the device for ever. The service warp's wait for
a step is shorter (SERVICE_DEADLINE_NS), so that it can still tell who is late.
"""

import enum

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64

from cute_kernels.gpu.ptx import ptx_do, ptx_read
from cute_kernels.gpu.shared import (  # noqa: F401 - beside the rest of what a kernel says
    add_shared,
    lds,
    lds_byte,
    lds_int,
    lds_ints,
    lds_long,
    lds_longs,
    lds_pair,
    lds_quad,
    lds_word,
    lds_words,
    sts,
    sts_int,
    sts_long,
    sts_pair,
    sts_quad,
    sts_words,
)
from cute_kernels.gpu.words import (  # noqa: F401
    any_lane_empty,
    as_bits,
    as_float,
    as_int,
    bits_below,
    choose,
    count_bits,
    lanes_where,
    larger,
    largest,
    least,
    lowest_bit,
    maximum,
    select,
    select_int,
    smaller,
    warp_max,
    warp_reduce,
)

EMPTY = 0xFFFFFFFF
KEEP = 0x14F0000000000000  # L2 policy evict-last: a word must not be in HBM when it is polled
DEADLINE_NS = 4_000_000_000
SERVICE_DEADLINE_NS = 2_000_000_000


class Barrier(enum.IntEnum):
    """Named barriers. 0 is `sync_threads`, which role-specialised code must not use."""

    CONSUMERS = 1
    KEYS = 10  # consumer warp 0 tells the producer: prompt_attention.py, context.tell_keys
    DRAFTING = 11  # the producer tells consumer warp 0: context.draft_begins


# -- counters and flags ------------------------------------------------------------------------
def ld_acquire(addr, scope="gpu"):
    return ptx_read(f"ld.acquire.{scope}.global.b32 {{$w0}}, [{{$r0}}];", [Int32], addr)


def st_release(addr, value, scope="gpu"):
    ptx_do(f"st.release.{scope}.global.b32 [{{$r0}}], {{$r1}};", addr, value)


def red_release(addr, value, scope="gpu"):
    ptx_do(f"red.release.{scope}.global.add.u32 [{{$r0}}], {{$r1}};", addr, value)


def fence_gpu():
    """Orders this thread's earlier global accesses before its later ones, for the whole device."""
    ptx_do("fence.acq_rel.gpu;")


def fence_async():
    """Between plain accesses of global memory and bulk copies of the same bytes: by the writer
    before its release, by the reader after its acquire."""
    ptx_do("fence.proxy.async.global;")


# -- words as flags ----------------------------------------------------------------------------
def ld_words(addr):
    """Four words that other SMs write: read where they meet, at L2."""
    return ptx_read(
        "ld.relaxed.gpu.global.L1::no_allocate.L2::cache_hint.v4.b32"
        " {{$w0},{$w1},{$w2},{$w3}}, [{$r0}], {$r1};",
        [Uint32] * 4,
        addr,
        Uint64(KEEP),
    )


def ld_words_if(ok, addr):
    """The same where ok != 0, else four zeros and no access: rows that a step does not have."""
    return ptx_read(
        "{ .reg .pred q; setp.ne.u32 q, {$r2}, 0; mov.b32 {$w0}, 0; mov.b32 {$w1}, 0;"
        " mov.b32 {$w2}, 0; mov.b32 {$w3}, 0;"
        " @q ld.relaxed.gpu.global.L1::no_allocate.L2::cache_hint.v4.b32"
        " {{$w0},{$w1},{$w2},{$w3}}, [{$r0}], {$r1}; }",
        [Uint32] * 4,
        addr,
        Uint64(KEEP),
        ok,
    )


def ld_fresh_words(addr):
    """Four words that another SM has written before a hand-off that this thread has seen."""
    return ptx_read(
        "ld.relaxed.gpu.global.L1::no_allocate.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];",
        [Uint32] * 4,
        addr,
    )


def ld_fresh_words_if(ok, addr):
    """The same where ok != 0, else four zeros and no access."""
    return ptx_read(
        "{ .reg .pred q; setp.ne.u32 q, {$r1}, 0; mov.b32 {$w0}, 0; mov.b32 {$w1}, 0;"
        " mov.b32 {$w2}, 0; mov.b32 {$w3}, 0;"
        " @q ld.relaxed.gpu.global.L1::no_allocate.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}]; }",
        [Uint32] * 4,
        addr,
        ok,
    )


def ld_constant_words_if(ok, addr):
    """Four words that nobody writes while the kernel runs, or zeros."""
    return ptx_read(
        "{ .reg .pred q; setp.ne.u32 q, {$r1}, 0; mov.b32 {$w0}, 0; mov.b32 {$w1}, 0;"
        " mov.b32 {$w2}, 0; mov.b32 {$w3}, 0;"
        " @q ld.global.nc.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}]; }",
        [Uint32] * 4,
        addr,
        ok,
    )


def ld_constant_words(addr):
    code = "ld.global.nc.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];"
    return ptx_read(code, [Uint32] * 4, addr)


def ld_missing_words(addr, words, worst):
    """`words` (2 or 4), read again only where this lane still misses one (worst == EMPTY): polling
    everything from every SM would take the bandwidth of the weight stream."""
    n = len(words)
    keep = " ".join(f"mov.b32 {{$w{i}}}, {{$r{i + 1}}};" for i in range(n))
    out = ",".join(f"{{$w{i}}}" for i in range(n))
    worst_at, policy_at = "{$r" + str(n + 1) + "}", "{$r" + str(n + 2) + "}"
    return ptx_read(
        "{ .reg .pred q; setp.eq.u32 q, " + worst_at + ", 0xffffffff; " + keep
        + f" @q ld.relaxed.gpu.global.L1::no_allocate.L2::cache_hint.v{n}.b32"
        " {" + out + "}, [{$r0}], " + policy_at + "; }",
        [Uint32] * n,
        addr,
        *words,
        worst,
        Uint64(KEEP),
    )  # fmt: skip


def ld_word(addr):
    return ptx_read("ld.relaxed.gpu.global.L1::no_allocate.b32 {$w0}, [{$r0}];", [Uint32], addr)


def ld_pair_words(addr):
    code = (
        "ld.relaxed.gpu.global.L1::no_allocate.L2::cache_hint.v2.b32 {{$w0},{$w1}}, [{$r0}], {$r1};"
    )
    return ptx_read(code, [Uint32] * 2, addr, Uint64(KEEP))


def ld_pair_words_if(ok, addr):
    code = (
        "{ .reg .pred q; setp.ne.u32 q, {$r2}, 0; mov.b32 {$w0}, 0; mov.b32 {$w1}, 0;"
        " @q ld.relaxed.gpu.global.L1::no_allocate.L2::cache_hint.v2.b32"
        " {{$w0},{$w1}}, [{$r0}], {$r1}; }"
    )
    return ptx_read(code, [Uint32] * 2, addr, Uint64(KEEP), ok)


def ld_floats_if(ok, addr, other):
    """Four fp32 that other SMs have written, where they meet, or four times the constant `other`.
    Without a hint to keep the line: whole rows of logits are read like that."""
    fill = "".join(f"mov.f32 {{$w{i}}}, {{$r2}}; " for i in range(4))
    return ptx_read(
        "{ .reg .pred q; setp.ne.u32 q, {$r1}, 0; " + fill
        + "@q ld.relaxed.gpu.global.L1::no_allocate.v4.f32"
        " {{$w0},{$w1},{$w2},{$w3}}, [{$r0}]; }",
        [Float32] * 4,
        addr,
        ok,
        Float32(other),
    )  # fmt: skip


def ld_float(addr):
    return ptx_read("ld.relaxed.gpu.global.L1::no_allocate.f32 {$w0}, [{$r0}];", [Float32], addr)


def st_word(addr, value):
    code = "st.relaxed.gpu.global.L2::cache_hint.b32 [{$r0}], {$r1}, {$r2};"
    ptx_do(code, addr, value, Uint64(KEEP))


def st_words(addr, values):
    """2 or 4 words in one store; each is a flag of its own."""
    n = len(values)
    names = ",".join(f"{{$r{i + 1}}}" for i in range(n))
    kind = f"st.relaxed.gpu.global.L2::cache_hint.v{n}.b32 "
    code = kind + "[{$r0}], {" + names + "}, {$r" + str(n + 1) + "};"
    ptx_do(code, addr, *values, Uint64(KEEP))


# -- deadlines ---------------------------------------------------------------------------------
def trap():
    ptx_do("trap;")


@cute.jit
def overdue(tries: Int32, since: Int64):
    """Call once per turn of a waiting loop with (0, 0) at first; traps at the deadline."""
    tries = tries + 1
    if (tries & 255) == 0:
        now = cute.arch.globaltimer()
        if since == 0:
            since = now
        if now - since > DEADLINE_NS:
            trap()
    return tries, since


def nap(ns):
    ptx_do("nanosleep.u32 {$r0};", Int32(ns))


@cute.jit
def wait_tag(addr: Int64, tag: Int32):
    """Between steps, without a deadline: until the word is `tag`. Whole warps; naps when long."""
    seen, tries = ld_acquire(addr), Int32(0)
    while seen != tag:
        if tries > 400:
            nap(500)
        tries = tries + 1
        seen = ld_acquire(addr)


@cute.jit
def wait_counter(addr: Int64, target: Int32):
    """One thread: until the counter has reached `target` (signed distance, so it may wrap)."""
    seen = ld_acquire(addr)
    tries, since = Int32(0), Int64(0)
    while seen - target < 0:
        seen = ld_acquire(addr)
        tries, since = overdue(tries, since)


# -- shared-memory barriers --------------------------------------------------------------------
def try_parity(bar, parity):
    """1 if the phase of `bar` with that parity is complete; may suspend the thread a while."""
    return ptx_read(
        "{ .reg .pred q; mbarrier.try_wait.parity.shared::cta.b64 q, [{$r0}], {$r1};"
        " selp.u32 {$w0}, 1, 0, q; }",
        [Int32],
        bar,
        parity,
    )


def test_parity(bar, parity):
    return ptx_read(
        "{ .reg .pred q; mbarrier.test_wait.parity.shared::cta.b64 q, [{$r0}], {$r1};"
        " selp.u32 {$w0}, 1, 0, q; }",
        [Int32],
        bar,
        parity,
    )


@cute.jit
def wait_parity(bar: Int32, parity: Int32):
    done = try_parity(bar, parity)
    tries, since = Int32(0), Int64(0)
    while done == 0:
        done = try_parity(bar, parity)
        tries, since = overdue(tries, since)


@cute.jit
def wait_parity_idle(bar: Int32, parity: Int32):
    """Between steps, without a deadline."""
    done, tries = try_parity(bar, parity), Int32(0)
    while done == 0:
        if tries > 400:
            nap(500)
        tries = tries + 1
        done = try_parity(bar, parity)


def init_barrier(bar, count):
    ptx_do("mbarrier.init.shared::cta.b64 [{$r0}], {$r1};", bar, Int32(count))


def fence_barrier_init():
    ptx_do("fence.mbarrier_init.release.cluster;")


def arrive(bar):
    ptx_do("mbarrier.arrive.shared::cta.b64 _, [{$r0}];", bar)


def expect(bar, n_bytes):
    ptx_do("mbarrier.arrive.expect_tx.shared::cta.b64 _, [{$r0}], {$r1};", bar, n_bytes)


def release_after(bar, loaded, zero):
    """Arrive on `bar`, not before every register in `loaded` holds its value.

    zero: a run-time zero the compiler cannot see through (else it folds the dependence away).
    """
    if loaded:
        seen = loaded[0]
        for v in loaded[1:]:
            seen = seen | v
        bar = bar + Int32(seen & zero)
    arrive(bar)


# -- dependent launch --------------------------------------------------------------------------
def let_dependents_start():
    ptx_do("griddepcontrol.launch_dependents;")


def wait_for_prerequisites():
    """Until the kernels before this one have ended and their writes are visible."""
    ptx_do("griddepcontrol.wait;")


# -- named barriers ----------------------------------------------------------------------------
def consumer_sync(threads):
    cute.arch.barrier(barrier_id=int(Barrier.CONSUMERS), number_of_threads=threads)
