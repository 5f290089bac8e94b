"""The part of `sync` that reaches memory of the host, mapped into the device.

Only the service warp uses it: 132 CTAs that poll across PCIe take a hundred times as long as one.
Loads and stores are of system scope. What several lanes fetch in one instruction crosses the bus
together, so addresses are spread over lanes and values handed round by shuffles. Words are int64,
entries are described by the numpy dtypes of `host.wire` and taken apart at trace time.
"""

import cutlass.cute as cute
import numpy as np
from cutlass import Int32, Int64, Uint32

from cute_kernels.gpu.sync import ptx_do, ptx_read


def ld_acquire(addr, wanted):
    """One int64 by every lane whose `wanted` is not 0; the others get 0."""
    return ptx_read(
        "{ .reg .pred q; setp.ne.u32 q, {$r1}, 0; mov.b64 {$w0}, 0;"
        " @q ld.acquire.sys.global.b64 {$w0}, [{$r0}]; }",
        [Int64],
        addr,
        wanted,
    )


def ld_word(addr):
    return ptx_read("ld.relaxed.sys.global.b64 {$w0}, [{$r0}];", [Int64], addr)


def ld_int(addr):
    return ptx_read("ld.relaxed.sys.global.b32 {$w0}, [{$r0}];", [Int32], addr)


def ld_words(addr):
    """Four 32-bit words."""
    code = "ld.relaxed.sys.global.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];"
    return ptx_read(code, [Uint32] * 4, addr)


def st_word(addr, value):
    ptx_do("st.relaxed.sys.global.b64 [{$r0}], {$r1};", addr, value)


def st_pair(addr, first, second):
    ptx_do("st.relaxed.sys.global.v2.b64 [{$r0}], {{$r1},{$r2}};", addr, first, second)


def st_release(addr, value):
    ptx_do("st.release.sys.global.b64 [{$r0}], {$r1};", addr, value)


def fence():
    """Stores before loads included, for host and device: both halves of the parking handshake."""
    ptx_do("fence.sc.sys;")


def ld_gpu(addr):
    """A word that another SM has written."""
    return ptx_read("ld.relaxed.gpu.global.b64 {$w0}, [{$r0}];", [Int64], addr)


# -- device memory that only this warp touches -------------------------------------------------
def ld_own(addr):
    return ptx_read("ld.global.b64 {$w0}, [{$r0}];", [Int64], addr)


def ld_own_int(addr):
    return ptx_read("ld.global.b32 {$w0}, [{$r0}];", [Int32], addr)


def st_own(addr, value):
    ptx_do("st.global.b64 [{$r0}], {$r1};", addr, value)


def st_own_int(addr, value):
    ptx_do("st.global.b32 [{$r0}], {$r1};", addr, value)


def st_own_words(addr, words):
    ptx_do("st.global.v4.b32 [{$r0}], {{$r1},{$r2},{$r3},{$r4}};", addr, *words)


# -- the warp ----------------------------------------------------------------------------------
def from_lane(value, lane: int):
    """An int64 of one lane, for all."""
    return ptx_read(
        "{ .reg .b32 lo, hi; mov.b64 {lo, hi}, {$r0};"
        " shfl.sync.idx.b32 lo, lo, {$r1}, 31, 0xffffffff;"
        " shfl.sync.idx.b32 hi, hi, {$r1}, 31, 0xffffffff; mov.b64 {$w0}, {lo, hi}; }",
        [Int64],
        value,
        Int32(lane),
    )


def ballot(condition):
    """A bit a lane."""
    return ptx_read(
        "{ .reg .pred q; setp.ne.u32 q, {$r0}, 0; vote.sync.ballot.b32 {$w0}, q, 0xffffffff; }",
        [Uint32],
        Int32(condition),
    )


def match(value):
    """A bit for every lane that has this lane's value."""
    code = "match.any.sync.b32 {$w0}, {$r0}, 0xffffffff;"
    return ptx_read(code, [Uint32], Int32(value))


def first_lane(lanes):
    """The lowest lane in a mask that is not empty."""
    code = "{ .reg .b32 t; brev.b32 t, {$r0}; clz.b32 {$w0}, t; }"
    return ptx_read(code, [Int32], lanes)


def last_lane(lanes):
    """The highest lane in a mask that is not empty."""
    return ptx_read("{ .reg .b32 t; clz.b32 t, {$r0}; sub.s32 {$w0}, 31, t; }", [Int32], lanes)


def sum_lanes(value):
    """Of all lanes, in every lane."""
    code = "redux.sync.add.s32 {$w0}, {$r0}, 0xffffffff;"
    return ptx_read(code, [Int32], Int32(value))


def select(condition, a, b):
    """a if condition else b, int64, without a branch."""
    code = "{ .reg .pred q; setp.ne.u32 q, {$r0}, 0; selp.b64 {$w0}, {$r1}, {$r2}, q; }"
    return ptx_read(code, [Int64], Int32(condition), a, b)


# -- entries -----------------------------------------------------------------------------------
def _place(dtype: np.dtype, name: str) -> tuple[int, int, int]:
    """(byte offset, bytes of an element, elements) of a field."""
    fields = dtype.fields
    assert fields is not None
    kind, offset = fields[name][:2]
    return offset, kind.base.itemsize, kind.itemsize // kind.base.itemsize


def field(words, dtype: np.dtype, name: str):
    """A field of an entry that was loaded as int64 words."""
    offset, size, n = _place(dtype, name)
    assert n == 1 and size in (4, 8)
    word = words[offset // 8]
    if size == 8:
        return word
    return Int32(word >> (offset % 8 * 8))


def ld_own_field(addr, dtype: np.dtype, name: str):
    """A field of an entry in device memory that only this warp touches."""
    offset, size, n = _place(dtype, name)
    assert n == 1 and size in (4, 8)
    return ld_own(addr + offset) if size == 8 else ld_own_int(addr + offset)


def entry_words(dtype: np.dtype, **values):
    """An entry as int64 words, its sequence word 0. Values are Int64, or Int32 for what is
    smaller (fp32 as its bits), a list for an array; what is not named is 0."""
    words: list = [Int64(0)] * (dtype.itemsize // 8)
    for name, value in values.items():
        offset, size, n = _place(dtype, name)
        for i, v in enumerate(value if isinstance(value, list) else [value]):
            assert i < n
            at = offset + i * size
            if size < 8:
                v = (Int64(v) & Int64((1 << 8 * size) - 1)) << (at % 8 * 8)
            words[at // 8] = words[at // 8] | v
    return words


def now():
    return Int64(cute.arch.globaltimer())
