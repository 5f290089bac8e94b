"""The prompt segment: every part against fp32, bits that must not depend on chunking, poison.

Errors are compared with those of torch in bf16 on the same inputs in the same run."""

import functools

import pytest

from cute_kernels.gpu.config import SHAPES
from tests.gpu.kernels import small

ROWS = (1, 17, 33, 64, 200, 256)
PRESETS = tuple(SHAPES)
TWICE = 2.0  # at most this many times torch bf16's error


@functools.cache
def model_of(name):
    from tests.gpu.prompt_case import Model

    return Model(small(name), seed=11)


def case_of(name, positions, seed=5):
    from tests.gpu.prompt_case import PromptCase

    return PromptCase(small(name), model_of(name), positions, seed)


def references(name, case):
    import torch

    from tests.gpu.prompt_case import Reference

    torch.backends.cuda.matmul.allow_tf32 = False
    return [Reference(model_of(name), case.rope, t) for t in (torch.float32, torch.bfloat16)]


def draw(n, columns, seed, scale=1.0):
    import torch

    gen = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(n, columns, generator=gen, device="cuda") * scale).bfloat16()


def check(what, got, want, rival):
    """Ours at most twice as far from fp32 as torch bf16."""
    from tests.gpu.prompt_case import error

    ours, theirs = error(got, want), error(rival, want)
    print(f"{what}: ours {ours:.2e}, torch bf16 {theirs:.2e}")
    assert ours <= TWICE * theirs, (what, ours, theirs)


def untouched(case, name, rows):
    """Rows beyond the chunk are as they were: poison."""
    import torch

    from tests.gpu.prompt_case import POISON

    assert bool((case.rows_of(name)[rows:].view(torch.int16) == POISON).all()), name


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", PRESETS)
def test_parts_match_torch(load, name, rows):
    load(f"prompt-{name}-qkv")
    import torch

    position, layer = 64 * (rows % 5), 1
    case = case_of(name, position + 256, seed=rows)
    exact, rival = references(name, case)
    s = case.shape

    case.run_part(load, "embed", 0, rows, position)
    tokens = case.tokens[position : position + rows].long()
    want = model_of(name).embedding[tokens]
    assert torch.equal(case.rows_of("x")[:rows], want)
    assert torch.equal(case.residual()[:rows], want.float())
    untouched(case, "x", rows)

    x, residual = draw(rows, s.hidden, 1, 2.0), draw(rows, s.hidden, 2, 3.0).float() * 1.001
    case.set_rows("x", x)
    case.run_part(load, "qkv", layer, rows, position)
    check("qkv", case.rows_of("q")[:rows], *(r.qkv(layer, x) for r in (exact, rival)))
    untouched(case, "q", rows)

    case.set_rows("x", x)
    case.run_part(load, "gu", layer, rows, position)
    check("gu", case.rows_of("h")[:rows], *(r.gu(layer, x) for r in (exact, rival)))
    untouched(case, "h", rows)

    for part, source, columns in (("o", "a", s.attended), ("down", "h", s.ffn)):
        v = draw(rows, columns, 3)
        case.set_rows(source, v)
        case.set_residual(residual)
        case.set_rows("x", x[:0])
        case.run_part(load, part, layer, rows, position)
        want, theirs = (getattr(r, part)(layer, v, residual) for r in (exact, rival))
        check(part, case.rows_of("x")[:rows], want, theirs)
        assert torch.equal(case.residual()[:rows].bfloat16(), case.rows_of("x")[:rows])
        untouched(case, "x", rows)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", PRESETS)
