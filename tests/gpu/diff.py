"""Kernel and reference from the same random state, buffer by buffer:

    python -m tests.gpu.diff DIR NAME [--rows 5] [--first qkv.0] [--last head] [--repeat 2]

NAME: a kernel of tests.gpu.kernels that DIR holds, such as decode-odd-768. The phases from `first`
up to and with `last` run (`qkv.1` is qkv of layer 1; o includes the attention in front of it); what
the first of them reads is drawn at random, the residual begins as the rows' embeddings. Every
buffer that was written is compared with fp32 arithmetic that rounds to bf16 where the kernel does;
`repeat` launches must give equal bits. The exit status is 1 where something differs.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

import torch
import torch.nn.functional as F

from cute_kernels.gpu import pack
from cute_kernels.gpu.config import COPIES, LAYER_KINDS, Config
from cute_kernels.gpu.load import Kernel
from cute_kernels.gpu.script import decode_step
from tests.gpu.kernels import scripted
from tests.gpu.model import Context, Model, attend, column_order, factor, stored
from tests.gpu.rig import Rig, relative

READS = ("x", "q", "y", "h")  # of qkv, o, gu, down; the head reads x
WRITES = ("q", "y", "h", "x")
BOUND = 1e-2
State = dict[tuple[int, str], torch.Tensor]


def phase_of(text: str, layers: int) -> int:
    """`gu.3` -> its number; ValueError for what there is not."""
    kind, _, layer = text.partition(".")
    if kind == "head" and not layer:
        return 4 * layers
    if kind not in LAYER_KINDS or not layer.isdigit() or int(layer) >= layers:
        known = ", ".join(LAYER_KINDS)
        raise ValueError(f"{text!r} is no phase: {known} with .0 to .{layers - 1}, or head")
    return 4 * int(layer) + LAYER_KINDS.index(kind)


def reference(
    model: Model, ctx: Context | None, tokens: torch.Tensor, given: torch.Tensor | None,
    first: int, last: int,
) -> State:  # fmt: skip
    """What the phases first..last write, [rows, columns] fp32 by (layer, buffer).

    given: what the first phase reads (None: the embeddings). The head's logits are of layer -1.
    """
    s, residual, out = model.shape, model.embed[tokens].float(), State()
    now = {READS[first & 3] if first < 4 * s.layers else "x": given}
    if given is None:
        now = {"x": residual}
    for phase in range(first, last + 1):
        layer, kind = phase >> 2, phase & 3
        if layer == s.layers:
            x = now["x"]
            assert x is not None
            logits = stored(x * model.norm) @ model.head.float().T * factor(x, s.rms_eps)
            out[-1, "logits"] = logits
            continue
        w, value = model.matrices[layer][kind].float(), now[READS[kind]]
        assert value is not None
        if kind == 0:
            value = stored(value @ w.T * factor(value, s.rms_eps))
        elif kind == 1:
            a = value[:, : s.attended]
            if ctx is not None:
                a = out[layer, "a"] = attend(model, ctx, layer, value, stored)
            residual = residual + a @ w.T
            value = stored(residual)
        elif kind == 2:
            gu = value @ w.T * factor(value, s.rms_eps)
            value = stored(F.silu(gu[:, 0::2]) * gu[:, 1::2])
        else:
            residual = residual + value @ w.T
            value = stored(residual)
        now[WRITES[kind]] = out[layer, WRITES[kind]] = value
    return out


def draw(model: Model, first: int, rows: int) -> torch.Tensor | None:
    """What the first phase reads, as bf16 values in fp32; None for the embeddings."""
    s = model.shape
    if first == 0:
        return None
    name = READS[first & 3] if first < 4 * s.layers else "x"
    columns = dict(x=s.hidden, q=s.qkv, y=s.hidden, h=s.ffn)[name]
    return stored(model.noise(rows, columns))


def place(rig: Rig, given: torch.Tensor | None, first: int) -> None:
    """Everything EMPTY but what the first phase reads: x in the last copy, else in copy 0."""
    rig.reset()
    if given is None:
        return
    s, b = rig.c.shape, rig.b
    name = READS[first & 3] if first < 4 * s.layers else "x"
    at = (COPIES - 1) * b.bytes if name == "x" else 0
    if name == "q":
        given = given[:, column_order(rig.c)]
    full = torch.zeros(16, given.shape[1], device="cuda")
    full[: len(given)] = given
    flat = pack.to_fragments(full.bfloat16()).contiguous().view(torch.uint8)
    at += getattr(b, name)
    # rows the step does not have stay EMPTY: nobody may read them
    words = flat.view(-1, 2, 8, 64)
    target = rig.act[at : at + flat.numel()].view(-1, 2, 8, 64)
    for row in range(len(given)):
        target[:, row >> 3, row & 7] = words[:, row >> 3, row & 7]


def written(rig: Rig, rows: int, first: int, last: int) -> State:
    """What the kernel left: of the last layer, since a layer's copy is cleared in the next one."""
    s, out = rig.c.shape, State()
    layers = [p >> 2 for p in range(first, last + 1) if p < 4 * s.layers]
    begin = first >> 2
    for layer in layers[-1:]:
        found = rig.buffers(rows, (layer - begin) % COPIES)
        for phase in range(max(first, 4 * layer), min(last + 1, 4 * layer + 4)):
            out[layer, WRITES[phase & 3]] = found[WRITES[phase & 3]]
            if phase & 3 == 1 and rig.c.attention:
                out[layer, "a"] = found["a"]
    if last == 4 * s.layers:
        out[-1, "logits"] = rig.logits[:rows, : s.vocab].clone()
    return out


