"""Packing: layouts as documented, rounding, refusals."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from cpu_step import TINY, random_tensors

from cute_kernels.cpu import pack
from cute_kernels.cpu.state import PAGE


def unpack(tiles: np.ndarray) -> np.ndarray:
    """`[tiles, K, 16]` back to `[16 * tiles, K]`."""
    return tiles.transpose(0, 2, 1).reshape(-1, tiles.shape[1])


def test_layouts() -> None:
    c, tensors = TINY, random_tensors(TINY)
    w = pack.pack_weights(c, tensors.__getitem__, 100)
    embed = unpack(w.embed)
    np.testing.assert_array_equal(embed[: c.vocab], tensors["embed"])
    assert (embed[c.vocab :] == 0).all()
    assert len(embed) % 32 == 0
    assert w.head is w.embed  # tied: one copy
    for i in range(c.layers):
        at = f"layers.{i}."
        q_rows, kv_rows = c.heads * c.head_dim, c.kv_heads * c.head_dim
        qkv = unpack(w.qkv[i])
        np.testing.assert_array_equal(qkv[q_rows + kv_rows :], tensors[at + "v"])
        half = c.head_dim // 2
        for head in range(c.heads + c.kv_heads):
            name, h = ("q", head) if head < c.heads else ("k", head - c.heads)
            source = tensors[at + name].reshape(-1, c.head_dim, c.hidden)[h]
            packed = qkv[head * c.head_dim : (head + 1) * c.head_dim]
            for pair in range(c.head_dim // 32):
                d = slice(16 * pair, 16 * pair + 16)
                np.testing.assert_array_equal(packed[32 * pair : 32 * pair + 16], source[:half][d])
                np.testing.assert_array_equal(
                    packed[32 * pair + 16 : 32 * pair + 32], source[half:][d]
                )
        np.testing.assert_array_equal(unpack(w.out[i]), tensors[at + "o"])
        np.testing.assert_array_equal(unpack(w.gate_up[i, 0::2]), tensors[at + "gate"])
        np.testing.assert_array_equal(unpack(w.gate_up[i, 1::2]), tensors[at + "up"])
        np.testing.assert_array_equal(unpack(w.down[i]), tensors[at + "down"])
        np.testing.assert_array_equal(w.ffn_norm[i], tensors[at + "ffn_norm"])
        np.testing.assert_array_equal(w.attn_norm[i], tensors[at + "attn_norm"])
    for array in w[:6]:
        assert array.ctypes.data % 64 == 0
        assert array.flags.c_contiguous


def test_an_untied_head_is_packed_beside_the_embedding() -> None:
    config = dataclasses.replace(TINY, tied_embeddings=False)
    tensors = random_tensors(config)
    w = pack.pack_weights(config, tensors.__getitem__, 10)
    np.testing.assert_array_equal(unpack(w.head)[: config.vocab], tensors["head"])
    np.testing.assert_array_equal(unpack(w.embed)[: config.vocab], tensors["embed"])


def test_biases_lie_like_the_outputs_they_belong_to() -> None:
    config = dataclasses.replace(TINY, qkv_bias=True, qk_norm=True, head_dim=64)
    tensors = random_tensors(config)
    for part in ("q", "k", "v"):  # every output's weights start with its bias
        for i in range(config.layers):
            tensors[f"layers.{i}.{part}"][:, 0] = tensors[f"layers.{i}.{part}_bias"]
    w = pack.pack_weights(config, tensors.__getitem__, 10)
    for i in range(config.layers):
        np.testing.assert_array_equal(w.qkv_bias[i], unpack(w.qkv[i])[:, 0])
    without = dataclasses.replace(config, qkv_bias=False)
    assert pack.pack_weights(without, tensors.__getitem__, 10).qkv_bias.shape == (2, 0)


def test_bfloat16_rounds_to_nearest_even() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint64)
    bits = np.concatenate([bits, (np.arange(65536) << 16) | 0x8000, (np.arange(65536) << 16)])
    values = bits.astype(np.uint32).view(np.float32)
    values = values[np.isfinite(values) & (np.abs(values) < 3e38)]
    got = pack.round_bfloat16(values)
    low = values.view(np.uint32) >> 16  # towards zero; the neighbour is one away from zero
    high = low + 1
    as_float = lambda x: (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)  # noqa: E731
    below = np.abs(values.astype(np.float64) - as_float(low))
    above = np.abs(values.astype(np.float64) - as_float(high))
    nearest = np.where(below < above, low, np.where(above < below, high, low + (low & 1)))
    np.testing.assert_array_equal(got, nearest)


def test_bfloat16_keeps_special_values() -> None:
    values = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0], np.float32)
    back = (pack.round_bfloat16(values).astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(back, values)
    assert np.signbit(back[4])
    sneaky = np.array([0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    back = (pack.round_bfloat16(sneaky).astype(np.uint32) << 16).view(np.float32)
    assert np.isnan(back).all()


def test_bf16_weights_are_the_rounded_fp32_ones() -> None:
    tensors = random_tensors(TINY)
    full = pack.pack_weights(TINY, tensors.__getitem__, 10)
    half = pack.pack_weights(TINY, tensors.__getitem__, 10, "bf16")
    for a, b in zip(full[:6], half[:6]):
        np.testing.assert_array_equal(pack.round_bfloat16(a), b)
    for a, b in zip(full[6:], half[6:]):
        np.testing.assert_array_equal(a, b)


def test_rope_table_is_exact_far_out() -> None:
    config = dataclasses.replace(TINY, rope_theta=100000.0)
    table = pack.pack_weights(config, random_tensors(config).__getitem__, 70_000).rope
    half = config.head_dim // 2
    for position in (0, 1, 63, 8191, 69_999):
        for d in (0, 1, half - 1):
            angle = np.longdouble(position) * np.longdouble(100000.0) ** (
                -np.longdouble(d) / np.longdouble(half)
            )
            assert table[position, 0, d] == pytest.approx(float(np.cos(angle)), abs=1e-7)
            assert table[position, 1, d] == pytest.approx(float(np.sin(angle)), abs=1e-7)


@pytest.mark.parametrize(
    ("field", "value", "multiple"), [("head_dim", 48, 32), ("hidden", 80, 32), ("ffn", 200, 16)]
)
def test_a_shape_without_a_kernel_is_refused(field: str, value: int, multiple: int) -> None:
    config = dataclasses.replace(TINY, **{field: value})
    message = f"{field} is {value}; the CPU device needs a multiple of {multiple}"
    with pytest.raises(ValueError, match=message):
        pack.dims_of(config)
    with pytest.raises(ValueError, match=message):
        pack.pack_weights(config, random_tensors(TINY).__getitem__, 10)


def test_a_tensor_of_the_wrong_shape_is_named() -> None:
    tensors = random_tensors(TINY)
    tensors["layers.1.k"] = tensors["layers.1.k"][:-1]
    message = r"'layers\.1\.k' has shape \[63, 96\]; expected \[64, 96\]"
    with pytest.raises(ValueError, match=message):
        pack.pack_weights(TINY, tensors.__getitem__, 10)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="'fp16' is unknown; use 'fp32' or 'bf16'"):
        pack.pack_weights(TINY, random_tensors(TINY).__getitem__, 10, "fp16")


def test_kv_and_acts_have_the_documented_shapes() -> None:
    c = TINY
    kv = pack.allocate_kv(c, 5)
    assert kv.k.shape == (c.layers, 5, c.kv_heads, PAGE // 16, c.head_dim, 16)
    assert kv.v.shape == (c.layers, 5, c.kv_heads, PAGE, c.head_dim)
    acts = pack.allocate_acts(c, 20, 3, 2, 16, 4)
    assert acts.x.shape[0] == 20
    assert acts.logits.shape == (3, 224)
    assert acts.scratch.shape[0] == 4
    for name, array in acts._asdict().items():
        assert array.flags.c_contiguous, name
        assert array.ctypes.data % 64 == 0, name
        assert array.dtype == (np.int32 if name == "token" else np.float32), name
    starts = sorted((a.ctypes.data, a.ctypes.data + a.nbytes) for a in acts)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(starts))
