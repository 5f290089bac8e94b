"""The drafter's oracle: what a block row sees, where it stands, what it predicts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_drafter import DRAFTER, MASK, drafter, module, random_features, variant
from transformers import Qwen3Config, Qwen3Model

from megadecode.drafter import Yarn

SLIDING = {"layer_types": ("sliding_attention",) * 3, "window": 5}


def features(config, n, seed=0):
    return torch.from_numpy(random_features(config, n, seed))


def seen(config, n, layer=0):
    """[block, n + block] bool: what the rows of a block at n see."""
    made = module(drafter(config))
    rows = torch.arange(n, n + config.block_size)
    one = torch.zeros(config.block_size, dtype=torch.int64)
    return made.visible(layer, rows, one, torch.tensor([n]), torch.arange(n)).numpy()


def test_masks() -> None:
    q, k = np.arange(9, 17)[:, None], np.arange(17)[None, :]
    assert seen(DRAFTER, 9).all()
    np.testing.assert_array_equal(seen(variant(is_causal=True), 9), k <= q)
    np.testing.assert_array_equal(seen(variant(**SLIDING), 9), (k <= q) & (q - k < 5))
    both_ways = seen(variant(**SLIDING, is_causal=False), 9)
    np.testing.assert_array_equal(both_ways, np.abs(q - k) < 5)


def test_without_context_it_is_qwen3() -> None:
    """Block rows alone, causal: transformers' layers with the same weights, windows, YaRN."""
    yarn = {"factor": 4.0, "original_max_position_embeddings": 16}
    kinds = ("sliding_attention", "full_attention", "sliding_attention")
    config = variant(
        layer_types=kinds, window=5, is_causal=True, yarn=Yarn(4.0, 16), rope_theta=100.0
    )
    ours = drafter(config)
    theirs = Qwen3Model(
        Qwen3Config(
            hidden_size=64, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, vocab_size=203, rms_norm_eps=1e-6,
            layer_types=list(kinds), sliding_window=5, use_sliding_window=True,
            rope_parameters={"rope_type": "yarn", "rope_theta": 100.0, **yarn},
            attn_implementation="eager",
        )
    ).eval()  # fmt: skip
    weights = {n: torch.from_numpy(v) for n, v in ours.tensors().items()}
    left = theirs.load_state_dict(weights, strict=False)
    assert left.missing_keys == ["embed_tokens.weight"]
    assert left.unexpected_keys == ["fc.weight", "hidden_norm.weight"]
    made, tokens = module(ours), torch.arange(8)[None]
    with torch.no_grad():
        want = theirs(inputs_embeds=made.embed[tokens]).last_hidden_state
    got = made(torch.zeros(0, 3, 64), tokens, torch.tensor([0]))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_context_keys_and_values_are_projected_without_the_layers_norm() -> None:
    """A block that sees one context position only through v: by hand, in float64."""
    config = variant(layers=1)
    ours = drafter(config)
    made = module(ours, torch.float64)
    t = {name: torch.from_numpy(v).double() for name, v in ours.tensors().items()}
    f = features(config, 1).double()

    def norm(x, gain):
        return x * (x.pow(2).mean(-1, keepdim=True) + config.rms_eps).rsqrt() * gain

    c = norm(f.flatten(1) @ t["fc.weight"].T, t["hidden_norm.weight"])
    tokens = torch.tensor([4] + [MASK] * 7)
    x = made.embed[tokens]
    u = norm(x, t["layers.0.input_layernorm.weight"])
    at = "layers.0.self_attn."
    k = (torch.cat([c, u]) @ t[at + "k_proj.weight"].T).view(9, 2, 32)
    v = (torch.cat([c, u]) @ t[at + "v_proj.weight"].T).view(9, 2, 32)
    q = norm((u @ t[at + "q_proj.weight"].T).view(8, 4, 32), t[at + "q_norm.weight"])
    k = norm(k, t[at + "k_norm.weight"])

    def turned(x, positions):
        angle = positions[:, None] * 10000.0 ** (-torch.arange(16).double() / 16)
        z = torch.complex(x[..., :16], x[..., 16:]) * torch.polar(angle * 0 + 1, angle)[:, None]
        return torch.cat([z.real, z.imag], -1)

    q, k = turned(q, torch.arange(1.0, 9.0).double()), turned(k, torch.arange(9.0).double())
    out = torch.zeros(8, 4, 32).double()
    for head in range(4):
        weights = (q[:, head] @ k[:, head // 2].T / 32**0.5).softmax(-1)
        out[:, head] = weights @ v[:, head // 2]
    x = x + out.flatten(1) @ t[at + "o_proj.weight"].T
    y = norm(x, t["layers.0.post_attention_layernorm.weight"])
    m = "layers.0.mlp."
    gate, up = y @ t[m + "gate_proj.weight"].T, y @ t[m + "up_proj.weight"].T
    x = x + (torch.nn.functional.silu(gate) * up) @ t[m + "down_proj.weight"].T
    want = norm(x, t["norm.weight"]) @ made.head.T
    torch.testing.assert_close(made.draft(f, 4, 1), want[1:], rtol=1e-9, atol=1e-9)


def test_a_hidden_position_changes_nothing_and_a_seen_one_does() -> None:
    config = variant(layers=1, layer_types=("sliding_attention",), window=9)
    made, plain = module(drafter(config)), features(config, 20)
    before = made.draft(plain, 3, 20)
    for position in range(20):
        changed = plain.clone()
        changed[position] += 1
        after = made.draft(changed, 3, 20)
        rows = (before != after).any(1).numpy()
        np.testing.assert_array_equal(rows, np.arange(21, 28) - position < 9)


def test_the_anchor_stands_in_row_0() -> None:
    """An all-MASK block is another input with another result."""
    made, f = module(drafter()), features(DRAFTER, 30)
    one, other, mask = (made.draft(f, token, 30) for token in (5, 6, MASK))
    assert not torch.equal(one, other)
    assert not torch.equal(one, mask)
    tokens = torch.tensor([[5] + [MASK] * 7])
    by_hand = made.logits(made(f, tokens, torch.tensor([30]))[0])
    torch.testing.assert_close(one, by_hand[1:], rtol=1e-4, atol=1e-5)


def test_layouts_take_their_rows() -> None:
    same, following = drafter(DRAFTER), drafter(variant(prediction="next"))
    f = features(DRAFTER, 12)
    rows = module(following).draft(f, 9, 12)
    assert rows.shape == (8, 203)
    torch.testing.assert_close(module(same).draft(f, 9, 12), rows[1:], rtol=1e-4, atol=1e-5)


def test_many_blocks_in_one_pass_draft_as_each_alone() -> None:
    """No block sees another, nor features at or after its own anchor."""
    for config in (DRAFTER, variant(**SLIDING), variant(**SLIDING, is_causal=False)):
        made, f = module(drafter(config)), features(config, 40)
        anchors = [1, 7, 8, 39, 40]
        tokens = torch.full((5, config.block_size), MASK)
        tokens[:, 0] = torch.arange(5)
        together = made.logits(made(f, tokens, torch.tensor(anchors))[:, config.first_row :])
        for i, n in enumerate(anchors):
            alone = made.draft(f[:n], i, n)
            torch.testing.assert_close(together[i], alone, rtol=1e-4, atol=1e-4)


def test_logits_are_scaled_and_capped() -> None:
    plain = module(drafter())
    changed = module(drafter(variant(output_multiplier=0.5, final_logit_softcapping=2.0)))
    f = features(DRAFTER, 6)
    want = 2 * torch.tanh(plain.draft(f, 1, 6) * 0.5 / 2)
    torch.testing.assert_close(changed.draft(f, 1, 6), want)
    scaled = module(drafter(variant(input_embedding_scale=2.0)))
    doubled = module(drafter())
    doubled.embed.mul_(2)
    torch.testing.assert_close(scaled.draft(f, 1, 6), doubled.draft(f, 1, 6))


def test_it_can_be_trained() -> None:
    made = module(drafter()).requires_grad_(True)
    f, tokens = features(DRAFTER, 20), torch.full((2, 8), MASK)
    made.logits(made(f, tokens, torch.tensor([5, 20]))).logsumexp(-1).sum().backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    assert made.state_dict().keys() == drafter().tensors().keys()


def test_features_of_exactly_the_committed_positions() -> None:
    made, f = module(drafter()), features(DRAFTER, 5)
    for n in (4, 6):
        with pytest.raises(ValueError, match=f"drafting at position {n} needs features of {n} pos"):
            made.draft(f, 1, n)
    with pytest.raises(ValueError, match="1 at least"):
        made.draft(f[:0], 1, 0)
