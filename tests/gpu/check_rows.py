"""ROWS steps of scripted kernels against DECODE steps, and the drafter's context behind a prompt:

    python -m tests.gpu.check_rows DIR [preset ...]      (tests.gpu.kernels DIR decode-PRESET ...)
    python -m tests.gpu.check_rows DIR time [preset ...] (tests.gpu.kernels DIR timed-PRESET ...)

A line is a preset, rows and a context length n: what is wrong, or `ok` with the error of all nodes'
logits against fp32 on their own paths, ours and torch's in bf16, and their ratio on the worst path.
Equal to the bit: logits, results, features, keys and values of a tree and of DECODE steps over 16
of its rows, of a path row by row, of itself repeated.
With `time`: microseconds of DECODE and ROWS steps that decide.
"""

import functools
import pathlib
import random
import sys
import traceback

import numpy as np
import torch

from cute_kernels.gpu.load import Kernel
from cute_kernels.gpu.script import decode_step, prompt_step, rows_step
from cute_kernels.gpu.tree_rows import row_path
from tests.gpu import model as ref
from tests.gpu.kernels import SHAPES, small, timed
from tests.gpu.model import Context, Model
from tests.gpu.rig import relative
from tests.gpu.rows_case import bits_at, cover, make_rig, random_tree, subtree
from tests.gpu.test_rows import PROMPTS, TREES

ROOM = 192
WORST = 1.5  # times torch's error in bf16, the error of a single path


@functools.cache
def model_of(name):
    model = Model(small(name).shape, seed=11)
    return model, model.packed(small(name))


def equal(a, b) -> bool:
    return bool(torch.equal(a, b))


def same_records(a, b) -> bool:
    return all((a[f] == b[f]).all() for f in ("token", "logit", "logprob", "flags"))


class Tree:
    """One tree behind n committed keys, verified by a ROWS step."""

    def __init__(self, kernel, name: str, rows: int, n: int, seed: int) -> None:
        self.c, (self.model, packed) = small(name), model_of(name)
        self.rows, self.n, self.layers = rows, n, self.c.shape.layers
        rng = random.Random(seed)
        self.parents = random_tree(rows, rng)
        self.tokens = [rng.randrange(self.c.shape.vocab) for _ in range(rows)]
        self.ctx = Context(self.c.shape, n, ROOM, seed)
        self.rig, self.drafter = make_rig(kernel, self.c, self.model, packed, self.ctx)

    def verify(self):
        """(records, logits, features, keys and values) of a ROWS step."""
        self.rig.set_rows(self.tokens, self.n, self.parents)
        records = self.rig.run([rows_step(self.rows, self.n, self.layers, decide=False)])[0]
        return self.left(records, self.rows)

    def decode(self, tokens, parents, position, n):
        step = decode_step(tokens, position, self.layers, parents=parents)
        return self.left(self.rig.run([step])[0], n, position)

    def left(self, records, n, position=None):
        position = self.n if position is None else position
        return (
            records[:n], self.rig.logits[:n, : self.c.shape.vocab].clone(),
            self.drafter.features(n), bits_at(self.ctx.pool, self.ctx.pages, position, n),
        )  # fmt: skip

    def longest(self) -> list[int]:
        return max((row_path(self.parents, row) for row in range(self.rows)), key=len)

    def errors(self, logits: torch.Tensor) -> tuple[float, float, float]:
        """Of every node's logits against fp32 on its own path: relative L2, ours and of torch in
        bf16, over all paths from the root to a leaf; the largest ratio of the two of one path."""
        got, half, exact, ratios = [], [], [], []
        for leaf in set(range(self.rows)) - set(self.parents):
            path = row_path(self.parents, leaf)
            ids = torch.tensor([self.tokens[row] for row in path], device="cuda")
            got.append(logits[path])
            exact.append(ref.forward(self.model, self.ctx, ids, self.layers, ref.exact)["logits"])
            half.append(ref.forward_bf16(self.model, self.ctx, ids, self.layers).float())
            ratios.append(relative(got[-1], exact[-1]) / relative(half[-1], exact[-1]))
        true = torch.cat(exact)
        return relative(torch.cat(got), true), relative(torch.cat(half), true), max(ratios)


def differ(got, want, rows) -> list[str]:
    """What of `got`, rows 0, 1, ..., is not what `want` has for `rows`."""
    checks = {
        "results": same_records(got[0], want[0][rows]),
        "logits": equal(got[1], want[1][rows]),
        "features": equal(got[2], want[2][:, rows]),
        "keys": equal(got[3], want[3][..., rows, :]),
    }
    return [name for name, ok in checks.items() if not ok]


def check_tree(kernel, name: str, rows: int, n: int) -> str:
    tree = Tree(kernel, name, rows, n, seed=rows + n)
    first, wrong = tree.verify(), []
    if not bool(torch.isfinite(first[1]).all()):
        wrong.append("not finite")
    wrong += [f"repeat {x}" for x in differ(tree.verify(), first, list(range(rows)))]
    for mine in cover(tree.parents):
        tokens = [tree.tokens[row] for row in mine]
        got = tree.decode(tokens, subtree(tree.parents, mine), n, len(mine))
        wrong += [f"{x} of rows {mine[0]}..{mine[-1]}" for x in differ(got, first, mine)]
    path = tree.longest()
    for depth, row in enumerate(path):  # plain decoding
        got = tree.decode([tree.tokens[row]], [-1], n + depth, 1)
        wrong += [f"{x} at depth {depth}" for x in differ(got, first, [row])]
    wrong += [] if tree.rig.clean() else ["words left"]
    # another token for the last row with a child of its own: only it and what is below may change
    other = max(set(tree.parents[1:]), default=0)
    held = tree.tokens[other]
    tree.tokens[other] = (held + 1) % tree.c.shape.vocab
    changed = (tree.verify()[1] != first[1]).any(1).tolist()
    if changed != [other in row_path(tree.parents, row) for row in range(rows)]:
        wrong.append("rows meet")
    tree.tokens[other] = held
    if n:  # and another committed key: all may
        tree.ctx.pool[tree.ctx.pages[0].long(), 0, :, 0, 0] = 3.0
        if not bool((tree.verify()[1] != first[1]).any(1).all()):
            wrong.append("a key does not count")
    ours, theirs, worst = tree.errors(first[1])
    if not (ours <= theirs and worst < WORST):
        wrong.append("error")
    numbers = f"error {ours:.2e} torch {theirs:.2e}, of a path {worst:.2f}; depth {len(path) - 1}"
    return f"{'WRONG ' + '; '.join(wrong[:6]) if wrong else 'ok'}  {numbers}"


