"""Drafts and what the CPU device makes of them: buffers of one DRAFT step as numpy arrays.

A `Step` has the descriptor, the drafter's logits with what every CTA says about them, and the
arrays that the kernels of speculate_kernels.py write. Whoever runs a kernel takes `arrays` and
`numbers` (by arguments.Arg) and puts the arrays back; what is expected comes from cute_kernels.cpu.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from cute_kernels.cpu import topk
from cute_kernels.cpu.tree import build_tree, make_frontier, make_tree
from cute_kernels.gpu import board
from cute_kernels.gpu.board import (
    MAX_CTAS,
    MAX_ROWS,
    RANKS,
    ROW_WORDS,
    Board,
    Desc,
    Result,
    RowWord,
)
from cute_kernels.gpu.rank_plan import MOST, RANKED_BYTES, pack_candidates, unpack_candidates

ROWS, TAG = 16, 0x7FFFFFFF  # one before int32 wraps, as a step may be
WORKSPACE = topk.make_workspace(1, 1 << 18)


def results_of(logits: np.ndarray, ctas: int) -> np.ndarray:
    """int32 [rows, MAX_CTAS, 4] of board.Result: what CTAs say about equal shares of a row."""
    rows, columns = logits.shape
    share = -(-columns // ctas)
    x = np.full((rows, ctas * share), -np.inf, np.float32)
    x[:, :columns] = logits
    x = x.reshape(rows, ctas, share)
    wrong = ~(x < np.inf).all(2)
    top = np.where(wrong, np.float32(-np.inf), x.max(2))
    safe = np.where(top > -np.inf, top, np.float32(0))
    with np.errstate(invalid="ignore", over="ignore"):
        total = np.exp(x - safe[:, :, None]).sum(2, dtype=np.float32)
    first = (x == top[:, :, None]).argmax(2) + np.arange(ctas) * share
    out = np.full((rows, MAX_CTAS, 4), -1, np.int32)
    out[:, :ctas, Result.LOGIT] = top.view(np.int32)
    out[:, :ctas, Result.TOKEN] = np.where(top > -np.inf, first, 0x7FFFFFFF)
    out[:, :ctas, Result.SUM] = np.where(wrong, np.float32(0), total).view(np.int32)
    out[:, :ctas, Result.FLAGS] = wrong
    return out


@dataclass
class Step:
    """One DRAFT step behind the drafter's head. logits: fp32 [rows, columns] (of rows that do not
    predict too); tokens: int32 [columns], ascending, or None."""

    logits: np.ndarray
    budget: int = 16
    depth: int = 15
    chain: bool = False
    first_drafted: int = 1
    tokens: np.ndarray | None = None
    script: np.ndarray | None = None
    position: int = 1000
    root: int = 7
    ranked: np.ndarray | None = None  # candidates as given: pack_candidates
    arrays: dict[str, np.ndarray] = field(init=False)
    numbers: dict[str, int] = field(init=False)

    def prepare(self, ctas: int, stride: int) -> None:
        """Everything as it is when `rank.rank_rows` begins; logits beyond the columns are NaN."""
        rows, columns = self.logits.shape
        words = board.make_board()
        desc = dict(
            TAG=TAG, ROWS=rows, POSITION=self.position, COMMITTED=self.position,
            BUDGET=self.budget, DEPTH=self.depth, CHAIN=int(self.chain),
            FIRST_DRAFTED=self.first_drafted, TOKEN=self.root,
        )  # fmt: skip
        for name, value in desc.items():
            words[Desc[name]] = value
        words[Board.RESULT : Board.RESULT + rows * MAX_CTAS * 4] = results_of(
            self.logits, ctas
        ).ravel()
        logits = np.full((ROWS, stride), np.nan, np.float32)
        logits[:rows, :columns] = self.logits
        ranked = np.full((ROWS, RANKED_BYTES), 255, np.uint8)
        if self.ranked is not None:
            ranked[: len(self.ranked)] = self.ranked
            words[Board.RANK_TAG : Board.RANK_TAG + rows - self.first_drafted] = TAG
        self.arrays = dict(
            BOARD=words, DRAFT_LOGITS=logits, RANKED=ranked,
            ROW_TABLE=np.full((MAX_ROWS, ROW_WORDS), -1, np.int32),
            TIMES=np.zeros((ctas, 2), np.int64),
        )  # fmt: skip
        self.numbers = dict(DRAFT_COLUMNS=columns)
        if self.tokens is not None:
            self.arrays["DRAFT_TOKENS"] = np.ascontiguousarray(self.tokens, np.int32)
        if self.script is not None:
            self.arrays["DRAFT_SCRIPT"] = self.script

    @property
    def drafted(self) -> int:
        return len(self.logits) - self.first_drafted

    @property
    def want(self) -> int:
        return max(min(1 if self.chain else MOST, self.budget, MOST), 0)

    # -- what is expected
    def candidates(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, fp32 log-probabilities) of a drafted position, as the CPU ranks them."""
        row, n = self.logits[place + self.first_drafted], self.logits.shape[1]
        padded = np.zeros(-(-n // 16) * 16, np.float32)
        padded[:n] = row
        ids, logprobs = np.zeros(RANKS, np.int32), np.zeros(RANKS, np.float32)
        width = topk.top_k_sorted(padded, n, self.want, ids, logprobs, WORKSPACE, 0)
        if width:
            logprobs -= np.float32(topk.logsumexp(padded, n))
            if self.tokens is not None:
                ids = self.tokens[ids]
        return ids[:width], logprobs[:width]

    def tree(self) -> np.ndarray:
        """int32 [rows, ROW_WORDS], from the candidates that stand in RANKED."""
        ids, logprobs, widths = unpack_candidates(self.arrays["RANKED"][: self.drafted])
        nodes = max(min(self.budget, MOST), 0)
        tree, frontier = make_tree(nodes), make_frontier(nodes)
        build_tree(
            np.int32(self.root), ids, logprobs, widths, self.depth, self.budget, self.chain,
            tree, frontier,
        )  # fmt: skip
        n = int(tree.rows[0])
        out = np.zeros((n, ROW_WORDS), np.int32)
        out[:, RowWord.TOKEN], out[:, RowWord.PARENT] = tree.token[:n], tree.parent[:n]
        out[:, RowWord.DEPTH], out[:, RowWord.POSITION] = tree.depth[:n], self.position
        out[:, RowWord.POSITION] += tree.depth[:n]
        path = np.where(tree.path[:n] < 0, 0, tree.path[:n]).astype(np.uint8)
        out[:, RowWord.PATH :] = path.view(np.int32)
        return out

    # -- what came out
    def check_ranks(self) -> None:
        got_ids, got_logprobs, widths = unpack_candidates(self.arrays["RANKED"])
        for place in range(self.drafted):
            ids, logprobs = self.candidates(place)
            assert widths[place] == len(ids), (place, widths[place], len(ids))
            np.testing.assert_array_equal(got_ids[place, : len(ids)], ids, f"position {place}")
            scale = np.abs(self.logits[np.isfinite(self.logits)]).max(initial=1.0)
            np.testing.assert_allclose(
                got_logprobs[place, : len(ids)], logprobs, atol=1e-5 + 3e-7 * scale, rtol=2e-6
            )
        words = self.arrays["BOARD"]
        tags = words[Board.RANK_TAG : Board.RANK_TAG + ROWS]
        assert (tags[: self.drafted] == TAG).all() and (tags[self.drafted :] == 0).all()
        assert (words[Board.RESULT :] == -1).all(), "results are not all EMPTY again"

    def check_tree(self) -> None:
        want, words = self.tree(), self.arrays["BOARD"]
        assert words[Board.TREE_TAG] == TAG and words[Board.TREE_ROWS] == len(want)
        np.testing.assert_array_equal(self.arrays["ROW_TABLE"][: len(want)], want)
        assert (self.arrays["ROW_TABLE"][len(want) :] == -1).all()


# -- drafts --------------------------------------------------------------------------------------
SPECIAL = ("equal", "ascending", "descending", "crowd", "pairs", "few", "nan", "inf", "zeros")


def draft_row(rng: np.random.Generator, columns: int, kind: str) -> np.ndarray:
    """fp32 [columns] of one of many kinds."""
    x = rng.normal(0, rng.choice([0.1, 1.0, 4.0]), columns).astype(np.float32)
    if kind == "equal":
        x[:] = rng.choice([-3.5, 0.0, 11.25])
    elif kind in ("ascending", "descending"):
        x = np.sort(x)[:: 1 if kind == "ascending" else -1].copy()
    elif kind == "crowd":  # more equals on top than shared memory has room for
        x[rng.random(columns) < rng.choice([0.02, 0.2, 0.9])] = x.max()
    elif kind == "pairs":  # many ties everywhere
        x = np.round(x * 4) / 4
    elif kind == "few":
        x[rng.permutation(columns)[rng.integers(0, 40) :]] = -np.inf
    elif kind == "nan":
        x[rng.integers(columns)] = np.nan
    elif kind == "inf":
        x[rng.integers(columns)] = np.inf
    elif kind == "zeros":  # of both signs
        x = np.where(rng.random(columns) < 0.5, np.float32(0.0), np.float32(-0.0))
    return x


def drafts(n: int, widest: int, seed: int) -> Iterator[Step]:
    """Random steps: sizes, shapes, budgets, depths, chains, token lists; every other row plain."""
    rng = np.random.default_rng(seed)
    for _ in range(n):
        rows = int(rng.integers(1, ROWS + 1))
        small = int(rng.choice([1, 2, 3, 5, 17, 100, 1000]))
        columns = int(rng.choice([small, int(rng.integers(1, widest + 1)), widest]))
        first = int(rng.integers(0, 2)) if rows > 1 else 0
        kinds = [["plain", SPECIAL[rng.integers(len(SPECIAL))]][int(rng.random() < 0.4)]
                 for _ in range(rows)]  # fmt: skip
        tokens = None
        if rng.random() < 0.3:
            tokens = np.sort(rng.permutation(4 * columns)[:columns]).astype(np.int32)
        yield Step(
            np.stack([draft_row(rng, columns, kind) for kind in kinds]),
            budget=int(rng.choice([0, 1, 2, 7, 15, 16, 31, 63, 64, 126, 127])),
            depth=int(rng.choice([0, 1, 2, 3, 7, 14, 15])), chain=rng.random() < 0.15,
            first_drafted=first, tokens=tokens, position=int(rng.integers(0, 60000)),
            root=int(rng.integers(0, 3)),
        )  # fmt: skip


def ranked_steps(n: int, seed: int) -> Iterator[Step]:
    """Steps with candidates as given, ties and wrong values among them: for the tree alone."""
    rng = np.random.default_rng(seed)
    for i in range(n):
        rows, first = int(rng.integers(2, ROWS + 1)), int(rng.integers(0, 2))
        places, most = rows - first, int(rng.choice([1, 2, 5, 16, 64, MOST]))
        logits = rng.normal(0, rng.choice([0.3, 1.0, 3.0]), (places, most)).astype(np.float32)
        if i % 3 == 0:  # few different values: most decisions are ties
            logits = np.round(logits * 2) / 2
        if i % 11 == 0:
            logits[:] = 0
        logprobs = -np.sort(-(logits - np.log(np.exp(logits).sum(1, keepdims=True) + 1)), axis=1)
        logprobs = logprobs.astype(np.float32)
        widths = np.where(rng.random(places) < 0.9, most, rng.integers(0, most + 1, places))
        if i % 7 == 0:
            bad = (int(rng.integers(places)), int(rng.integers(most)))
            logprobs[bad] = rng.choice([np.nan, np.inf, -np.inf])
        if i % 13 == 0:
            logprobs[:, most // 2 :] = -np.inf
        ids = rng.integers(0, 150000, (places, most)).astype(np.int32)
        yield Step(
            np.zeros((rows, 1), np.float32),
            budget=int(rng.choice([0, 1, 7, 15, 16, 31, 63, 100, 127])),
            depth=int(rng.choice([0, 1, 3, 7, 14, 15])), chain=rng.random() < 0.15,
            first_drafted=first, ranked=pack_candidates(ids, logprobs, widths),
            position=int(rng.integers(0, 60000)),
        )  # fmt: skip
