"""A drafter's configuration: what is derived, what is refused and how, YaRN, the target."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tiny_drafter import DRAFTER, TARGET, target, variant
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from megadecode import ModelConfig
from megadecode.drafter import DrafterConfig, Yarn, fingerprint
from megadecode.drafter.published import published_values, read_published
from megadecode.errors import ModelError
from megadecode.models.random_model import random_model
from megadecode.rope import Linear, inverse_frequencies, rotation_table

FULL, SLIDING = "full_attention", "sliding_attention"


def refused(message, call, *args, **kwargs):
    with pytest.raises(ModelError, match=f"^{re.escape(message)}$"):
        call(*args, **kwargs)


def test_the_block_includes_the_anchor() -> None:
    assert (DRAFTER.block_size, DRAFTER.drafted, DRAFTER.first_row) == (8, 7, 1)
    anchor_predicts = variant(prediction="next")
    assert (anchor_predicts.drafted, anchor_predicts.first_row) == (8, 0)


def test_sliding_layers_are_causal_and_full_ones_are_not_unless_told() -> None:
    mixed = {"layer_types": (SLIDING, SLIDING, FULL), "window": 20}
    config = variant(**mixed)
    assert [config.window_of(i) for i in range(3)] == [20, 20, None]
    assert [config.causal(i) for i in range(3)] == [True, True, False]
    for told in (True, False):
        assert [variant(**mixed, is_causal=told).causal(i) for i in range(3)] == [told] * 3
    assert [DRAFTER.window_of(i) for i in range(3)] == [None] * 3
    assert [DRAFTER.causal(i) for i in range(3)] == [False] * 3


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"taps": ()}, "taps is (); expected a tuple of target layers; they are never guessed"),
        ({"taps": (1, 5)}, "taps is (1, 5); expected target layers from 0 to 4"),
        ({"taps": (-1,)}, "taps is (-1,); expected target layers from 0 to 4"),
        ({"taps": (1, 1)}, "taps is (1, 1); expected target layers that differ"),
        (
            {"block_size": 17},
            "block_size is 17; expected 2 to 16, the anchor included, with prediction 'same'",
        ),
        (
            {"block_size": 1},
            "block_size is 1; expected 2 to 16, the anchor included, with prediction 'same'",
        ),
        (
            {"block_size": 16, "prediction": "next"},
            "block_size is 16; expected 2 to 15, the anchor included, with prediction 'next'",
        ),
        ({"prediction": "last"}, "prediction is 'last'; expected 'same' or 'next'"),
        ({"mask_token_id": 203}, "mask_token_id is 203; expected a token id from 0 to 202"),
        ({"mask_token_id": None}, "mask_token_id is None; expected a token id from 0 to 202"),
        (
            {"draft_tokens": tuple(range(31))},
            "draft_tokens is '31 ids'; expected a tuple of a multiple of 32 ids",
        ),
        (
            {"draft_tokens": (*range(31), 203)},
            "draft_tokens is 'a list with others'; expected ids from 0 to 202",
        ),
        (
            {"draft_tokens": (1, 0, *range(2, 32))},
            "draft_tokens is 'out of order'; expected ids that ascend",
        ),
        ({"layers": 0}, "layers is 0; expected a positive integer"),
        ({"hidden": 64.0}, "hidden is 64.0; expected a positive integer"),
        ({"kv_heads": 3}, "heads is 4; expected a multiple of kv_heads, which is 3"),
        ({"head_dim": 31}, "head_dim is 31; expected an even number, for rotary positions"),
        ({"layer_types": (FULL,)}, f"layer_types is {(FULL,)!r}; expected one entry for each of 3 "
                                   "layers"),
        (
            {"layer_types": (FULL, FULL, "linear")},
            "layer_types is 'linear'; expected 'full_attention' or 'sliding_attention'",
        ),
        (
            {"layer_types": (SLIDING, FULL, FULL)},
            "window is None; expected a positive integer, as there are sliding layers",
        ),
        ({"rope_theta": 0.0}, "rope_theta is 0.0; expected a positive number"),
        ({"output_multiplier": -1.0}, "output_multiplier is -1.0; expected a positive number"),
        ({"rms_eps": float("nan")}, "rms_eps is nan; expected a number that is not negative"),
        (
            {"final_logit_softcapping": 0.0},
            "final_logit_softcapping is 0.0; expected a positive number or none",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(changes, what) -> None:
    refused(f"drafter 'tiny drafter': {what}", variant, **changes)


@pytest.mark.parametrize(
    ("key", "found", "expected"), [("hidden", 96, 64), ("vocab", 220, 203), ("layers", 6, 5)]
)
def test_another_targets_shape_is_refused(key, found, expected) -> None:
    shape = {"hidden": 64, "vocab": 203, "layers": 5}
    other = ModelConfig(
        name="other", heads=4, kv_heads=2, head_dim=32, ffn=96, context_tokens=99,
        **shape | {key: found},
    )  # fmt: skip
    DRAFTER.check_target(TARGET)
    ours = {"layers": "target_layers"}.get(key, key)
    refused(
        f"drafter 'tiny drafter': {ours} is {expected}; its target 'other' has {found}. "
        "Use the drafter that was trained for this target",
        DRAFTER.check_target,
        other,
    )


def test_fingerprints_tell_targets_apart_by_weights_and_shape() -> None:
    mine = fingerprint(target())
    assert re.fullmatch("sha256:[0-9a-f]{64}", mine)
    assert fingerprint(target()) == mine
    assert fingerprint(random_model(TARGET, seed=6)) != mine
    renamed = random_model(variant_target(name="renamed", context_tokens=7), seed=5)
    assert fingerprint(renamed) == mine
    # Drafters in the world name it: what a configuration learns to say must not change it.
    assert mine == "sha256:a3a29932e2cf1de06f41e2b2c55e67fae69089790812461ad0a804e181351ff0"
    for change in (
        {"rope_theta": 5e5}, {"qkv_bias": True}, {"qk_norm": True}, {"rope_scaling": Linear(2.0)},
        {"rope_scaling": Linear(3.0)},
    ):  # fmt: skip
        other = fingerprint(random_model(variant_target(**change), seed=5))
        assert other != mine, change
    for tensor in ("layers.0.q", "layers.2.v", "layers.4.down", "final_norm"):
        changed = random_model(TARGET, seed=5)
        changed.tensor(tensor).reshape(-1)[0] += 1
        assert fingerprint(changed) != mine


def variant_target(**changes) -> ModelConfig:
    return ModelConfig(**{**vars(TARGET), **changes})


YARNS = [
    {"factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
     "mscale": 1.0, "mscale_all_dim": 1.0},
    {"factor": 4.0, "original_max_position_embeddings": 32768},
    {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.707,
     "mscale_all_dim": 1.3},
    {"factor": 8.0, "original_max_position_embeddings": 2048, "mscale": 1.0,
     "mscale_all_dim": 0.0, "beta_fast": 8.0},
    {"factor": 16.0, "original_max_position_embeddings": 1024, "attention_factor": 1.25,
     "truncate": False},
]  # fmt: skip


@pytest.mark.parametrize("parameters", YARNS)
@pytest.mark.parametrize(("head_dim", "theta"), [(128, 5e4), (64, 1e6)])
def test_yarn_is_what_transformers_computes(parameters, head_dim, theta) -> None:
    values = published_values(variant(rope_theta=theta, head_dim=head_dim))
    del values["rope_parameters"]
    values["rope_scaling"] = {"type": "yarn", **parameters}
    config = read_published("yarn", values, None)
    assert config.yarn is not None
    theirs = Qwen3RotaryEmbedding(
        Qwen3Config(
            hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim,
            max_position_embeddings=1 << 17,
            rope_parameters={"rope_type": "yarn", "rope_theta": theta, **parameters},
        )
    )  # fmt: skip
    ours = inverse_frequencies(head_dim, theta, config.yarn)
    np.testing.assert_allclose(ours, theirs.inv_freq.numpy(), rtol=2e-6)
    assert config.yarn.multiplier == pytest.approx(theirs.attention_scaling, rel=1e-12)
    assert config.attention_scale == head_dim**-0.5  # YaRN acts through cosines and sines alone
    table = rotation_table(head_dim, theta, config.yarn, 3)
    assert table[0, 0] == pytest.approx(theirs.attention_scaling)
    assert table[0, 1] == pytest.approx(0)


def test_yarn_of_kimi_k2_drafters() -> None:
    """mscale equal to mscale_all_dim: no multiplier, whatever the factor."""
    both = Yarn(64.0, 4096, mscale=1.0, mscale_all_dim=1.0)
    assert both.multiplier == 1.0
    assert Yarn(64.0, 4096).multiplier == pytest.approx(0.1 * np.log(64) + 1)
    assert Yarn(1.0, 4096).multiplier == 1.0
    slow = both.slow_share(128, 5e4)
    assert slow[0] == 0 and slow[-1] == 1 and (np.diff(slow) >= 0).all()


def round_trip(config: DrafterConfig) -> None:
    assert read_published(config.name, published_values(config), None) == config
    assert DrafterConfig.from_dict(config.to_dict()) == config


def test_configurations_survive_both_formats() -> None:
    full = {"layer_types": (FULL,) * 3}
    round_trip(variant(**full))
    round_trip(variant(**full, prediction="next", target_fingerprint="sha256:12"))
    round_trip(
        variant(
            layer_types=(SLIDING, FULL, SLIDING), window=77, is_causal=False,
            yarn=Yarn(64.0, 4096, mscale=1.0, mscale_all_dim=1.0), rope_theta=5e4,
            final_logit_softcapping=20.0, output_multiplier=0.2, input_embedding_scale=3.0,
        )
    )  # fmt: skip


def published(**changes):
    """config.json of the tiny drafter with keys replaced; a key of the table as `table.key`."""
    values = published_values(DRAFTER)
    for key, value in changes.items():
        table, _, inner = key.rpartition("__")
        where = values["dflash_config"] if table else values
        if value is None:
            where.pop(inner, None)
        else:
            where[inner] = value
    return values


def test_where_published_checkpoints_keep_their_keys() -> None:
    top = {"target_layer_ids": [0, 2, 3], "mask_token_id": MASK_ID, "block_size": 8}
    values = published(**top)
    del values["dflash_config"]
    assert read_published("a", values, None) == read_published("a", published(), None)
    old = published(rope_parameters=None, rope_scaling=None, rope_theta=7.0)
    assert read_published("a", old, None).rope_theta == 7.0
    assert read_published("a", published(table__causal=True), None).is_causal is True
    layout = read_published(
        "a", published(table__sample_from_anchor=None, table__query_zero_predicts_next=True), None
    )
    assert layout.prediction == "next"
    assert read_published("a", published(num_target_layers=None), 9).target_layers == 9
    assert read_published("a", published(head_dim=None), None).head_dim == 16


MASK_ID = DRAFTER.mask_token_id


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (
            {"table__target_layer_ids": None},
            "target_layer_ids is missing from config.json; which layers are tapped is never "
            "guessed",
        ),
        ({"table__mask_token_id": None}, "mask_token_id is missing from config.json"),
        (
            {"table__block_size": None, "block_size": None},
            "block_size is missing from config.json",
        ),
        ({"table__block_size": 9}, "block_size is 8, but dflash_config.block_size is 9; expected "
                                   "one value"),
        ({"table__target_layer_ids": 3}, "target_layer_ids is 3; expected a list"),
        (
            {"num_target_layers": None},
            "num_target_layers is missing from config.json; name the target",
        ),
        (
            {"architectures": ["DFlash2DraftModel"]},
            "architectures is ['DFlash2DraftModel']; expected ['DFlashDraftModel']",
        ),
        (
            {"table__selector_rank": 256},
            "dflash_config.selector_rank is 256; this key is not supported",
        ),
        ({"attention_bias": True}, "attention_bias is True, which is not supported; expected "
                                   "False"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config is {'quant_method': 'fp8'}, which is not supported; expected none",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', which is not supported; expected 'silu'"),
        ({"draft_vocab_size": 100}, "draft_vocab_size is 100; expected vocab_size, 203"),
        ({"target_hidden_size": 65}, "target_hidden_size is 65; expected hidden_size, 64"),
        ({"rope_parameters": None, "rope_theta": None}, "rope_theta is missing from config.json"),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}},
            "rope_parameters.rope_type is 'llama3'; expected 'default' or 'yarn'",
        ),
        (
            {"rope_scaling": {"factor": 4.0}},
            "rope_parameters and rope_scaling.factor needs rope_type 'yarn'",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "alpha": 2}},
            "rope_parameters.alpha is 2; not supported",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 0.0,
                                 "original_max_position_embeddings": 2}},
            "rope_parameters: yarn factor is 0.0; it must be positive",
        ),
        ({"sliding_window": -1, "layer_types": [SLIDING] * 3}, "window is -1; expected a positive "
         "integer, as there are sliding layers"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing from config.json"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_published_configuration_is_named(changes, what) -> None:
    refused(f"drafter 'd': {what}", read_published, "d", published(**changes), None)
