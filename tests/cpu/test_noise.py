"""The noise: Philox itself, the accuracy of its exponential variates, and independence."""

from __future__ import annotations

import numpy as np
import pytest
from sampling_oracle import noise_row

from cute_kernels.cpu.noise import GROUP, exponential, philox_blocks
from cute_kernels.cpu.simd import pointer
from cute_kernels.cpu.vecmath import log
from host.jit import jit

EXTENDED = np.finfo(np.longdouble).nmant >= 63
LOWEST_WORD, HIGHEST_WORD = 0, 0xFFFFFFFF


@jit
def _blocks(counter, key, out):
    philox_blocks(pointer(out, 0), counter[0], counter[1], counter[2], counter[3], key[0], key[1])


@jit
def _exponentials(words, out):
    for i in range(words.size):
        out[i] = exponential(words[i])


@jit
def _logs(values, out):
    for i in range(values.size):
        out[i] = log(values[i])


def philox(seed: int, position: int, tokens: int) -> np.ndarray:
    """The same from the definition, in Python integers."""
    low, words = 0xFFFFFFFF, []
    for block in range(-(-tokens // 4)):
        c = [block, position & low, position >> 32 & low, 0]
        k = [seed & low, seed >> 32 & low]
        for _ in range(10):
            a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [b >> 32 ^ c[1] ^ k[0], b & low, a >> 32 ^ c[3] ^ k[1], a & low]
            k = [k[0] + 0x9E3779B9 & low, k[1] + 0xBB67AE85 & low]
        words += c
    return np.array(words[:tokens], np.uint32)


def exponentials(words: np.ndarray) -> np.ndarray:
    out = np.zeros(words.size)
    _exponentials(words, out)
    return out


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_answers(counter: list[int], key: list[int], words: str) -> None:
    """The three vectors that the authors' Random123 library publishes for philox4x32-10."""
    expected = [int(word, 16) for word in words.split()]
    out = np.zeros(GROUP, np.uint32)
    # Every lane must give them: the counter wanted is lane i of the blocks from counter - i on.
    for lane in range(GROUP // 4):
        start = np.array(counter, np.int64)
        start[0] -= lane
        _blocks(start, np.array(key, np.int64), out)
        assert out[4 * lane : 4 * lane + 4].tolist() == expected


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF])
@pytest.mark.parametrize("position", [0, 7, 2**32 - 1, 2**32, 2**40 + 3])
def test_a_tokens_number_comes_from_seed_position_and_id(seed: int, position: int) -> None:
    np.testing.assert_array_equal(noise_row(seed, position, 197), philox(seed, position, 197))


@pytest.mark.skipif(not EXTENDED, reason="needs an extended long double as the exact reference")
def test_exponential_variates_are_accurate_to_both_ends() -> None:
    rng = np.random.default_rng(0)
    ends = np.concatenate([np.arange(5000), 0xFFFFFFFF - np.arange(5000)])
    powers = np.concatenate([2 ** np.arange(1, 32) - 1, 2 ** np.arange(1, 32)])
    words = np.concatenate([ends, powers, rng.integers(0, 2**32, 50_000)]).astype(np.uint32)
    w = (words.astype(np.longdouble) + np.longdouble(0.5)) / np.longdouble(2**32)
    exact = -np.log1p(-w)
    found = exponentials(words)
    assert np.abs(found / exact - 1).max() < 2e-15
    assert found.min() == pytest.approx(2.0**-33, rel=1e-9)
    assert found.max() == pytest.approx(33 * np.log(2), rel=1e-15)
    assert (np.diff(exponentials(np.sort(words))) >= 0).all()
    logs = np.zeros(words.size)
    _logs(found, logs)
    # -log E is what a token's log-probability is compared with: its spread is 26.
    assert np.abs(logs - np.log(exact)).max() < 1e-14


def kolmogorov(sample: np.ndarray) -> float:
    """sqrt(n) times the distance of a sample's distribution from the uniform one on [0, 1]."""
    ordered, n = np.sort(sample), sample.size
    steps = np.arange(n + 1) / n
    return float(max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max()) * np.sqrt(n))


def test_smallest_and_largest_variate_of_a_row_are_distributed_as_they_should() -> None:
    tokens = 49_152
    rows = np.stack([noise_row(seed, 1000 + seed, tokens) for seed in range(1500)])
    smallest = exponentials(rows.min(axis=1))
    largest = exponentials(rows.max(axis=1))
    # The smallest of n is exponential with rate n; P(largest < x) = (1 - exp(-x))^n. The limit is
    # passed by one sample in ten thousand.
    assert kolmogorov(1 - np.exp(-tokens * smallest)) < 2.23
    assert kolmogorov(np.exp(tokens * np.log1p(-np.exp(-largest)))) < 2.23


def test_numbers_are_uniform_and_independent_across_tokens_positions_and_seeds() -> None:
    tokens, rows = 4096, 256

    def check(what: str, a: np.ndarray, b: np.ndarray) -> None:
        """Chi-square of the 16 x 16 table of the leading bits of paired numbers."""
        table = np.zeros((16, 16))
        np.add.at(table, (a.ravel() >> 28, b.ravel() >> 28), 1)
        expected = a.size / 256
        chi = ((table - expected) ** 2 / expected).sum()
        assert abs(chi - 255) < 5 * np.sqrt(2 * 255), what

    by_position = np.stack([noise_row(5, position, tokens) for position in range(rows)])
    by_seed = np.stack([noise_row(seed, 5, tokens) for seed in range(rows)])
    high_seed = np.stack([noise_row(seed << 32, 5, tokens) for seed in range(rows)])
    for what, x in (("position", by_position), ("seed", by_seed), ("high seed", high_seed)):
        for gap in (1, 2, 64):
            check(f"{what} {gap}", x[gap:], x[:-gap])
        for gap in (1, 2, 3, 4, 5, 16, 64):
            check(f"token {gap} by {what}", x[:, gap:], x[:, :-gap])
        bits = np.unpackbits(np.ascontiguousarray(x).view(np.uint8)).mean()
        assert abs(bits - 0.5) < 5 * 0.5 / np.sqrt(x.size * 32)
    check("position and seed", by_position[1:], by_seed[:-1])
