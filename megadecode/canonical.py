"""Canonical order: the one arithmetic of a row's attention, in plain float32 numpy.

A row at position p sees the keys 0..p along its own path: the committed ones below the tree's root,
then its ancestors in the tree, then itself. Let c = 64 * floor(max(p - 15, 0) / 64). No tree goes
deeper than 15, so every key below c is committed whatever the tree. Those are summed in blocks of
64 at absolute positions, `SPLIT_BLOCKS` blocks to a split, and the splits are merged in ascending
order. The keys c..p follow one by one in order of position, wherever they are stored, and are
merged last. So the result depends on p and on what the row sees alone: not on where the committed
part ends, on the shape of the tree, or on the rows beside it. Speculation cannot change a bit.

This is the CPU device's order. The GPU kernel keeps the same cut at c, but deals blocks to splits
in turn and sums the keys c..p in groups of 32 by position (cute_kernels/gpu/attention.py).
Exponentials and fused operations may differ too, so either is compared with this page within
rounding, and with itself bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK = 64
DEEPEST = 15
SPLIT_BLOCKS = 8

Vector = NDArray[np.float32]


class Partial(NamedTuple):
    """Softmax over some keys, not yet normalised: weights are exp(score - top)."""

    top: np.float32
    weight: np.float32
    sums: Vector  # [D]: weighted values


def tail_start(position: int) -> int:
    """c(p): the first key that is taken one by one; a multiple of 64, at most 79 before the end."""
    return BLOCK * (max(position - DEEPEST, 0) // BLOCK)


def exp(x: np.float32) -> np.float32:
    return np.float32(math.exp(x))


def nothing(size: int) -> Partial:
    """The softmax over no keys; merging it changes no bit."""
    return Partial(np.float32(-np.inf), np.float32(0), np.zeros(size, np.float32))


def score(q: Vector, key: Vector) -> np.float32:
    """q . key, one dimension after the other."""
    total = np.float32(0)
    for a, b in zip(q, key):
        total = total + a * b
    return total


def take(q: Vector, keys: Vector, values: Vector) -> Partial:
    """Some keys and their values, both [keys, D], one after the other."""
    scores = [score(q, key) for key in keys]
    top = max(scores)
    weight, sums = np.float32(0), np.zeros(values.shape[1], np.float32)
    for s, value in zip(scores, values):
        p = exp(s - top)
        weight = weight + p
        sums = sums + p * value
    return Partial(top, weight, sums)


def merge(a: Partial, b: Partial) -> Partial:
    """Both sets of keys, a's before b's; one of them holds at least one key."""
    top = max(a.top, b.top)
    old, new = exp(a.top - top), exp(b.top - top)
    return Partial(top, a.weight * old + b.weight * new, a.sums * old + b.sums * new)


def attend(q: Vector, keys: Vector, values: Vector, root: int, path: Sequence[int]) -> Vector:
    """One row of one head: softmax(q . keys) values over what the row sees, [D].

    q: [D], already scaled. keys, values: [slots, D], where a committed position lies at its own
    number and row i of the tree at `root + i`; other slots are not read. root: position of the
    tree's root, which is the number of committed keys. path: the rows from the root (0) to the row
    itself; its position is root + len(path) - 1. Raises ValueError for a path longer than 16 rows.
    """
    if not 1 <= len(path) <= DEEPEST + 1 or path[0] != 0:
        raise ValueError(f"a path is 1 to {DEEPEST + 1} rows and begins with 0, not {path}")
    slots = [*range(root), *(root + row for row in path)]
    start = tail_start(len(slots) - 1)

    total = nothing(values.shape[1])
    for split in range(0, start, SPLIT_BLOCKS * BLOCK):
        part = nothing(values.shape[1])
        for block in range(split, min(split + SPLIT_BLOCKS * BLOCK, start), BLOCK):
            here = slice(block, block + BLOCK)
            part = merge(part, take(q, keys[here], values[here]))
        total = merge(total, part)
    tail = take(q, keys[slots[start:]], values[slots[start:]])
    total = merge(total, tail)
    return total.sums / total.weight
