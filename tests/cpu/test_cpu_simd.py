"""The micro-kernel and the vector functions: exact order, accuracy, and nothing out of bounds."""

from __future__ import annotations

import re

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir

from cute_kernels.cpu.pack import round_bfloat16
from cute_kernels.cpu.simd import (
    F32,
    I16,
    NARROW_ROW_TILES,
    ROW_TILES,
    WIDE_ROW_TILES,
    pair_gemm,
    pointer,
    row_kernel,
    row_tile,
)
from cute_kernels.cpu.vecmath import (
    argmax,
    exp,
    log,
    silu_product,
    softmax_page,
    softmax_step,
    sum_exp,
    sum_squares,
)
from host.jit import jit

EXTENDED = np.finfo(np.longdouble).nmant >= 63


@jit
def _gemm(x, rows, w, w_k, w_tile, out, depth, keep, prefetch):
    pair_gemm(
        pointer(x, 0), x.shape[1], rows, pointer(w, 0), w_k, w_tile, pointer(out, 0), out.shape[1],
        depth, keep, pointer(w, 0), prefetch,
    )  # fmt: skip


@jit
def _exp_all(x, out):
    for i in range(x.size):
        out[i] = exp(x[i])


@jit
def _log_one(x):
    return log(x)


@jit
def _sum_squares(x, count):
    return sum_squares(pointer(x, 0), count)


@jit
def _silu(pair, out):
    silu_product(pointer(pair, 0), pointer(out, 0))


@jit
def _softmax(scores, keys, state):
    return softmax_step(pointer(scores, 0), keys, pointer(state, 0))


@jit
def _softmax_page(scores, states, sums):
    softmax_page(
        pointer(scores, 0), len(scores), pointer(states, 0), pointer(sums, 0), sums.shape[1]
    )


@jit
def _argmax(values, count):
    return argmax(pointer(values, 0), count)


@jit
def _sum_exp(values, count, shift):
    return sum_exp(pointer(values, 0), count, shift)


