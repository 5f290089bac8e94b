"""The oracle itself: against transformers' Llama, and the meaning of masks, taps and positions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hf_models import transformers_model

from megadecode.config import ModelConfig
from megadecode.models.gguf_file import LoadedModel
from megadecode.models.random_model import random_model
from megadecode.reference import Reference
from tests.golden import read_golden

CONFIG = ModelConfig(
    name="tiny",
    layers=3,
    hidden=48,
    heads=6,
    kv_heads=2,
    head_dim=16,  # not hidden / heads
    ffn=80,
    vocab=97,
    context_tokens=256,
    rope_theta=700.0,
    rms_eps=1e-5,
    tied_embeddings=False,
)
TIED = replace(CONFIG, tied_embeddings=True, kv_heads=6)
TOKENS = np.random.default_rng(1).integers(0, CONFIG.vocab, 40)
# Two implementations of the same fp32 arithmetic in another order; logits are of size 1.
SAME = {"rtol": 1e-5, "atol": 2e-5}


def reference(config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float32) -> Reference:
    return Reference(config, random_model(config, 3).tensors(), dtype)


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied, grouped", "tied, ungrouped"])
def test_logits_and_taps_are_those_of_transformers(config: ModelConfig) -> None:
    """Tap l is hidden_states[l + 1]: one layer off in either direction would not pass."""
    model = transformers_model(random_model(config, 3))
    with torch.inference_mode():
        theirs = model(torch.from_numpy(TOKENS)[None], output_hidden_states=True)
    logits, features = reference(config).forward(TOKENS, taps=range(config.layers))
    torch.testing.assert_close(logits, theirs.logits[0], **SAME)
    assert features.shape == (len(TOKENS), config.layers, config.hidden)
    # Their last state has been through the final norm; the others are the residual stream.
    for layer in range(config.layers - 1):
        torch.testing.assert_close(features[:, layer], theirs.hidden_states[layer + 1][0], **SAME)
        assert not torch.allclose(features[:, layer], theirs.hidden_states[layer][0], atol=0.1)
    with torch.inference_mode():
        normed = model.model.norm(features[:, -1])
    torch.testing.assert_close(normed, theirs.hidden_states[-1][0], **SAME)


def test_taps_in_the_order_asked() -> None:
    _, features = reference().forward(TOKENS, taps=(0, 1, 2))
    _, other = reference().forward(TOKENS, taps=(2, 0))
    torch.testing.assert_close(other, features[:, [2, 0]], rtol=0, atol=0)


def test_bf16_as_close_to_fp32_as_transformers_is() -> None:
    """At most twice the error that transformers makes in bf16, from the same fp32 truth."""
    weights = random_model(CONFIG, 3)
    truth, _ = reference().forward(TOKENS)
    ours, features = reference(dtype=torch.bfloat16).forward(TOKENS, taps=(1,))
    assert ours.dtype == torch.float32
    assert features.dtype == torch.bfloat16
    with torch.inference_mode():
        model = transformers_model(weights, torch.bfloat16)
        theirs = model(torch.from_numpy(TOKENS)[None]).logits[0].float()
    ours_error, their_error = (ours - truth).abs().max(), (theirs - truth).abs().max()
    assert 0 < their_error < 0.2
    assert ours_error <= 2 * their_error


# -- masks, positions, cache ----------------------------------------------------------------------


def test_causal_mask_changes_nothing() -> None:
    mask = np.tril(np.ones((40, 40), bool))
    plain, _ = reference().forward(TOKENS)
    masked, _ = reference().forward(TOKENS, positions=np.arange(40), mask=mask)
    assert torch.equal(plain, masked)


def test_hidden_key_changes_exactly_the_rows_that_saw_it() -> None:
    mask = np.tril(np.ones((40, 40), bool))
    mask[20:, 0] = False
    plain, _ = reference().forward(TOKENS)
    masked, _ = reference().forward(TOKENS, mask=mask)
    torch.testing.assert_close(masked[:20], plain[:20], **SAME)
    assert ((masked[20:] - plain[20:]).abs().amax(1) > 1e-3).all()


def test_later_tokens_do_not_matter() -> None:
    other = TOKENS.copy()
    other[25:] = 5
    plain, _ = reference().forward(TOKENS)
    changed, _ = reference().forward(other)
    torch.testing.assert_close(changed[:25], plain[:25], **SAME)
    assert not torch.allclose(changed[25:], plain[25:], atol=0.1)


def test_positions_count() -> None:
    plain, _ = reference().forward(TOKENS)
    shifted, _ = reference().forward(TOKENS, positions=np.arange(40) + 17)
    torch.testing.assert_close(shifted, plain, rtol=1e-4, atol=1e-4)  # rotary is relative
    stretched, _ = reference().forward(TOKENS, positions=2 * np.arange(40))
    assert not torch.allclose(stretched, plain, atol=0.05)


def test_pieces_through_a_cache_are_the_whole() -> None:
    oracle = reference()
    plain, features = oracle.forward(TOKENS, taps=(1,))
    cache = oracle.cache(40)
    logits, taps = [], []
    for begin, end in ((0, 1), (1, 13), (13, 14), (14, 40)):
        piece, tapped = oracle.forward(TOKENS[begin:end], taps=(1,), cache=cache)
        logits.append(piece)
        taps.append(tapped)
    assert cache.rows == 40
    torch.testing.assert_close(torch.cat(logits), plain, **SAME)
    torch.testing.assert_close(torch.cat(taps), features, **SAME)


def test_tree_rows_equal_their_own_paths() -> None:
    """Each node of a tree over a cached prefix gets the logits of its path as plain text."""
    prefix, tree = TOKENS[:12], [7, 11, 12, 13, 14, 15]
    parents = [-1, 0, 0, 1, 2, 2]
    oracle = reference()
    mask = np.zeros((6, 18), bool)
    mask[:, :12] = True
    positions, paths = [], []
    for node in range(len(parents)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        mask[node, [12 + step for step in path]] = True
        positions.append(12 + len(path) - 1)
        paths.append([tree[step] for step in path])
    cache = oracle.cache(18)
    oracle.forward(prefix, cache=cache)
    logits, _ = oracle.forward(tree, positions, mask, cache=cache)
    for node, path in enumerate(paths):
        expected, _ = oracle.forward([*prefix, *path], logits_rows=[12 + len(path) - 1])
        torch.testing.assert_close(logits[node], expected[0], **SAME)
    assert not torch.allclose(logits[3], logits[4], atol=0.05)


def test_only_the_logits_asked_for() -> None:
    plain, _ = reference().forward(TOKENS)
    some, _ = reference().forward(TOKENS, logits_rows=[39, 3])
    torch.testing.assert_close(some, plain[[39, 3]], **SAME)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"positions": [0, 1]}, r"3 rows on 0 cached ones need positions \[3\]"),
        ({"mask": np.ones((3, 4), bool)}, r"not \[3\] and \[3, 4\]"),
        ({"mask": np.tril(np.ones((3, 3), bool), -1)}, r"a mask \[3, 3\] with no empty row"),
        ({"taps": (3,)}, "tap 3 is not one of the layers 0 to 2"),
        ({"taps": (-1,)}, "tap -1 is not one of the layers 0 to 2"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reference().forward([1, 2, 3], **arguments)


# -- greedy ---------------------------------------------------------------------------------------


def test_greedy_is_the_argmax_of_the_whole_text() -> None:
    oracle = reference()
    tokens, gaps = oracle.greedy(TOKENS[:5].tolist(), 20)
    assert len(tokens) == len(gaps) == 20
    logits, _ = oracle.forward([*TOKENS[:5], *tokens[:-1]])
    assert logits[4:].argmax(1).tolist() == tokens
    top = logits[4:].topk(2).values
    torch.testing.assert_close(top[:, 0] - top[:, 1], torch.tensor(gaps), rtol=1e-4, atol=1e-4)


def test_greedy_stops_after_a_stop_token() -> None:
    oracle = reference()
    tokens, _ = oracle.greedy([1, 2], 20)
    stop = tokens[4]
    first = tokens.index(stop)
    stopped, gaps = oracle.greedy([1, 2], 20, [stop, 96])
    assert stopped == tokens[: first + 1]
    assert len(gaps) == first + 1
    assert oracle.greedy([1, 2], 0) == ([], [])


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    """Two rows of the head made equal to the winner's: gap 0, and the lower id wins."""
    weights = dict(random_model(CONFIG, 3).tensors())
    (winner, *_), _ = Reference(CONFIG, weights).greedy([1, 2], 1)
    head = weights["head"].copy()
    low, high = (winner - 5) % CONFIG.vocab, (winner + 5) % CONFIG.vocab
    head[low] = head[high] = head[winner]
    (chosen, *_), (gap, *_) = Reference(CONFIG, weights | {"head": head}).greedy([1, 2], 1)
    assert chosen == min(low, high, winner)
    assert gap == 0.0


