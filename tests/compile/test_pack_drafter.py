"""Where a drafter's weights lie: every phase found as the kernel finds it, on the CPU."""

import ctypes
import dataclasses
import re

import numpy as np
import pytest

from cute_kernels.gpu.config import LAYER_KINDS, SHAPES, DraftShape, product
from cute_kernels.gpu.kv_layout import rotary_order
from cute_kernels.gpu.tiles import draft_phases, tile_stride
from megadecode import ModelError
from megadecode.config import ModelConfig
from megadecode.cuda_kernel import draft_shape
from megadecode.drafter import Drafter, DrafterConfig
from megadecode.drafter.io import tensor_shapes
from megadecode.models.random_model import random_model

torch = pytest.importorskip("torch")

TAPS = (2, 0)  # an order that is not the layers'


def drafter_config(name: str, tokens: tuple[int, ...] = (), **changes) -> DrafterConfig:
    s = SHAPES[name]
    values = dict(
        name="d", layers=2, hidden=s.hidden, heads=s.heads, kv_heads=s.kv_heads,
        head_dim=s.head_dim, ffn=2048, vocab=2100, block_size=8, taps=TAPS, target_layers=3,
        mask_token_id=0, draft_tokens=tokens,
        layer_types=("full_attention", "sliding_attention"), window=96, output_multiplier=0.5,
    )  # fmt: skip
    return DrafterConfig(**values | changes)


def random_drafter(config: DrafterConfig) -> Drafter:
    rng = np.random.default_rng(4)
    return Drafter(
        config,
        {n: rng.standard_normal(s).astype(np.float32) for n, s in tensor_shapes(config).items()},
    )


def unpack_unit(unit: np.ndarray, warps: int) -> np.ndarray:
    """[8, K] from a unit as the kernel reads it: [chunk][warp][column][t][step][4]."""
    v = unit.reshape(-1, warps, 8, 4, 2, 4).transpose(2, 1, 0, 4, 3, 5)
    return v.reshape(8, -1)


def read_phase(arrays: dict, c, phase: int, name: str, tiles: int) -> np.ndarray:
    """bf16 bits [columns, K] of a phase, from STREAM's address, PLAN and OFFSETS alone."""
    g, base = c.gemm(name), arrays["STREAM"].data_ptr()
    plan, offsets = arrays["PLAN"].numpy(), arrays["OFFSETS"].numpy()
    out = np.zeros((tiles, g.split, 8, g.slab), np.uint16)
    for cta in range(c.ctas):
        first, n = plan[cta, phase, :2]
        part = cta % c.team if g.split > 1 else 0
        for i in range(n):
            at = base + int(offsets[cta, phase]) + i * g.unit_bytes
            unit = np.frombuffer(ctypes.string_at(at, g.unit_bytes), np.uint16)
            out[first + i * tile_stride(c, name), part] = unpack_unit(unit, c.warps)
    return out.transpose(0, 2, 1, 3).reshape(tiles * 8, g.k)


def bits(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.ascontiguousarray(x)).bfloat16().view(torch.int16).numpy().view(
        np.uint16
    )  # fmt: skip