def test_keys_and_attention_match_torch(load, name, rows):
    load(f"prompt-{name}-attention")
    position, layer = 64 * (rows % 7), 1
    case = case_of(name, position + 320, seed=rows)
    exact, rival = references(name, case)
    s, end = case.shape, position + rows
    qkv = draw(rows, s.qkv, 4)
    old = [draw(s.kv_heads * end, s.head_dim, 5 + i).reshape(s.kv_heads, end, -1) for i in (0, 1)]
    case.set_rows("q", qkv)
    case.set_keys_values(layer, *(x[:, :position] for x in old))
    before = case.pool.clone()
    case.run_part(load, "keys", layer, rows, position)
    k, v = case.keys_values(layer, end)
    _, want, value = exact.heads(layer, qkv, position)
    check("keys", k[:, position:], want, rival.heads(layer, qkv, position)[1])
    assert bool((v[:, position:] == value).all())
    assert bool((k[:, :position] == old[0][:, :position]).all())
    changed = (case.pool != before).flatten(3).any(-1)
    assert not bool(changed[case.free.long()].any())  # nobody's pages
    touched = case.pages[position // 64 : (end + 63) // 64].long()
    assert int(changed.sum()) == int(changed[touched, layer].sum())

    case.run_part(load, "attention", layer, rows, position)
    args = layer, qkv, k, v, position
    check("attention", case.rows_of("a")[:rows], exact.attention(*args), rival.attention(*args))
    untouched(case, "a", rows)


def run_chunks(load, name, length, sizes, seed=5):
    """A prompt from its tokens through all layers; returns the case."""
    from cute_kernels.gpu.prompt_plan import chunks_of

    case = case_of(name, length, seed)
    for position, rows in chunks_of(length, sizes):
        case.run(load(f"prompt-{name}-all"), rows, position)
    return case


@pytest.mark.parametrize("length", [1, 63, 256, 300, 701])
@pytest.mark.parametrize("name", PRESETS)
def test_segment_matches_torch(load, name, length):
    case = run_chunks(load, name, length, (256,))
    exact, rival = (r.forward(case.tokens) for r in references(name, case))
    rows = (length - 1) % 256 + 1
    check("x", case.residual()[:rows], exact[0][-rows:], rival[0][-rows:])
    for layer, (want, theirs) in enumerate(zip(exact[1], rival[1], strict=True)):
        for what, got, w, t in zip("kv", case.keys_values(layer, length), want, theirs, strict=True):
            check(f"{what} of layer {layer}", got, w, t)


@pytest.mark.parametrize("name", PRESETS)
def test_chunking_never_shows(load, name):
    """Keys and values of every layer are the same bits however a prompt is cut, wherever its pages
    lie, and on repetition; unwritten positions and free pages stay poison."""
    length, whole = 701, (256,)
    first = run_chunks(load, name, length, whole)
    from tests.gpu.prompt_case import POISON

    for sizes, seed in (((64, 192), 5), ((128,), 5), ((192, 64, 256), 5), (whole, 5)):
        case = run_chunks(load, name, length, sizes, seed)
        assert bool((case.pool == first.pool).all()), sizes
    assert bool((first.pool[first.free.long()] == POISON).all())
    last = first.pool[first.pages[-1].long()][:, :, :, length % 64 :]
    assert bool((last == POISON).all())
    other = case_of(name, length, seed=6)  # other pages
    other.tokens.copy_(first.tokens)
    for position in range(0, length, 256):
        other.run(load(f"prompt-{name}-all"), min(256, length - position), position)
    for layer in range(first.shape.layers):
        for a, b in zip(first.keys_values(layer, length), other.keys_values(layer, length), strict=True):
            assert bool((a == b).all()), layer


@pytest.mark.parametrize("name", PRESETS)
def test_rows_do_not_meet(load, name):
    """A row's keys depend on the tokens before it, not on what else is in its chunk."""
    case, alone = (case_of(name, 256) for _ in range(2))
    alone.tokens[100:] = 7
    case.run(load(f"prompt-{name}-all"), 256)
    alone.run(load(f"prompt-{name}-all"), 130)
    for layer in range(case.shape.layers):
        for a, b in zip(case.keys_values(layer, 100), alone.keys_values(layer, 100), strict=True):
            assert bool((a == b).all()), layer


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen3-8b"])
def test_long_context(load, name):
    """The last rows of 65,536 positions against fp32."""
    rows, position, layer = 200, 65536 - 256, 1
    case = case_of(name, 65536, seed=1)
    exact, rival = references(name, case)
    s, end = case.shape, position + rows
    qkv = draw(rows, s.qkv, 4)
    k, v = (draw(s.kv_heads * end, s.head_dim, 5 + i).reshape(s.kv_heads, end, -1) for i in (0, 1))
    case.set_rows("q", qkv)
    case.set_keys_values(layer, k, v)
    case.run_part(load, "attention", layer, rows, position)
    args = layer, qkv, k, v, position
    check("attention", case.rows_of("a")[:rows], exact.attention(*args), rival.attention(*args))
