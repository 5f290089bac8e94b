"""Rows of a tree: as ROW_TABLE holds them, and as a descriptor of up to 16 rows does.

Free of cutlass; `nibbles` runs in the kernel as well.
"""

from collections.abc import Sequence

import numpy as np

from cute_kernels.gpu.board import FEW_ROWS, MAX_ROWS, PATH_BYTES, ROW_WORDS, Desc, RowWord


def nibbles(word):
    """Four bytes, each below 16, as four times 4 bits; the first stays lowest."""
    low = (word & 0xF) | ((word >> 4) & 0xF0)
    return low | ((word >> 8) & 0xF00) | ((word >> 12) & 0xF000)


def chain(n: int) -> list[int]:
    """Parents of n rows in a row."""
    return list(range(-1, n - 1))


def row_path(parents: Sequence[int], row: int) -> list[int]:
    """The rows from the root to `row`."""
    path = [row]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def row_table(
    tokens: Sequence[int], position: int, parents: Sequence[int] | None = None
) -> np.ndarray:
    """The table of a tree, int32 [MAX_ROWS, ROW_WORDS], whose root stands at `position`.

    parents: of the rows, earlier ones, -1 for the root alone; without them a chain. ValueError for
    a tree that has no place in the table.
    """
    n = len(tokens)
    parents = chain(n) if parents is None else parents
    if not 1 <= n <= MAX_ROWS:
        raise ValueError(f"a tree of {n} rows; a step has 1 to {MAX_ROWS}")
    table = np.zeros((MAX_ROWS, ROW_WORDS), np.int32)
    paths = table[:, RowWord.PATH :].view(np.uint8)
    for row in range(n):
        path = row_path(parents, row)
        if len(path) > PATH_BYTES:
            raise ValueError(f"row {row} is at depth {len(path) - 1}; {PATH_BYTES - 1} is the most")
        table[row, : RowWord.PATH] = (
            tokens[row],
            position + len(path) - 1,
            parents[row],
            len(path) - 1,
        )
        paths[row, : len(path)] = path
    return table


def put_rows(desc: np.ndarray, table: np.ndarray, rows: int) -> None:
    """The first `rows` of a table into a descriptor, int32: the host's mirror of descriptor.py."""
    words, found = desc.view(np.uint32), table.view(np.uint32)
    for row in range(min(rows, FEW_ROWS)):
        words[Desc.TOKEN + row] = found[row, RowWord.TOKEN]
        words[Desc.ROW_POSITION + row] = found[row, RowWord.POSITION]
        path = [nibbles(int(w)) for w in found[row, RowWord.PATH :]]
        words[Desc.PATH + 2 * row] = path[0] | path[1] << 16
        words[Desc.PATH + 2 * row + 1] = path[2] | path[3] << 16
