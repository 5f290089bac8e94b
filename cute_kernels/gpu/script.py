"""Scripts for scripted.py and what it writes, as numpy arrays. Free of cutlass."""

from collections.abc import Sequence

import numpy as np

from cute_kernels.gpu.board import FEW_ROWS, Desc, Segment
from cute_kernels.gpu.tree_rows import put_rows, row_table

SCRIPT_WORDS = 96
FREE = 1  # the first token is the one that the step before gave for its row 0
TREE = 2  # rows, and whether it is a DECODE or a ROWS step, are those of the last DRAFT step's tree

RECORD = np.dtype(
    [("token", "i4"), ("logit", "f4"), ("logprob", "f4"), ("flags", "i4"), ("ns", "i8"), ("", "i8")]
)
"""Of a row. Of a step that decides its rows there is no logit (NaN). Row 0 of a DRAFT step with
rows has the rows of its tree as token. `ns`: when the service warp had it."""


def _step(kind: Segment, rows: int, position: int, phases: tuple[int, int]) -> np.ndarray:
    d = np.zeros(SCRIPT_WORDS, np.int32)
    d[Desc.KIND], d[Desc.ROWS] = kind, rows
    d[Desc.POSITION] = d[Desc.COMMITTED] = position
    d[Desc.FIRST_PHASE], d[Desc.LAST_PHASE] = phases
    return d


def decode_step(
    tokens, position: int, layers: int, *, parents=None, free=False, first=0, last=None,
    decide=False,
) -> np.ndarray:  # fmt: skip
    """The descriptor of a DECODE step, int32 [SCRIPT_WORDS].

    tokens: 1 to 16. position: keys below it are in the pages, and it is the first row's. parents:
    of the rows, earlier ones, -1 for the root (default: a chain). decide: the CTAs decide the rows.
    """
    last = 4 * layers + 1 if last is None else last
    d = _step(Segment.DECODE, len(tokens), position, (first, last))
    put_rows(d, row_table(tokens, position, parents), len(tokens))
    d[Desc.TAG], d[Desc.DECIDE] = FREE if free else 0, int(decide)
    return d


def rows_step(rows: int, position: int, layers: int, *, decide=True) -> np.ndarray:
    """The descriptor of a ROWS step over the first `rows` of the table that the launch is given
    (`tree_rows.row_table`), its root at `position`."""
    d = _step(Segment.ROWS, rows, position, (0, 4 * layers + 1))
    d[Desc.DECIDE] = int(decide)
    return d


def tree_step(position: int, layers: int, *, decide=True) -> np.ndarray:
    """The step that verifies the tree of the DRAFT step before it: DECODE up to 16 rows, else
    ROWS."""
    d = rows_step(0, position, layers, decide=decide)
    d[Desc.TAG] = TREE
    return d


def draft_phases(layers: int, taps: int, draft_layers: int) -> tuple[int, int]:
    """The drafter's phases, see core.Core."""
    first = 4 * layers + 1
    return first, first + taps + 1 + 4 * draft_layers + 1


def draft_step(
    tokens: Sequence[int], position: int, phases: tuple[int, int], *, context: Sequence[int] = (),
    budget: int = 15, depth: int | None = None, chain=False, first_drafted: int = 1, free=False,
) -> np.ndarray:  # fmt: skip
    """The descriptor of a DRAFT step.

    tokens: the block, the anchor and then MASK; none: compaction and context alone. position: the
    anchor's. phases: `draft_phases`. context: rows of the last step, ascending, that the positions
    before the anchor were. depth: by default as deep as the block goes.
    """
    n = len(tokens)
    if n > FEW_ROWS or len(context) > FEW_ROWS:
        raise ValueError(f"a block of {n} rows behind {len(context)} new ones; 16 is the most")
    d = _step(Segment.DRAFT, n, position, phases)
    d[Desc.CONTEXT], d[Desc.BUDGET], d[Desc.CHAIN] = len(context), budget, int(chain)
    d[Desc.DEPTH] = max(n - first_drafted, 0) if depth is None else depth
    d[Desc.FIRST_DRAFTED], d[Desc.TAG] = first_drafted, FREE if free else 0
    d[Desc.TOKEN : Desc.TOKEN + n] = tokens
    d[Desc.ROW_POSITION : Desc.ROW_POSITION + n] = position + np.arange(n)
    d[Desc.ACCEPTED : Desc.ACCEPTED + len(context)] = context
    return d


def prompt_step(rows: int, position: int, layers: int) -> np.ndarray:
    """The descriptor of a PROMPT step: `rows` tokens from `position` (a multiple of 64) on."""
    return _step(Segment.PROMPT, rows, position, (0, 4 * layers))


def as_script(steps: Sequence[np.ndarray]) -> np.ndarray:
    """int32 [steps, SCRIPT_WORDS]; a step that does not say what follows it says what does."""
    script = np.stack(steps)
    for i, kind in enumerate([*script[1:, Desc.KIND], Segment.DECODE]):
        script[i, Desc.NEXT] = script[i, Desc.NEXT] or kind
    return script