def compare(
    kernel: Kernel, c: Config, rows: int, first: int, last: int, repeat: int, committed: int = 200
) -> tuple[dict[str, float], bool]:
    """Relative L2 by buffer, and whether all launches gave the same bits."""
    model = Model(c.shape, seed=17)
    ctx = Context(c.shape, committed, 64, 18) if c.attention else None
    tokens = torch.randint(c.shape.vocab, (rows,), generator=model.gen, device="cuda")
    given = draw(model, first, rows)
    want = reference(model, ctx, tokens, given, first, last)
    step = decode_step(tokens.tolist(), committed, c.shape.layers, first=first, last=last + 1)
    rig, runs = Rig(kernel, c, model.packed(c), ctx), []
    for _ in range(repeat):
        place(rig, given, first)
        rig.run([step])
        runs.append(written(rig, rows, first, last))
    names = {key: key[1] if key[0] < 0 else f"{key[1]}.{key[0]}" for key in runs[0]}
    errors = {names[key]: relative(value, want[key]) for key, value in runs[0].items()}
    equal = all(torch.equal(runs[0][key], run[key]) for run in runs[1:] for key in run)
    return errors, equal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("name", choices=sorted(scripted()))
    parser.add_argument("--rows", type=int, default=5, choices=range(1, 17), metavar="1..16")
    parser.add_argument("--first", default="qkv.0")
    parser.add_argument("--last", default="head")
    parser.add_argument("--repeat", type=int, default=2)
    asked = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    c = scripted()[asked.name]
    first, last = (phase_of(text, c.shape.layers) for text in (asked.first, asked.last))
    if first > last:
        parser.error(f"{asked.first} comes after {asked.last}")
    kernel = Kernel.read(asked.folder / asked.name)
    errors, equal = compare(kernel, c, asked.rows, first, last, asked.repeat)
    for name, error in errors.items():
        print(f"{name:12s} {error:.1e} {'' if error < BOUND else 'DIFFERS'}")
    print(f"{asked.repeat} launches: {'equal bits' if equal else 'DIFFERENT BITS'}")
    return 0 if equal and max(errors.values()) < BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