@pytest.mark.parametrize("name", ["odd-768", "llama-3.2-1b"])
@pytest.mark.parametrize("listed", [False, True])
def test_every_phase_of_a_drafter_is_where_the_kernel_looks(name, listed):
    from megadecode.cuda_weights import pack_drafter, pack_model

    s = dataclasses.replace(SHAPES[name], layers=3, vocab=2100, ffn=2048)
    c = product(s)
    model = random_model(
        ModelConfig(
            name="t", layers=3, hidden=s.hidden, heads=s.heads, kv_heads=s.kv_heads,
            head_dim=s.head_dim, ffn=s.ffn, vocab=s.vocab, context_tokens=512, tied_embeddings=True,
        ),
        seed=1,
    )  # fmt: skip
    tokens = tuple(range(20, 20 + 1088)) if listed else ()
    drafter = random_drafter(drafter_config(name, tokens))
    draft = draft_shape(drafter.config, c)
    assert draft == DraftShape(2, 2, len(tokens))
    arrays = pack_model(model.config, model.tensor, c, 300, "cpu")
    arrays |= pack_drafter(
        drafter.config, drafter.get, arrays, lambda: model.tensor("head"), c, draft, 300, "cpu"
    )
    assert arrays["PLAN"].shape[1] == arrays["OFFSETS"].shape[1] == 13 + draft.phases
    get, kv = drafter.get, s.kv_heads * s.head_dim
    order = rotary_order(s.head_dim)

    def rotary(w):
        return w.reshape(-1, s.head_dim, w.shape[1])[:, order].reshape(w.shape)

    for number, (kind, tiles) in enumerate(draft_phases(c, draft)):
        found = read_phase(arrays, c, 13 + number, kind, tiles)
        if number < 2:
            want = get("fc")[:, number * s.hidden : (number + 1) * s.hidden]
        elif number == 2:
            parts = [
                p * get("context_norm")
                for i in range(2)
                for p in (rotary(get(f"layers.{i}.k")), get(f"layers.{i}.v"))
            ]
            want = np.concatenate(parts)
            assert want.shape[0] == 2 * 2 * kv
        elif kind == "lm":
            head = model.tensor("head")
            want = head[list(tokens)] if listed else np.pad(head, ((0, 4), (0, 0)))
        else:
            at = f"layers.{(number - 3) // 4}."
            assert kind == LAYER_KINDS[(number - 3) % 4]
            q, k = rotary(get(at + "q")), rotary(get(at + "k"))
            gate, up = get(at + "gate"), get(at + "up")
            want = {
                "qkv": np.concatenate([q, k, get(at + "v")]) * get(at + "attn_norm"),
                "o": get(at + "o"),
                "gu": np.stack([gate, up], 1).reshape(-1, s.hidden) * get(at + "ffn_norm"),
                "down": get(at + "down"),
            }[kind]
        assert np.array_equal(found, bits(want)), (number, kind)
    assert arrays["TAP_OF"].tolist() == [1, -1, 0]
    assert arrays["DRAFT_MASK"].tolist() == [[0, 0], [96, 1]]
    assert arrays["DRAFT_QK_NORM"].shape == (2, 2, s.head_dim)
    assert np.array_equal(arrays["DRAFT_QK_NORM"][1, 1].numpy(), get("layers.1.k_norm"))
    norm = arrays["DRAFT_NORM"].reshape(-1, 4, 2, 4).permute(0, 2, 1, 3).reshape(-1)
    assert np.array_equal(norm.view(torch.int16).numpy().view(np.uint16),
                          bits(get("final_norm") * 0.5))  # fmt: skip
    assert listed == ("DRAFT_TOKENS" in arrays)
    # the target's own phases are what they were
    head = read_phase(arrays, c, 12, "lm", c.gemm("lm").tiles)
    assert np.array_equal(head[:2100], bits(model.tensor("head")))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(heads=6, kv_heads=6), "heads is 6; device 'cuda' expects its target's, 12"),
        (dict(kv_heads=6), "kv_heads is 6; device 'cuda' expects its target's, 12"),
        (dict(head_dim=32), "head_dim is 32; device 'cuda' expects its target's, 64"),
        (dict(ffn=512), "ffn is 512; device 'cuda' expects its target's, 2048"),
        (dict(rms_eps=1e-3), "rms_eps is 0.001; device 'cuda' expects its target's, 1e-05, which"),
        (dict(rms_eps=2.1e-5), "rms_eps is 2.1e-05; device 'cuda' expects its target's, 1e-05, wh"),
        (dict(input_embedding_scale=2.0), "input_embedding_scale is 2.0; device 'cuda' expects 1."),
        (dict(final_logit_softcapping=30.0), "final_logit_softcapping is 30.0; device 'cuda' expe"),
        (dict(draft_tokens=tuple(range(64))), "draft_tokens is a list of 64; device 'cuda' expec"),
    ],
)
def test_drafters_there_is_no_code_for_are_refused(changes, says):
    config = dataclasses.replace(drafter_config("odd-768"), **changes)
    with pytest.raises(ModelError, match=re.escape(says)):
        draft_shape(config, product("odd-768"))


def test_an_epsilon_near_the_targets_is_taken():
    config = dataclasses.replace(drafter_config("odd-768"), rms_eps=1e-6)  # as the shipped one's
    assert draft_shape(config, product("odd-768")).layers == config.layers


def test_a_shape_that_cannot_speculate_on_a_target_refuses_a_drafter():
    c = product("odd-960", "sm_120a")
    assert not c.draft
    with pytest.raises(ModelError, match="shared memory of sm_120a is too small for odd-960 to"):
        draft_shape(drafter_config("odd-960"), c)
