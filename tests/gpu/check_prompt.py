"""The prompt segment against torch, as a table:

    python -m tests.gpu.check_prompt DIR [preset ...]      (tests.gpu.kernels builds DIR)

A line is a preset and a check; the checks are those of test_prompt.py. Errors are relative L2
against fp32 on the same inputs, over those of torch in bf16 in the same run (the bar is 2).
"""

import functools
import pathlib
import sys
import time
import traceback

import torch

from cute_kernels.gpu import pack
from cute_kernels.gpu.load import Kernel
from cute_kernels.gpu.prompt_plan import chunks_of
from cute_kernels.gpu.script import decode_step
from tests.gpu.kernels import SHAPES, matrices, small
from tests.gpu.prompt_case import POISON, Model, PromptCase, Reference, error
from tests.gpu.rig import Rig

ROWS = (1, 17, 33, 64, 200, 256)
LENGTHS = (1, 63, 256, 300, 701)
PRESETS = tuple(SHAPES)
TWICE = 2.0  # at most this many times torch bf16's error


@functools.cache
def model_of(name):
    return Model(small(name), seed=11)


def case_of(name, positions, seed=5):
    return PromptCase(small(name), model_of(name), positions, seed)


def references(name, case):
    torch.backends.cuda.matmul.allow_tf32 = False
    return [Reference(model_of(name), case.rope, t) for t in (torch.float32, torch.bfloat16)]


def draw(n, columns, seed, scale=1.0):
    gen = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(n, columns, generator=gen, device="cuda") * scale).bfloat16()


class Ratios(dict):
    """Our error over torch bf16's by what was compared; the worst of a name."""

    def note(self, what, got, want, rival):
        ours, theirs = error(got, want), error(rival, want)
        if not ours <= TWICE * theirs:
            raise AssertionError(f"{what}: error {ours:.2e}, torch in bf16 has {theirs:.2e}")
        self[what] = max(self.get(what, 0.0), ours / theirs)


def untouched(case, name, rows):
    """Rows beyond the chunk are as they were: poison."""
    assert bool((case.rows_of(name)[rows:].view(torch.int16) == POISON).all()), name


def same_keys(a, b, length):
    """Keys and values of all layers and positions are the same bits."""
    for layer in range(a.shape.layers):
        for x, y in zip(a.keys_values(layer, length), b.keys_values(layer, length), strict=True):
            assert bool((x == y).all()), f"layer {layer}"


def parts(load, name, rows):
    r = Ratios()
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
    r.note("qkv", case.rows_of("q")[:rows], *(m.qkv(layer, x) for m in (exact, rival)))
    untouched(case, "q", rows)

    case.set_rows("x", x)
    case.run_part(load, "gu", layer, rows, position)
    r.note("gu", case.rows_of("h")[:rows], *(m.gu(layer, x) for m in (exact, rival)))
    untouched(case, "h", rows)

    for part, source, columns in (("o", "a", s.attended), ("down", "h", s.ffn)):
        v = draw(rows, columns, 3)
        case.set_rows(source, v)
        case.set_residual(residual)
        case.set_rows("x", x[:0])
        case.run_part(load, part, layer, rows, position)
        want, theirs = (getattr(m, part)(layer, v, residual) for m in (exact, rival))
        r.note(part, case.rows_of("x")[:rows], want, theirs)
        assert torch.equal(case.residual()[:rows].bfloat16(), case.rows_of("x")[:rows])
        untouched(case, "x", rows)
    return r


