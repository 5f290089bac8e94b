"""Shared memory by address, in program order with everything else that is PTX."""

from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.gpu.ptx import ptx_do, ptx_read


def lds_words(addr):
    return ptx_read("ld.shared.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];", [Uint32] * 4, addr)


def lds_word(addr):
    return ptx_read("ld.shared.b32 {$w0}, [{$r0}];", [Uint32], addr)


def lds_int(addr):
    return ptx_read("ld.shared.b32 {$w0}, [{$r0}];", [Int32], addr)


def lds_byte(addr):
    return ptx_read("ld.shared.u8 {$w0}, [{$r0}];", [Int32], addr)


def lds_ints(addr):
    return ptx_read("ld.shared.v4.b32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];", [Int32] * 4, addr)


def lds_quad(addr):
    return ptx_read("ld.shared.v4.f32 {{$w0},{$w1},{$w2},{$w3}}, [{$r0}];", [Float32] * 4, addr)


def lds_pair(addr):
    return ptx_read("ld.shared.v2.f32 {{$w0},{$w1}}, [{$r0}];", [Float32] * 2, addr)


def lds(addr):
    return ptx_read("ld.shared.f32 {$w0}, [{$r0}];", [Float32], addr)


def lds_long(addr):
    return ptx_read("ld.shared.b64 {$w0}, [{$r0}];", [Int64], addr)


def lds_longs(addr):
    return ptx_read("ld.shared.v2.b64 {{$w0},{$w1}}, [{$r0}];", [Int64] * 2, addr)


def sts_words(addr, v):
    ptx_do("st.shared.v4.b32 [{$r0}], {{$r1},{$r2},{$r3},{$r4}};", addr, *v)


def sts_quad(addr, v):
    ptx_do("st.shared.v4.f32 [{$r0}], {{$r1},{$r2},{$r3},{$r4}};", addr, *v)


def sts_pair(addr, v0, v1):
    ptx_do("st.shared.v2.f32 [{$r0}], {{$r1},{$r2}};", addr, v0, v1)


def sts(addr, v):
    ptx_do("st.shared.f32 [{$r0}], {$r1};", addr, v)


def sts_int(addr, v):
    ptx_do("st.shared.b32 [{$r0}], {$r1};", addr, v)


def sts_long(addr, v):
    ptx_do("st.shared.b64 [{$r0}], {$r1};", addr, v)


def add_shared(addr, v):
    """Atomically; what was there before."""
    return ptx_read("atom.shared.add.u32 {$w0}, [{$r0}], {$r1};", [Int32], addr, v)