def check_context(kernel, name: str, rows: int, position: int) -> str:
    """Features and the drafter's keys behind a chunk of a prompt, and by DRAFT steps."""
    c, (model, packed) = small(name), model_of(name)
    ctx = Context(c.shape, 0, position + rows + ROOM, seed=1)
    rig, drafter = make_rig(kernel, c, model, packed, ctx)
    tokens = torch.randint(c.shape.vocab, (position + rows,), generator=model.gen, device="cuda")
    rig.tokens[: len(tokens)] = tokens
    layers, wrong = c.shape.layers, []
    chunks = [(rows, position)] if not position else [(position, 0), (rows, position)]
    rig.run([prompt_step(*chunk, layers) for chunk in chunks])
    features = drafter.features(rows)
    want = torch.stack(
        [ref.forward(model, ctx, tokens, tap + 1)["x"][position:] for tap in drafter.taps]
    )
    error = relative(features.view(torch.bfloat16).float(), want)
    if not error < 2e-2:
        wrong.append("features")
    keys = bits_at(drafter.pool, ctx.pages, position, rows)
    before = drafter.pool.clone()
    drafter.pool.view(torch.int16)[:] = -1
    drafter.give(rig, features, position)
    if not equal(bits_at(drafter.pool, ctx.pages, position, rows), keys):
        wrong.append("keys")
    if not bool(torch.isfinite(keys.view(torch.bfloat16)).all()):
        wrong.append("not finite")
    end = bits_at(before, ctx.pages, position + rows, 64)
    if not bool(end.view(torch.bfloat16).isnan().all()):
        wrong.append("keys beyond the chunk")
    return f"{'WRONG ' + '; '.join(wrong) if wrong else 'ok'}  features {error:.1e}"


def times(kernel, c, n: int) -> str:
    """Medians over steps of one launch: microseconds from the descriptor to the decision of row 0;
    and of chunks of a prompt at 1,024."""
    model = Model(c.shape, seed=11)
    packed, rng = model.packed(c), random.Random(1)
    ctx = Context(c.shape, n, 512, seed=2)
    rig, _ = make_rig(kernel, c, model, packed, ctx)
    out = []
    for rows in (1, 16, 32, 64, 128):
        parents = random_tree(rows, rng)
        tokens = [rng.randrange(c.shape.vocab) for _ in range(rows)]
        rig.set_rows(tokens, n, parents)
        step = rows_step(rows, n, c.shape.layers)
        if rows <= 16:
            step = decode_step(tokens, n, c.shape.layers, parents=parents, decide=True)
        ns = rig.run([step] * 12)["ns"][:, :rows]
        whole = np.median(ns[1:, 0] - ns[:-1, -1]) / 1000
        out.append(f"{rows} rows {whole:.0f}")
    for rows in (32, 256):  # a chunk between two steps of one row
        chunk = [prompt_step(rows, 1024, c.shape.layers), decode_step([1], n, c.shape.layers)]
        ns = rig.run([chunk[1], *[*chunk] * 8, chunk[1]])["ns"][:, 0]
        ns = ns[ns > 0]
        out.append(f"chunk of {rows} {(np.median(np.diff(ns)[:-1]) - np.diff(ns)[-1]) / 1000:.0f}")
    return "  ".join(out)


def line(what: str, check) -> bool:
    """Prints one; False where the context is lost."""
    try:
        result = check()
    except Exception as e:
        traceback.print_exc(limit=-2)
        result = f"WRONG {type(e).__name__}: {e}"
    print(f"{what}  {result}", flush=True)
    return not ("failed" in result or "CUDA" in result)


def main(folder: pathlib.Path, names: list[str]) -> None:
    if names[:1] == ["time"]:
        for name, c in timed().items():
            preset = name.removeprefix("timed-")
            if preset in (names[1:] or SHAPES) and (folder / f"{name}.json").exists():
                kernel = Kernel.read(folder / name)
                line(f"{preset:14s} us at 1000:", functools.partial(times, kernel, c, 1000))
                torch.cuda.empty_cache()
        return
    for name in names or SHAPES:
        if not (folder / f"decode-{name}.json").exists():
            continue
        kernel = Kernel.read(folder / f"decode-{name}")
        cases = [(check_tree, "rows", rows, n) for rows, n in TREES]
        cases += [(check_context, "prompt", rows, n) for rows, n in PROMPTS]
        for check, what, rows, n in cases:
            run = functools.partial(check, kernel, name, rows, n)
            if not line(f"{name:14s} {what:6s} {rows:3d} at {n:4d}", run):
                return
        model_of.cache_clear()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    torch.zeros(1, device="cuda")  # makes the context that kernels are loaded into
    torch.backends.cuda.matmul.allow_tf32 = False
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