def keys_and_attention(load, name, rows):
    r = Ratios()
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
    r.note("keys", k[:, position:], want, rival.heads(layer, qkv, position)[1])
    assert bool((v[:, position:] == value).all())
    assert bool((k[:, :position] == old[0][:, :position]).all())
    changed = (case.pool != before).flatten(3).any(-1)
    assert not bool(changed[case.free.long()].any())  # nobody's pages
    touched = case.pages[position // 64 : (end + 63) // 64].long()
    assert int(changed.sum()) == int(changed[touched, layer].sum())

    case.run_part(load, "attention", layer, rows, position)
    args = layer, qkv, k, v, position
    r.note("attention", case.rows_of("a")[:rows], exact.attention(*args), rival.attention(*args))
    untouched(case, "a", rows)
    return r


def run_chunks(load, name, length, sizes, seed=5):
    """A prompt from its tokens through all layers; returns the case."""
    case = case_of(name, length, seed)
    for position, rows in chunks_of(length, sizes):
        case.run(load(f"prompt-{name}-all"), rows, position)
    return case


def segment(load, name, length):
    r = Ratios()
    case = run_chunks(load, name, length, (256,))
    exact, rival = (m.forward(case.tokens) for m in references(name, case))
    rows = (length - 1) % 256 + 1
    r.note("x", case.residual()[:rows], exact[0][-rows:], rival[0][-rows:])
    for layer, (want, theirs) in enumerate(zip(exact[1], rival[1], strict=True)):
        for what, got, w, t in zip(
            "kv", case.keys_values(layer, length), want, theirs, strict=True
        ):
            r.note(f"{what} of layer {layer}", got, w, t)
    return r


def chunking(load, name):
    """Keys and values of every layer are the same bits however a prompt is cut, wherever its pages
    lie, and on repetition; unwritten positions and free pages stay poison."""
    length, whole = 701, (256,)
    first = run_chunks(load, name, length, whole)
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
    same_keys(first, other, length)


def rows_do_not_meet(load, name):
    """A row's keys depend on the tokens before it, not on what else is in its chunk."""
    case, alone = (case_of(name, 256) for _ in range(2))
    alone.tokens[100:] = 7
    case.run(load(f"prompt-{name}-all"), 256)
    alone.run(load(f"prompt-{name}-all"), 130)
    same_keys(case, alone, 100)


def same_as_decode(load, name):
    """Each matrix: what the decode form makes of 16 rows, bit for bit."""
    rows, layer, c = 200, 1, matrices(name)
    case, model = case_of(name, 256), model_of(name)
    s = case.shape
    rig = Rig(load(f"matrices-{name}"), c, model.packed())
    tokens = case.tokens[:rows]
    sources = {  # kernel's column order on both sides: q is the raw buffer
        "qkv": ("x", 2 * rig.b.bytes + rig.b.x, "q", rig.b.q, s.hidden, s.qkv),
        "o": ("a", rig.b.q, "x", rig.b.y, s.attended, s.hidden),
        "gu": ("x", rig.b.y, "h", rig.b.h, s.hidden, s.ffn),
        "down": ("h", rig.b.h, "x", rig.b.x, s.ffn, s.hidden),
    }
    for kind, (part, (source, at, target, to, k, n)) in enumerate(sources.items()):
        x = draw(rows, k, 7)
        case.set_rows(source, x)
        case.set_residual(model.embedding[tokens.long()].float())
        case.run_part(load, part, layer, rows)
        ours = case.raw_rows(target)
        for first in (0, 16, 96, 192):
            mine = slice(first, min(first + 16, rows))
            rig.reset()
            block = torch.zeros(16, k, dtype=torch.bfloat16, device="cuda")
            block[: mine.stop - first] = x[mine]
            words = pack.to_fragments(block).contiguous().view(torch.uint8)
            rig.act[at : at + len(words)] = words
            phase = 4 * layer + kind
            rig.run(
                [decode_step(tokens[mine].tolist(), first, s.layers, first=phase, last=phase + 1)]
            )
            theirs = pack.from_fragments(rig.act[to : to + n * 32].view(torch.int16))
            assert bool((theirs != POISON).any()), part
            same = theirs[: mine.stop - first] == ours[mine].view(torch.int16)
            assert bool(same.all()), f"{part}, rows from {first}: {int((~same).sum())} differ"


def long_context(load, name):
    """The last rows of 65,536 positions against fp32."""
    r = Ratios()
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
    r.note("attention", case.rows_of("a")[:rows], exact.attention(*args), rival.attention(*args))
    return r


CHECKS = {
    **{f"parts, {n} rows": functools.partial(parts, rows=n) for n in ROWS},
    **{f"attention, {n} rows": functools.partial(keys_and_attention, rows=n) for n in ROWS},
    **{f"segment, {n} tokens": functools.partial(segment, length=n) for n in LENGTHS},
    "chunking": chunking,
    "rows do not meet": rows_do_not_meet,
    "same as decode": same_as_decode,
    "65,536 positions": long_context,
}


def main(folder: pathlib.Path, presets: list[str]) -> None:
    loaded = functools.cache(lambda name: Kernel.read(folder / name))
    for name in presets or PRESETS:
        for what, check in CHECKS.items():
            start = time.perf_counter()
            try:
                r = check(loaded, name) or {}
                result = " ".join(f"{k} {v:.2f}" for k, v in r.items() if " of layer " not in k)
            except Exception as e:
                result = f"WRONG {type(e).__name__}: {e}"
                if not isinstance(e, AssertionError):
                    traceback.print_exc(limit=-2)
            print(
                f"{name:14s} {what:20s} {time.perf_counter() - start:5.1f} s  {result}", flush=True
            )
            if "failed" in result:  # the context is lost
                return
        model_of.cache_clear()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    torch.zeros(1, device="cuda")
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