def packed_pair(depth: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A `[32, depth]` matrix, and the same as `[2, depth, 16]`."""
    matrix = np.random.default_rng(seed).standard_normal((32, depth)).astype(np.float32)
    return matrix, np.ascontiguousarray(matrix.reshape(2, 16, depth).transpose(0, 2, 1))


def multiply(x: np.ndarray, tiles: np.ndarray, prefetch: bool = True) -> np.ndarray:
    out = np.full((len(x), 40), np.nan, np.float32)
    depth = tiles.shape[1]
    _gemm(x, len(x), tiles, 16, depth * 16, out, depth, False, prefetch)
    assert np.isnan(out[:, 32:]).all()
    return out[:, :32]


@pytest.mark.skipif(not EXTENDED, reason="needs an extended long double as the exact reference")
@pytest.mark.parametrize("depth", [1, 3, 64, 203])
def test_each_output_is_one_ascending_chain_of_fused_multiply_adds(depth: int) -> None:
    matrix, tiles = packed_pair(depth)
    x = np.random.default_rng(1).standard_normal((5, depth)).astype(np.float32)
    chain = np.zeros((5, 32), np.float32)
    for k in range(depth):
        product = x[:, k : k + 1].astype(np.longdouble) * matrix[:, k].astype(np.longdouble)
        chain = (chain + product).astype(np.float32)
    np.testing.assert_array_equal(multiply(x, tiles), chain)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_row_has_the_same_bits_beside_any_number_of_others(bf16: bool) -> None:
    matrix, tiles = packed_pair(77)
    if bf16:
        tiles = round_bfloat16(tiles)
        matrix = (tiles.astype(np.uint32) << 16).view(np.float32)
        matrix = matrix.transpose(0, 2, 1).reshape(32, 77)
    x = np.random.default_rng(2).standard_normal((70, 77)).astype(np.float32)
    alone = np.concatenate([multiply(x[i : i + 1], tiles) for i in range(len(x))])
    assert np.abs(alone - x.astype(np.float64) @ matrix.T.astype(np.float64)).max() < 1e-4
    for rows in (*range(2, 33), 70):
        for first in (0, len(x) - rows):
            block = x[first : first + rows]
            for prefetch in (False, True):
                together = multiply(block, tiles, prefetch)
                np.testing.assert_array_equal(together, alone[first : first + rows])


def test_strides_serve_row_major_values_and_sums_can_go_on() -> None:
    rng = np.random.default_rng(3)
    values = rng.standard_normal((50, 64)).astype(np.float32)
    x = rng.standard_normal((7, 50)).astype(np.float32)
    whole = np.zeros((7, 32), np.float32)
    _gemm(x, 7, values, 64, 16, whole, 50, False, False)
    assert np.abs(whole - x.astype(np.float64) @ values[:, :32]).max() < 1e-4
    # The same sums in two pieces: the order is the same, so are the bits.
    pieces = np.full((7, 32), np.nan, np.float32)
    _gemm(x, 7, values, 64, 16, pieces, 23, False, False)
    _gemm(np.ascontiguousarray(x[:, 23:]), 7, values[23:], 64, 16, pieces, 27, True, False)
    np.testing.assert_array_equal(pieces, whole)


def test_row_tiles_add_up() -> None:
    for rows in range(1, 300):
        left = rows
        while left:
            tile = row_tile(left)
            assert tile in ROW_TILES
            assert tile <= left
            left -= tile


TARGETS = {
    "skylake-avx512": ("x86_64-linux-gnu", WIDE_ROW_TILES),
    "znver4": ("x86_64-linux-gnu", WIDE_ROW_TILES),
    "haswell": ("x86_64-linux-gnu", NARROW_ROW_TILES),
    "neoverse-n1": ("aarch64-linux-gnu", NARROW_ROW_TILES),
    "apple-m1": ("arm64-apple-darwin", NARROW_ROW_TILES),
}
FMA = re.compile(r"vfmadd|fmla")
STACK = re.compile(r"[yz]mm\d+, -?\d*\(%rsp\)|\(%rsp\), %[yz]mm|\b(ldr|str|ldp|stp)\s+q.*\[sp")


@pytest.mark.parametrize("element", [F32, I16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("cpu", TARGETS)
def test_accumulators_stay_in_registers(cpu: str, element: ir.Type) -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    triple, row_tiles = TARGETS[cpu]
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3)
    wide = row_tiles is WIDE_ROW_TILES
    for rows in row_tiles:
        module = ir.Module()
        module.triple = triple
        row_kernel(module, rows, element, 2 if wide else 1).linkage = ""
        compiled = llvm.parse_assembly(str(module))
        tuning = llvm.create_pipeline_tuning_options(speed_level=3)
        passes = llvm.create_pass_builder(machine, tuning)
        passes.getModulePassManager().run(compiled, passes)
        blocks = re.split(r"\n\.?L?BB\S+:", machine.emit_assembly(compiled))
        inner = max(blocks, key=lambda block: len(FMA.findall(block)))
        registers = 1 if wide else 2 if "x86" in triple else 4  # per vector of the IR
        steps = 4 if rows <= 4 else 1
        assert len(FMA.findall(inner)) == rows * (2 if wide else 1) * registers * steps
        assert not STACK.search(inner), f"{rows} rows"


def test_exp_is_within_two_units_in_the_last_place() -> None:
    x = np.linspace(-87.3, 88.37, 2_000_003).astype(np.float32)
    out = np.empty_like(x)
    _exp_all(x, out)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(out - exact) / np.spacing(exact.astype(np.float32))).max() <= 2


def test_exp_of_special_values() -> None:
    x = np.array([0, -0.0, -np.inf, np.inf, np.nan, -87.4, -1e30, 88.4, 1e30], np.float32)
    out = np.empty_like(x)
    _exp_all(x, out)
    np.testing.assert_array_equal(out, [1, 1, 0, np.inf, np.nan, 0, 0, np.inf, np.inf])


def test_log() -> None:
    for x in (1.0, 2.0, 1e-300, 49152.0, 0.70710678, 1.41421357, 1 + 1e-9, 3.7e200):
        assert _log_one(x) == pytest.approx(np.log(x), rel=4e-16 * 4, abs=1e-24)


def test_silu() -> None:
    pair = np.random.default_rng(4).standard_normal(32).astype(np.float32) * 5
    pair[:3] = (-200, 200, -88)
    out = np.empty(16, np.float32)
    _silu(pair, out)
    gate, up = pair[:16].astype(np.float64), pair[16:].astype(np.float64)
    np.testing.assert_allclose(out, gate / (1 + np.exp(-gate)) * up, rtol=4e-7, atol=1e-35)


def test_sum_squares() -> None:
    x = np.random.default_rng(5).standard_normal(608).astype(np.float32)
    assert _sum_squares(x, 576) == pytest.approx((x[:576].astype(np.float64) ** 2).sum(), rel=1e-6)


@pytest.mark.parametrize("keys", [1, 15, 16, 17, 64, 79])
def test_softmax_step_takes_part_in_nothing_beyond_its_keys(keys: int) -> None:
    rng = np.random.default_rng(keys)
    scores = rng.standard_normal(96).astype(np.float32) * 4
    exact = scores[:keys].astype(np.float64)
    state = np.array([-np.inf, 0], np.float32)
    results = []
    for filler in (np.nan, np.inf, 1e30):
        work = scores.copy()
        work[keys:] = filler
        state[:] = -np.inf, 0
        assert _softmax(work, keys, state) == 0
        assert state[0] == scores[:keys].max()
        assert state[1] == pytest.approx(np.exp(exact - exact.max()).sum(), rel=1e-6)
        shifted = (scores[:keys] - scores[:keys].max()).astype(np.float64)
        np.testing.assert_allclose(work[:keys], np.exp(shifted), rtol=3e-7)
        assert (work[keys : -(-keys // 16) * 16] == 0).all()
        results.append((work[:keys].tobytes(), state.tobytes()))
    assert len(set(results)) == 1
    # A second step rescales the first.
    more = np.full(16, scores[:keys].max() + 2, np.float32)
    factor = _softmax(more, 16, state)
    assert factor == pytest.approx(np.exp(-2), rel=1e-6)
    assert state[1] == pytest.approx(np.exp(exact - exact.max() - 2).sum() + 16, rel=1e-6)


def test_softmax_page_is_softmax_step_for_every_row() -> None:
    rng = np.random.default_rng(8)
    for rows in (1, 3, 50):
        scores = rng.standard_normal((rows, 64)).astype(np.float32) * 3
        states = np.stack([rng.standard_normal(rows), 1 + rng.random(rows)], 1).astype(np.float32)
        states[0] = -np.inf, 0
        sums = rng.standard_normal((rows, 96)).astype(np.float32)
        sums[0] = 0
        work, state, total = scores.copy(), states.copy(), sums.copy()
        _softmax_page(work, state, total)
        for row in range(rows):
            one, of_one = scores[row].copy(), states[row].copy()
            factor = _softmax(one, 64, of_one)
            np.testing.assert_array_equal(work[row], one)
            np.testing.assert_array_equal(total[row], sums[row] * np.float32(factor))
            assert state[row, 0] == of_one[0]
            assert state[row, 1] == pytest.approx(of_one[1], rel=2e-7)


def test_argmax_order_and_refusals() -> None:
    rng = np.random.default_rng(6)
    values = rng.standard_normal(224).astype(np.float32)
    values[203:] = np.nan  # beyond the count: not looked at
    assert _argmax(values, 203) == values[:203].argmax()
    for first, second in ((3, 19), (16, 200), (5, 6), (31, 32), (0, 202)):
        tied = values.copy()
        tied[[first, second]] = 9
        assert _argmax(tied, 203) == first
    for bad in (np.nan, np.inf):
        for at in (0, 100, 202):
            wrong = values.copy()
            wrong[at] = bad
            assert _argmax(wrong, 203) == -1
    masked = np.full(224, -np.inf, np.float32)
    assert _argmax(masked, 203) == -1
    masked[202] = -1e30
    assert _argmax(masked, 203) == 202


def test_sum_exp() -> None:
    values = np.random.default_rng(7).standard_normal(224).astype(np.float32)
    values[203:] = np.nan
    values[7] = -np.inf
    exact = np.exp(values[:203].astype(np.float64) - 2).sum()
    assert _sum_exp(values, 203, np.float32(2)) == pytest.approx(exact, rel=1e-6)
