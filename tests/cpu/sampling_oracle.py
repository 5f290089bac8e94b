"""Requests, rows, and the slow and obvious version of what the sampling code does."""

from __future__ import annotations

from typing import Any

import numpy as np

from cute_kernels.cpu.noise import GROUP, noise_of_group
from cute_kernels.cpu.sampling import _filter, decide, softmax_weights
from cute_kernels.cpu.simd import pointer
from cute_kernels.cpu.topk import MASS, Workspace, make_workspace
from cute_kernels.cpu.vecmath import argmax
from host.jit import jit
from host.wire import SAMPLING


@jit
def _noise_row(seed, position, out):
    for group in range(out.size // GROUP):
        noise_of_group(seed, position, group, out[group * GROUP :])


def noise_row(seed: int, position: int, tokens: int) -> np.ndarray:
    """`[tokens]` uint32: the numbers of tokens 0, 1, ... at a position, as the device has them."""
    out = np.zeros(-(-tokens // GROUP) * GROUP, np.uint32)
    _noise_row(seed, position, out)
    return out[:tokens]


def padded(row: np.ndarray) -> np.ndarray:
    """The row, and NaN up to the next multiple of 16: nothing may depend on that."""
    out = np.full(-(-row.size // 16) * 16, np.nan, np.float32)
    out[: row.size] = row
    return out


def request(**values: Any) -> np.ndarray:
    """A `SAMPLING` record for one request, in an array of one; `bias` is a dict."""
    record = np.zeros(1, SAMPLING)
    record["temperature"], record["top_p"] = 1, 1
    bias = values.pop("bias", {})
    record["bias_count"] = len(bias)
    record["bias_ids"][0, : len(bias)] = list(bias)
    record["bias"][0, : len(bias)] = list(bias.values())
    for name, value in values.items():
        record[name] = value
    return record


def poisoned(vocab: int) -> Workspace:
    space = make_workspace(1, vocab)
    for part in space:
        part[:] = 0x7FC00001 if part.dtype.kind in "iu" else np.nan
    return space


@jit
def weights_of(z, vocab, params, weight, space):
    """Weights before and after the filters, as `decide` makes them."""
    top = argmax(pointer(z, 0), vocab)
    temperature = np.float64(params[0].temperature)
    inverse = np.float32(1.0 / temperature)
    softmax_weights(pointer(z, 0), vocab, z[top], inverse, pointer(space.weight, 0))
    for i in range(vocab):
        weight[i] = space.weight[0, i]
    _filter(z[:vocab], z[top], params[0], space, 0)


def choose(row: np.ndarray, params: np.ndarray, position: int) -> tuple[int, np.float32]:
    token, logprob = decide(padded(row), row.size, params[0], position, poisoned(row.size), 0)
    return int(token), np.float32(logprob)


def biased(row: np.ndarray, params: np.ndarray) -> np.ndarray:
    z = row.copy()
    for i in range(params["bias_count"][0]):
        z[params["bias_ids"][0, i]] += params["bias"][0, i]
    return z


def oracle(z: np.ndarray, params: np.ndarray, weights: np.ndarray | None = None) -> set[int]:
    """The tokens that the filters leave, by a full sort.

    In float64; with `weights`, the device's own, top-p is counted in exact integers of them.
    """
    p = params[0]
    order = np.lexsort((np.arange(z.size), -z.astype(np.float64)))
    order = order[z[order] > -np.inf]
    scaled = (z[order].astype(np.float64) - z[order[0]]) / np.float64(p["temperature"])
    chance = np.exp(scaled)
    if weights is not None:
        chance = np.array([int(float(w) * MASS) for w in weights[order]], object)
    n = order.size
    if p["top_k"] > 0:
        n = min(n, int(p["top_k"]))
    if p["top_p"] < 1:
        limit, before = float(p["top_p"]) * float(chance[:n].sum()), 0
        for i in range(n):
            if before >= limit and i > 0:
                n = i
                break
            before += chance[i]
    if p["min_p"] > 0:
        n = min(n, int((scaled >= np.log(np.float64(p["min_p"]))).sum()))
    return set(order[:n].tolist())


def race(z: np.ndarray, kept: set[int], params: np.ndarray, position: int) -> int:
    """The kept token with the smallest E / p, the lowest id of equals; from last to first."""
    p = params[0]
    noise = noise_row(int(p["seed"]), position, z.size)
    best, winner = -np.inf, -1
    for token in sorted(kept, reverse=True):
        e = -np.log1p(-(float(noise[token]) + 0.5) * 2.0**-32)
        score = (float(z[token]) - float(z.max())) / float(p["temperature"]) - np.log(e)
        if score >= best:
            best, winner = score, token
    return winner


def check(row: np.ndarray, params: np.ndarray, position: int) -> int:
    """Kept tokens and choice of one row equal the oracles'; how many tokens are kept."""
    z, space = biased(row, params), poisoned(row.size)
    before = np.zeros(row.size, np.float32)
    weights_of(padded(z), row.size, params, before, space)
    found = set(np.flatnonzero(space.weight[0, : row.size]).tolist())
    visible = set(np.flatnonzero(before).tolist())
    kept = oracle(z, params, before)
    assert found == kept & visible, params
    # Against float64 probabilities the end of the nucleus may be off by what a weight is off by.
    loose = []
    for slack in (-1e-5, 1e-5):
        other = params.copy()
        if other["top_p"] < 1:
            other["top_p"] = np.clip(other["top_p"] + slack, 1e-30, 1 - 2.0**-24)
        loose.append(oracle(z, other) & visible)
    assert loose[0] <= found <= loose[1]
    token, _ = choose(row, params, position)
    assert token == race(z, found, params, position), params
    assert before[token] > 0
    return len(found)


def random_row(vocab: int, rng: np.random.Generator) -> np.ndarray:
    row = rng.standard_normal(vocab) * rng.choice([0.01, 1, 4, 20])
    kind = rng.integers(6)
    if kind == 1:
        row = np.round(row)  # ties
    elif kind == 2:
        row = rng.choice(row, vocab)  # duplicates
    elif kind == 3:
        row[rng.random(vocab) < 0.5] = -np.inf
        row[rng.integers(vocab)] = 1.5
    elif kind == 4:
        row[:] = rng.choice([0.0, -0.0, 7.25], vocab)
    elif kind == 5:
        row[rng.random(vocab) < 0.3] = np.finfo(np.float32).min
        row[rng.integers(vocab)] = 30
    return row.astype(np.float32)


def random_request(vocab: int, rng: np.random.Generator) -> np.ndarray:
    bias: dict[int, float] = {}
    if rng.random() < 0.3:
        ids = rng.choice(vocab, min(vocab - 1, int(rng.integers(0, 5))), replace=False)
        bias = {int(i): float(rng.choice([-np.inf, -100, -1.5, 0, 2, 9])) for i in ids}
    return request(
        temperature=rng.choice([1e-3, 0.3, 1, 1, 1.7, 100]),
        top_k=rng.choice([0, 0, 1, 2, vocab - 1, vocab, vocab + 5, 3 + rng.integers(vocab)]),
        top_p=rng.choice([1, 1, 1e-9, 0.1, 0.5, 0.9, 0.95, 1 - 1e-7, rng.random()]),
        min_p=rng.choice([0, 0, 1e-6, 0.05, 0.5, 1]),
        seed=rng.integers(-(2**63), 2**63 - 1),
        bias=bias,
    )