# -- the default model ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def default(model: LoadedModel) -> Reference:
    return Reference(model.config, model.tensors())


def check_golden(default: Reference, names: set[str]) -> None:
    golden = read_golden()
    for prompt in golden["prompts"]:
        if names and prompt["name"] not in names:
            continue
        ids, tokens = prompt["ids"], prompt["tokens"]
        rows = range(len(ids) - 1, len(ids) + len(tokens) - 1)
        logits, _ = default.forward([*ids, *tokens[:-1]], logits_rows=rows)
        top = logits.topk(2).values
        gaps = torch.tensor(prompt["gaps"])
        torch.testing.assert_close(top[:, 0] - top[:, 1], gaps, rtol=1e-4, atol=5e-4)
        clear = gaps > 1e-3
        assert torch.equal(logits.argmax(1)[clear], torch.tensor(tokens)[clear]), prompt["name"]
        assert len(tokens) == golden["max_new"]
        stops = [i for i, token in enumerate(tokens) if token in golden["stop_ids"]]
        assert prompt["stop_at"] == (stops[0] if stops else None)


def test_golden_of_three_prompts(default: Reference) -> None:
    check_golden(default, {"chat_capital", "digits_spaces", "whitespace"})


def test_golden_decoded_step_by_step(default: Reference) -> None:
    prompt = next(p for p in read_golden()["prompts"] if p["name"] == "chat_capital")
    tokens, gaps = default.greedy(prompt["ids"], 128, ())
    assert tokens == prompt["tokens"]
    np.testing.assert_allclose(gaps, prompt["gaps"], rtol=1e-4, atol=5e-4)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_golden_of_every_prompt(default: Reference) -> None:
    check_golden(default, set())
