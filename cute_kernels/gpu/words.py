"""Words in registers: other views of them, choices without a branch, and what a warp makes of its
lanes' words."""

from cutlass import Float32, Int32, Uint32

from cute_kernels.gpu.ptx import ptx_read


def as_bits(v):
    return ptx_read("mov.b32 {$w0}, {$r0};", [Uint32], v)


def as_float(v):
    return ptx_read("mov.b32 {$w0}, {$r0};", [Float32], v)


def as_int(v):
    return ptx_read("mov.b32 {$w0}, {$r0};", [Int32], v)


def select(condition, a, b):
    """a if condition else b, without a branch."""
    return ptx_read(
        "{ .reg .pred q; setp.ne.u32 q, {$r0}, 0; selp.b32 {$w0}, {$r1}, {$r2}, q; }",
        [Uint32],
        Int32(condition),
        a,
        b,
    )


def select_int(condition, a, b):
    """The same for signed integers."""
    return as_int(select(condition, Uint32(a), Uint32(b)))


def choose(condition, a, b):
    """The same for fp32."""
    return ptx_read(
        "{ .reg .pred q; setp.ne.u32 q, {$r0}, 0; selp.f32 {$w0}, {$r1}, {$r2}, q; }",
        [Float32],
        Int32(condition),
        Float32(a),
        Float32(b),
    )


def larger(a, b):
    """Unsigned. `cutlass.max` of a Uint32 literal and a register compiles to the signed maximum,
    in which EMPTY is the smallest word of all."""
    return ptx_read("max.u32 {$w0}, {$r0}, {$r1};", [Uint32], a, b)


def smaller(a, b):
    """Unsigned, likewise."""
    return ptx_read("min.u32 {$w0}, {$r0}, {$r1};", [Uint32], a, b)


def maximum(values):
    """Of fp32 values, as a tree; `cutlass.max` takes a comparison and a selection each."""
    while len(values) > 1:
        code = "max.f32 {$w0}, {$r0}, {$r1};"
        pairs = zip(values[::2], values[1::2], strict=False)
        odd = values[len(values) // 2 * 2 :]
        values = [ptx_read(code, [Float32], a, b) for a, b in pairs] + odd
    return values[0]


def least(a, b):
    return ptx_read("min.f32 {$w0}, {$r0}, {$r1};", [Float32], a, b)


def largest(words):
    """EMPTY if any of the words is."""
    worst = words[0]
    for w in words[1:]:
        worst = larger(worst, w)
    return worst


# -- whole warps -------------------------------------------------------------------------------
def warp_max(v):
    """The maximum of the warp's fp32 values, of which none is NaN, in all lanes. Order of signed
    integers is theirs where those of negative ones are turned round."""
    most = ptx_read(
        "{ .reg .b32 s; shr.s32 s, {$r0}, 31; and.b32 s, s, 0x7fffffff; xor.b32 s, s, {$r0};"
        " redux.sync.max.s32 {$w0}, s, 0xffffffff;"
        " shr.s32 s, {$w0}, 31; and.b32 s, s, 0x7fffffff; xor.b32 {$w0}, s, {$w0}; }",
        [Int32],
        as_int(v),
    )
    return as_float(most)


def any_lane_empty(worst):
    """Warp-uniform: 1 if any lane's `worst` is EMPTY."""
    return ptx_read(
        "{ .reg .pred q; setp.eq.u32 q, {$r0}, 0xffffffff;"
        " vote.sync.any.pred q, q, 0xffffffff; selp.u32 {$w0}, 1, 0, q; }",
        [Uint32],
        worst,
    )


def warp_reduce(op, v):
    """op: add, min, max or or, of unsigned words; the result in every lane."""
    kind = "b32" if op == "or" else "u32"
    return ptx_read(f"redux.sync.{op}.{kind} {{$w0}}, {{$r0}}, 0xffffffff;", [Uint32], v)


def lanes_where(condition):
    """A bit for every lane in which the condition holds."""
    return ptx_read(
        "{ .reg .pred q; setp.ne.u32 q, {$r0}, 0; vote.sync.ballot.b32 {$w0}, q, 0xffffffff; }",
        [Uint32],
        Int32(condition),
    )


def count_bits(word):
    return ptx_read("popc.b32 {$w0}, {$r0};", [Int32], word)


def bits_below(lane):
    """A word with the bits of lower lanes."""
    return ptx_read("{ .reg .b32 b; shl.b32 b, 1, {$r0}; sub.u32 {$w0}, b, 1; }", [Uint32], lane)


def lowest_bit(word):
    """Its place; the word is not 0."""
    return ptx_read("{ .reg .b32 r; brev.b32 r, {$r0}; clz.b32 {$w0}, r; }", [Int32], word)
