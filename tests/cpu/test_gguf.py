"""Reading GGUF: right values from sound files, a message naming the fault from every other."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from tiny_gguf import TINY, interleave, write_gguf

from megadecode.errors import ModelError
from megadecode.models import gguf_file
from megadecode.models.gguf_file import load
from megadecode.models.gguf_header import read_header
from megadecode.models.random_model import random_model
from megadecode.models.weights import tensor_shapes

QUANTIZED = [
    GGMLQuantizationType[name]
    for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def use_all(path: Path) -> None:
    """Everything a file can be asked for."""
    model = load(path)
    model.tokenizer()
    for _ in model.tensors():
        pass


# -- sound files ----------------------------------------------------------------------------------


def test_config_and_weights(tiny: Path) -> None:
    model = load(tiny)
    assert model.config == TINY
    names = []
    for name, values in model.tensors():
        names.append(name)
        assert values.dtype == np.float32
        assert values.flags.c_contiguous
        assert values.shape == tensor_shapes(TINY)[name]
        np.testing.assert_array_equal(values, random_model(TINY, 7).tensor(name), err_msg=name)
    assert names == list(tensor_shapes(TINY))


def test_rotary_rows_are_permuted_in_the_file() -> None:
    """The permutation is no identity, differs between q and k, and moves the rows it should."""
    q = np.arange(16.0)[:, None]
    assert interleave(q, 2)[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    assert interleave(q, 4)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15]


def test_tied_head_is_the_embedding_itself(tiny: Path) -> None:
    model = load(tiny)
    embed = model.tensor("embed")
    assert model.tensor("head") is embed


def test_untied_head(tmp_path: Path) -> None:
    config = replace(TINY, tied_embeddings=False)
    model = load(write_gguf(tmp_path / "untied.gguf", config))
    assert model.config == config
    np.testing.assert_array_equal(model.tensor("head"), random_model(config, 7).tensor("head"))
    assert not np.array_equal(model.tensor("head"), model.tensor("embed"))


def test_head_dim_other_than_hidden_over_heads(tmp_path: Path) -> None:
    config = replace(TINY, head_dim=16)
    assert load(write_gguf(tmp_path / "wide.gguf", config)).config == config


@pytest.mark.parametrize("dtype", QUANTIZED, ids=lambda dtype: dtype.name)
def test_dequantisation_is_the_packages_own(tmp_path: Path, dtype: GGMLQuantizationType) -> None:
    """Cutting the bytes into other pieces than rows changes no value; no piece is lost."""
    model = load(write_gguf(tmp_path / "q.gguf", dtype=dtype))
    for name in ("embed", "layers.1.down", "layers.0.v"):
        values = random_model(TINY, 7).tensor(name)
        expected = dequantize(quantize(values, dtype), dtype).reshape(values.shape)
        np.testing.assert_array_equal(model.tensor(name), expected)


@pytest.mark.parametrize("elements", [32, 96, 1024, 16384])
def test_piece_size_never_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elements: int
) -> None:
    path = write_gguf(tmp_path / "q.gguf", dtype=GGMLQuantizationType.Q4_1)
    expected = dict(load(path).tensors())
    monkeypatch.setattr(gguf_file, "PIECE_ELEMENTS", elements)
    for name, values in load(path).tensors():
        np.testing.assert_array_equal(values, expected[name])


def test_per_layer_values_that_are_all_equal(tmp_path: Path) -> None:
    keys = {"llama.attention.head_count_kv": [2, 2], "llama.feed_forward_length": [64, 64]}
    assert load(write_gguf(tmp_path / "layers.gguf", keys=keys)).config == TINY


def test_neutral_keys_are_accepted(tmp_path: Path) -> None:
    keys = {
        "llama.rope.scaling.type": "none",
        "llama.expert_count": 0,
        "llama.attention.causal": True,
        "llama.attention.key_length": None,
        "llama.rope.dimension_count": None,
        "llama.vocab_size": None,
    }
    assert load(write_gguf(tmp_path / "neutral.gguf", keys=keys)).config == TINY


def test_every_end_of_generation_token_stops(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 2}
    assert load(write_gguf(tmp_path / "eot.gguf", keys=keys)).config.stop_ids == (2, 0)


def test_default_model(model: gguf_file.LoadedModel) -> None:
    config = model.config
    assert (config.layers, config.hidden, config.heads, config.kv_heads) == (30, 576, 9, 3)
    assert (config.head_dim, config.ffn, config.vocab) == (64, 1536, 49152)
    assert (config.context_tokens, config.rope_theta) == (8192, 100000.0)
    assert config.tied_embeddings
    assert config.stop_ids == (2,)


# -- what is not supported, by name ---------------------------------------------------------------

WRONG = {
    "architecture": (
        {"architecture": "qwen2moe"},
        "architecture 'qwen2moe' is not supported; supported: llama, qwen2, qwen3",
    ),
    "part": (
        {"keys": {"split.count": 3}},
        "it is one of 3 parts of a model; join them with `llama-gguf-split --merge` first",
    ),
    "rope scaling": (
        {"keys": {"llama.rope.scaling.type": "longrope"}},
        "'llama.rope.scaling.type' = 'longrope' is not supported; supported: none, linear, yarn",
    ),
    "rope scaling factor": (
        {"keys": {"llama.rope.scaling.factor": -4.0}},
        "linear factor is -4.0; it must be positive",
    ),
    "yarn factor": (
        {"keys": {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 0.0}},
        "yarn factor is 0.0; it must be positive",
    ),
    "yarn variant": (
        {"keys": {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_ext_factor": 0.5}},
        "'llama.rope.scaling.yarn_ext_factor' = 0.5 is not supported (only 1.0 is)",
    ),
    "yarn without yarn": (
        {"keys": {"llama.rope.scaling.yarn_beta_fast": 8.0}},
        "'llama.rope.scaling.yarn_beta_fast' = 8.0 is not supported",
    ),
    "partial rotary": (
        {"keys": {"llama.rope.dimension_count": 4}},
        "'llama.rope.dimension_count' = 4 is not supported (only 8 is)",
    ),
    "sliding window": (
        {"keys": {"llama.attention.sliding_window": 64}},
        "'llama.attention.sliding_window' = 64 is not supported",
    ),
    "experts": (
        {"keys": {"llama.expert_count": 8}},
        "'llama.expert_count' = 8 is not supported (only 0 is)",
    ),
    "unknown key": (
        {"keys": {"llama.logit_scale": 2.0}},
        "'llama.logit_scale' = 2.0 is not supported",
    ),
    "layers differ": (
        {"keys": {"llama.feed_forward_length": [64, 32]}},
        "'llama.feed_forward_length' differs from layer to layer: not supported",
    ),
    "key missing": (
        {"keys": {"llama.block_count": None}},
        "metadata key 'llama.block_count' is missing",
    ),
    "key of another type": (
        {"keys": {"llama.block_count": "two"}},
        "'llama.block_count' is 'two', but should be of type int",
    ),
    "too many layers": (
        {"keys": {"llama.block_count": 4_000_000_000}},
        "llama.block_count is 4000000000, but the file holds 20 tensors",
    ),
    "no layers": (
        {"keys": {"llama.block_count": 0}},
        "model 'tiny': layers is 0; it must be a positive integer",
    ),
    "no heads": (
        {"keys": {"llama.attention.head_count": 0}},
        "model 'tiny': heads is 0; it must be a positive integer",
    ),
    "heads": (
        {"keys": {"llama.attention.head_count_kv": 3}},
        "model 'tiny': 4 heads do not divide into 3 key/value heads",
    ),
    "theta": (
        {"keys": {"llama.rope.freq_base": float("nan")}},
        "model 'tiny': rope_theta is nan; it must be positive",
    ),
    "vocabulary": (
        {"keys": {"llama.vocab_size": 299}},
        "tensor 'token_embd.weight' has 300 rows, but llama.vocab_size is 299",
    ),
    "stop token": (
        {"keys": {"tokenizer.ggml.eos_token_id": 300}},
        "model 'tiny': token id 300 lies outside its vocabulary of 300",
    ),
    "stop token type": (
        {"keys": {"tokenizer.ggml.eos_token_id": "2"}},
        "'tokenizer.ggml.eos_token_id' is '2', but should be of type int",
    ),
    "tensor missing": (
        {"tensors": {"blk.1.ffn_up.weight": None}},
        "tensor 'blk.1.ffn_up.weight' is missing; expected [64, 32]",
    ),
    "embedding missing": (
        {"tensors": {"token_embd.weight": None}},
        "tensor 'token_embd.weight' is missing or not a matrix",
    ),
    "shape": (
        {"tensors": {"blk.0.attn_k.weight": np.zeros((32, 16), np.float32)}},
        "tensor 'blk.0.attn_k.weight' has shape [32, 16]; its configuration asks for [16, 32]",
    ),
    "bias": (
        {"tensors": {"blk.0.attn_q.bias": np.zeros(32, np.float32)}},
        "tensor 'blk.0.attn_q.bias' belongs to a variant of the model that is not "
        "supported (it would change the result)",
    ),
    "rope factors of another head": (
        {"tensors": {"rope_freqs.weight": np.ones(3, np.float32)}},
        "model 'tiny': 3 rope factors; head_dim 8 needs 4",
    ),
    "rope factors in bits": (
        {"tensors": {"rope_freqs.weight": np.ones(4, np.float16)}},
        "tensor 'rope_freqs.weight' is F16 of shape [4]; expected F32 in one dimension",
    ),
    "rope factor": (
        {"tensors": {"rope_freqs.weight": np.array([1, 0, 1, 1], np.float32)}},
        "rope factor 1 is 0.0; it must be positive",
    ),
    "rope factors and scaling": (
        {
            "tensors": {"rope_freqs.weight": np.ones(4, np.float32)},
            "keys": {"llama.rope.scaling.factor": 2.0},
        },
        "tensor 'rope_freqs.weight' beside rope scaling 'linear': not supported",
    ),
    "rope factors of another family": (
        {
            "tensors": {"rope_freqs.weight": np.ones(4, np.float32)},
            "architecture": "qwen3",
            "config": replace(TINY, qk_norm=True),
        },
        "tensor 'rope_freqs.weight' belongs to a variant of the model that is not "
        "supported (it would change the result)",
    ),
    "bias of another shape": (
        {
            "tensors": {"blk.1.attn_k.bias": np.ones(15, np.float32)},
            "architecture": "qwen2",
            "config": replace(TINY, qkv_bias=True),
        },
        "tensor 'blk.1.attn_k.bias' has shape [15]; its configuration asks for [16]",
    ),
    "norm missing": (
        {
            "tensors": {"blk.0.attn_q_norm.weight": None},
            "architecture": "qwen3",
            "config": replace(TINY, qk_norm=True),
        },
        "tensor 'blk.0.attn_q_norm.weight' is missing; expected [8]",
    ),
    "dtype": (
        {"tensors": {"output_norm.weight": np.ones(32, np.float64)}},
        "tensor 'output_norm.weight' has dtype F64, which cannot be converted to fp32",
    ),
}


@pytest.mark.parametrize("change", WRONG)
def test_refused_by_name(tmp_path: Path, change: str) -> None:
    arguments, message = WRONG[change]
    path = write_gguf(tmp_path / "wrong.gguf", **arguments)
    with pytest.raises(ModelError) as caught:
        load(path)
    assert str(caught.value) == f"{path}: {message}"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["blk.1.ffn_norm.weight", "token_embd.weight"])
def test_values_that_are_no_numbers(tmp_path: Path, name: str, value: float) -> None:
    canonical = {"blk.1.ffn_norm.weight": "layers.1.ffn_norm", "token_embd.weight": "embed"}[name]
    values = random_model(TINY, 7).tensor(canonical).copy()
    values.flat[17] = value
    path = write_gguf(tmp_path / "nan.gguf", tensors={name: values})
    model = load(path)
    with pytest.raises(ModelError) as caught:
        model.tensor(canonical)
    assert str(caught.value) == (
        f"{path}: tensor {name!r} holds {value} at element 17; the file is damaged"
    )


def test_block_scale_that_is_infinite(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "inf.gguf", dtype=GGMLQuantizationType.Q8_0)
    info = read_header(path).tensors["blk.0.ffn_gate.weight"]
    with path.open("r+b") as file:
        file.seek(info.offset)
        file.write(np.float16(np.inf).tobytes())
    with pytest.raises(ModelError, match=r"tensor 'blk\.0\.ffn_gate\.weight' holds"):
        load(path).tensor("layers.0.gate")


# -- damaged files --------------------------------------------------------------------------------


def test_cut_anywhere_is_refused(tiny: Path, tmp_path: Path) -> None:
    """Every length in the first bytes, then a prime stride through header and weights."""
    whole = tiny.read_bytes()
    tensors = read_header(tiny).tensors.values()
    needed = max(info.offset + info.bytes for info in tensors)
    path = tmp_path / "cut.gguf"
    for length in [*range(200), *range(200, needed, 61), needed - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=re.escape(str(path))):
            load(path)
    path.write_bytes(whole[:needed])
    use_all(path)


def test_cut_weights_name_the_tensor(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    header = read_header(tiny)
    for info in header.tensors.values():
        end = info.offset + info.bytes
        path.write_bytes(tiny.read_bytes()[: end - 1])
        with pytest.raises(ModelError) as caught:
            load(path)
        assert str(caught.value) == (
            f"{path}: tensor {info.name!r} needs bytes {info.offset} to {end}, "
            f"but the file ends at {end - 1}; it is truncated"
        )


def test_file_cut_after_it_was_opened(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "shrinks.gguf"
    path.write_bytes(tiny.read_bytes())
    model = load(path)
    path.write_bytes(tiny.read_bytes()[:9000])
    with pytest.raises(ModelError, match=r"tensor 'token_embd\.weight' is cut short"):
        model.tensor("embed")
    path.unlink()
    with pytest.raises(ModelError, match="cannot be read: "):
        model.tensor("embed")


def test_changed_bytes_never_crash(tiny: Path, tmp_path: Path) -> None:
    """Any byte of the header may hold anything: a message, or a model with finite weights."""
    whole = bytearray(tiny.read_bytes())
    header_bytes = min(info.offset for info in read_header(tiny).tensors.values())
    rng = np.random.default_rng(20)
    path = tmp_path / "changed.gguf"
    messages = []
    for _ in range(1500):
        changed = bytearray(whole)
        for at in rng.integers(0, header_bytes, rng.integers(1, 4)):
            changed[at] = rng.integers(0, 256)
        path.write_bytes(changed)
        try:
            use_all(path)
        except ModelError as error:
            messages.append(str(error))
    assert len(messages) > 100
    assert all(message.startswith(str(path)) for message in messages)


def header_of(*pieces: bytes, tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"".join((b"GGUF", struct.pack("<IQQ", version, tensors, keys), *pieces))


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def table_row(
    name: str = "t", shape: tuple[int, ...] = (32,), dtype: int = 0, offset: int = 0
) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", dtype, offset)


HUGE = 2**62
DAMAGED = {
    "empty": (b"", "the file ends inside its first 24 bytes: 4 bytes wanted at byte 0, 0 left"),
    "other file": (b"PK\3\4" + bytes(40), "not a GGUF file (it does not start with 'GGUF')"),
    "version 1": (header_of(version=1), "GGUF version 1; versions 2 and 3 can be read"),
    "version 4": (header_of(version=4), "GGUF version 4; versions 2 and 3 can be read"),
    "big-endian": (
        header_of(version=0x03000000),
        "GGUF version 50331648 (a big-endian file?); versions 2 and 3 can be read",
    ),
    "keys": (header_of(keys=HUGE), f"claims {HUGE} metadata keys, more than the file of 24 bytes"),
    "tensors": (header_of(tensors=HUGE), f"the tensor table claims {HUGE} tensors, more than"),
    "key length": (header_of(struct.pack("<Q", HUGE), bytes(9), keys=1), f"{HUGE} bytes wanted"),
    "array length": (
        header_of(text("k"), struct.pack("<IIQ", 9, 0, HUGE), keys=1),
        f"the file ends inside metadata key 'k': {HUGE} bytes wanted",
    ),
    "strings": (
        header_of(text("k"), struct.pack("<IIQ", 9, 8, HUGE), keys=1),
        f"metadata key 'k' claims {HUGE} strings",
    ),
    "nested": (
        header_of(text("k"), struct.pack("<IIQ", 9, 9, 1), keys=1),
        "metadata key 'k' is an array of value type 9; arrays of scalars and of strings can be",
    ),
    "value type": (
        header_of(text("k"), struct.pack("<I", 13), bytes(8), keys=1),
        "metadata key 'k' has the unknown value type 13",
    ),
    "not UTF-8": (
        header_of(struct.pack("<Q", 1), b"\xff", bytes(8), keys=1),
        "metadata key 0 is not UTF-8 text; it is damaged",
    ),
    "key twice": (
        header_of(*[text("k") + struct.pack("<II", 4, 1)] * 2, keys=2),
        "metadata key 'k' appears twice",
    ),
    "alignment": (
        header_of(text("general.alignment"), struct.pack("<II", 4, 48), keys=1),
        "general.alignment is 48; it must be a power of two",
    ),
    "no dimensions": (
        header_of(table_row(shape=()), bytes(64), tensors=1),
        "tensor 't' has 0 dimensions; 1 to 4 are possible",
    ),
    "dimensions": (
        header_of(table_row(shape=(1,) * 5), tensors=1),
        "tensor 't' has 5 dimensions; 1 to 4 are possible",
    ),
    "tensor dtype": (header_of(table_row(dtype=999), tensors=1), "'t' has the unknown dtype 999"),
    "no elements": (header_of(table_row(shape=(0, 4)), tensors=1), "has the empty shape [4, 0]"),
    "half a block": (
        header_of(table_row(shape=(33, 2), dtype=8), tensors=1),
        "tensor 't' has rows of 33 elements, which Q8_0 blocks of 32 do not divide",
    ),
    "size overflow": (
        header_of(table_row(shape=(2**33, 2**33)), tensors=1),
        f"tensor 't' needs bytes 96 to {96 + 4 * 2**66}, but the file ends at",
    ),
    "offset": (header_of(table_row(offset=2**63), tensors=1), "tensor 't' needs bytes"),
    "misaligned": (
        header_of(table_row(offset=4), bytes(256), tensors=1),
        "tensor 't' lies at offset 4, not a multiple of the alignment 32; the file is damaged",
    ),
    "tensor twice": (
        header_of(table_row(), table_row(offset=128), bytes(512), tensors=2),
        "tensor 't' appears twice",
    ),
    "overlap": (
        header_of(table_row("a"), table_row("b", offset=96), bytes(512), tensors=2),
        "tensors 'a' and 'b' overlap; the file is damaged",
    ),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("damage", DAMAGED)
def test_damage_has_a_message(tmp_path: Path, damage: str) -> None:
    data, message = DAMAGED[damage]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        load(tmp_path / "nothing.gguf")
    with pytest.raises(ModelError, match="cannot be read: Is a directory"):
        load(tmp_path)
