"""The one matrix micro-kernel of the CPU device, written as LLVM vector code.

`pair_gemm` multiplies up to `ROW_TILES[0]` rows by a *pair* of 16-column tiles. Each output is one
float32 accumulator, k ascending, one fused multiply-add a step, whatever the number of rows: that
is why a row's bits never depend on its neighbours. Strides are run-time values, so the same code
serves packed weights, packed key pages and row-major value pages.

The vectors are 16 floats wide in the IR; LLVM makes one AVX-512 register of each, two AVX2 ones or
four NEON ones. The number of rows per tile is chosen so that the accumulators stay in registers.
"""

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

from host.jit import jit

LANES = 16
"""Columns of a tile: floats in one vector of the IR."""

PAIR = 2 * LANES
"""Columns of a pair of tiles: what one `pair_gemm` call produces for each row."""

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32 = ir.FloatType()
VEC = ir.VectorType(F32, LANES)

# Few rows need several steps in flight. With many, LLVM would gather the loads of all unrolled
# steps first and spill; there one step is long enough to hide the loop.
_UNROLL, _UNROLLED_ROWS = 4, 4


def _has_avx512() -> bool:
    """Whether numba compiles for AVX-512 here."""
    chosen = config.CPU_FEATURES  # set by the user; otherwise the host's
    if chosen is not None:
        return "+avx512f" in chosen
    return bool(llvm.get_host_cpu_features().get("avx512f"))


# AVX-512: 32 registers hold 24 accumulators. AVX2 (16 registers of half a vector) and NEON (32 of a
# quarter) hold 6 rows of one tile, so there a pair is two passes.
WIDE_ROW_TILES, NARROW_ROW_TILES = (12, 8, 7, 6, 4, 3, 2, 1), (6, 4, 3, 2, 1)
ROW_TILES = WIDE_ROW_TILES if _has_avx512() else NARROW_ROW_TILES
_TILES_AT_ONCE = 2 if ROW_TILES is WIDE_ROW_TILES else 1


@intrinsic
def pointer(typingctx, arr, offset):
    """Address of element `offset` (flat, not checked) of a C-contiguous array."""

    def codegen(context, builder, signature, args):
        array = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.gep(array.data, [context.cast(builder, args[1], offset, types.int64)])

    return types.CPointer(arr.dtype)(arr, offset), codegen


@intrinsic
def advance(typingctx, ptr, elements):
    """`ptr` moved on by `elements`."""

    def codegen(context, builder, signature, args):
        return builder.gep(args[0], [context.cast(builder, args[1], elements, types.int64)])

    return ptr(ptr, elements), codegen


@intrinsic
def load_weight(typingctx, ptr, index):
    """`ptr[index]` as float32; a uint16 is a bfloat16."""

    def codegen(context, builder, signature, args):
        at = builder.gep(args[0], [context.cast(builder, args[1], index, types.int64)])
        return widen(builder, builder.load(at))

    return types.float32(ptr, index), codegen


def widen(builder, value):
    """float32 (scalar or vector) of a float32 or of bfloat16 bits."""
    vector = isinstance(value.type, ir.VectorType)
    if (value.type.element if vector else value.type) == F32:
        return value
    wide = ir.VectorType(I32, LANES) if vector else I32
    bits = builder.shl(builder.zext(value, wide), ir.Constant(wide, [16] * LANES if vector else 16))
    return builder.bitcast(bits, VEC if vector else F32)


def call(builder, name, result, *values):
    """Call an LLVM intrinsic or a function of this module by name."""
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def fma(builder, a, b, c):
    """a * b + c, rounded once; scalars or vectors of 16."""
    suffix = "v16f32" if isinstance(a.type, ir.VectorType) else "f32"
    return call(builder, f"llvm.fma.{suffix}", a.type, a, b, c)


def splat(builder, value):
    """A vector with `value` (float32) in every lane."""
    lanes = ir.VectorType(I32, LANES)
    one = builder.insert_element(ir.Constant(VEC, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, ir.Constant(VEC, ir.Undefined), ir.Constant(lanes, [0] * 16))


def load_vector(builder, ptr, element=F32):
    """16 elements at `ptr`, which need only be aligned to an element."""
    at = builder.bitcast(ptr, ir.VectorType(element, LANES).as_pointer())
    return builder.load(at, align=4 if element == F32 else 2)


def store_vector(builder, value, ptr):
    """Store 16 floats at `ptr`, which need only be aligned to a float."""
    builder.store(value, builder.bitcast(ptr, VEC.as_pointer()), align=4)


def _prefetch(builder, address):
    void = ir.VoidType()
    read, into_l2, data = ir.Constant(I32, 0), ir.Constant(I32, 2), ir.Constant(I32, 1)
    call(builder, "llvm.prefetch.p0", void, address, read, into_l2, data)


def row_kernel(module, rows, element, at_once=_TILES_AT_ONCE):
    """The LLVM function for `rows` rows, `at_once` tiles a pass; see `pair_gemm` for arguments."""
    name = f"megadecode_pair_gemm_{rows}_{element}"
    if name in module.globals:
        return module.globals[name]
    floats, weights = F32.as_pointer(), element.as_pointer()
    params = [floats, I64, weights, I64, I64, floats, I64, I64, I1, I8.as_pointer(), I64]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), params), name)
    function.linkage = "linkonce_odr"
    function.attributes.add("noinline")
    function.attributes.add("nounwind")
    function.attributes.add("optsize")  # unrolled further by LLVM, eight rows would spill
    x, x_stride, w, w_k, w_tile, out, out_stride, depth, keep, ahead, ahead_step = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))

    unroll = _UNROLL if rows <= _UNROLLED_ROWS else 1
    whole = builder.and_(depth, ir.Constant(I64, -unroll))
    x_rows = [builder.gep(x, [builder.mul(x_stride, ir.Constant(I64, r))]) for r in range(rows)]
    element_bytes = 4 if element == F32 else 2
    lines_a_step = max(1, at_once * LANES * element_bytes * unroll // 64)

    for first in range(0, 2, at_once):
        tiles = [
            builder.gep(w, [builder.mul(w_tile, ir.Constant(I64, first + t))])
            for t in range(at_once)
        ]
        outs = [
            builder.gep(
                out,
                [
                    builder.add(
                        builder.mul(out_stride, ir.Constant(I64, r)),
                        ir.Constant(I64, (first + t) * LANES),
                    )
                ],
            )
            for r in range(rows)
            for t in range(at_once)
        ]
        zero = ir.Constant(VEC, [0.0] * LANES)
        sums = [builder.select(keep, load_vector(builder, at), zero) for at in outs]

        def step(builder, k, sums, tiles=tiles):
            at = builder.mul(k, w_k)
            columns = [
                widen(builder, load_vector(builder, builder.gep(tile, [at]), element))
                for tile in tiles
            ]
            result = []
            for r in range(rows):
                row = splat(builder, builder.load(builder.gep(x_rows[r], [k])))
                for t, column in enumerate(columns):
                    result.append(fma(builder, row, column, sums[r * len(columns) + t]))
            return result

        def unrolled(builder, k, carried):
            ahead, *sums = carried
            for u in range(unroll):
                sums = step(builder, builder.add(k, ir.Constant(I64, u)), sums)
            for _ in range(lines_a_step):
                _prefetch(builder, ahead)
                ahead = builder.gep(ahead, [ahead_step])
            return ahead, *sums

        ahead, *sums = loop(builder, ir.Constant(I64, 0), whole, unroll, [ahead, *sums], unrolled)
        if unroll > 1:
            sums = loop(builder, whole, depth, 1, sums, step)
        for value, at in zip(sums, outs):
            store_vector(builder, value, at)
    builder.ret_void()
    return function


def loop(builder, start, stop, stride, carried, body):
    """`for k in range(start, stop, stride)` with `carried` values kept in registers.

    `body(builder, k, carried)` returns the new values; the last ones are returned.
    """
    before = builder.block
    head = builder.append_basic_block("head")
    inside = builder.append_basic_block("body")
    after = builder.append_basic_block("after")
    builder.branch(head)
    builder.position_at_end(head)
    phis = []
    for value in (start, *carried):
        phi = builder.phi(value.type)
        phi.add_incoming(value, before)
        phis.append(phi)
    builder.cbranch(builder.icmp_signed("<", phis[0], stop), inside, after)
    builder.position_at_end(inside)
    new = body(builder, phis[0], phis[1:])
    following = builder.add(phis[0], ir.Constant(I64, stride))
    for phi, value in zip(phis, (following, *new)):
        phi.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return phis[1:]


@intrinsic
def _row_tile(
    typingctx, rows, x, x_stride, w, w_k, w_tile, out, out_stride, depth, keep, ahead, step
):
    """One micro-kernel call; `rows` is one of `ROW_TILES`."""

    def codegen(context, builder, signature, args):
        kinds = signature.args
        flag = context.cast(builder, args[9], kinds[9], types.boolean)
        words = {
            i: context.cast(builder, args[i], kinds[i], types.int64) for i in (2, 4, 5, 7, 8, 11)
        }
        values = [
            args[1], words[2], args[3], words[4], words[5], args[6], words[7], words[8],
            flag, builder.bitcast(args[10], I8.as_pointer()), words[11],
        ]  # fmt: skip
        element = I16 if kinds[3].dtype == types.uint16 else F32
        done = builder.append_basic_block("done")
        switch = builder.switch(context.cast(builder, args[0], kinds[0], types.int64), done)
        for tile in ROW_TILES:
            block = builder.append_basic_block(f"rows{tile}")
            switch.add_case(ir.Constant(I64, tile), block)
            builder.position_at_end(block)
            builder.call(row_kernel(builder.module, tile, element), values)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    kinds = (rows, x, x_stride, w, w_k, w_tile, out, out_stride, depth, keep, ahead, step)
    return types.void(*kinds), codegen


@jit
def row_tile(rows):
    """Rows of the next micro-kernel call when `rows` are left: few passes, of like size."""
    if ROW_TILES[0] < rows <= 16 and ROW_TILES[0] > 8:
        return 8
    for tile in ROW_TILES:
        if tile <= rows:
            return tile
    return 1


@jit
def pair_gemm(x, x_stride, rows, w, w_k, w_tile, out, out_stride, depth, keep, ahead, prefetch):
    """`out[r, 0:32] = x[r, :] @ w` for any number of rows and one pair of 16-column tiles.

    Strides are in elements: `w[t * w_tile + k * w_k + lane]` is the weight of column `16 t + lane`
    at depth `k`; w is float32, or uint16 holding bfloat16. With `keep` the sums start from what
    `out` holds, otherwise from zero; `out` must be readable either way. With `prefetch`, as many
    bytes as the pair has are requested from `ahead` on, evenly over the passes that the rows take.
    """
    step = 0
    passes = 1
    if prefetch:
        passes = (rows + ROW_TILES[0] - 1) // ROW_TILES[0]
        step = (64 + passes - 1) // passes
    done = 0
    while done < rows:
        tile = row_tile(rows - done)
        _row_tile(
            tile, advance(x, done * x_stride), x_stride, w, w_k, w_tile,
            advance(out, done * out_stride), out_stride, depth, keep, ahead, step,
        )  # fmt: skip
        if prefetch:
            ahead = advance(ahead, PAIR * depth // passes)
        done += tile
