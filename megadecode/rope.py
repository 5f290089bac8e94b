"""Rotary frequencies: plain, or scaled for longer contexts in the ways checkpoints describe."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Frequencies = NDArray[np.float64]


class RopeScaling:
    """How a model changes its rotary frequencies. Subclasses are frozen dataclasses."""

    @property
    def multiplier(self) -> float:
        """What cosines and sines are multiplied by, so a score is multiplied by its square."""
        return 1.0

    def length(self, positions: int) -> int:
        """Positions the scaled model is meant for, where its configuration says `positions`."""
        return positions

    def scale(self, plain: Frequencies, theta: float) -> Frequencies:
        """The scaled frequencies of `plain`, [head_dim / 2] radians per position of base `theta`"""
        raise NotImplementedError

    def _need_positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not (_is_number(value) and value > 0):
                raise ValueError(f"{self._kind} {name} is {value!r}; it must be positive")

    @property
    def _kind(self) -> str:
        return type(self).__name__.lower()


def _is_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max  # an int may be beyond any float


@dataclass(frozen=True)
class Linear(RopeScaling):
    """Position interpolation (arXiv 2306.15595): every frequency divided by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        self._need_positive("factor")

    def length(self, positions: int) -> int:
        return int(self.factor * positions)

    def scale(self, plain: Frequencies, theta: float) -> Frequencies:
        return plain / self.factor


@dataclass(frozen=True)
class Llama3(RopeScaling):
    """The scaling of Llama 3.1 and later.

    Frequencies with a wavelength above `original_context / low_freq_factor` are divided by
    `factor`, those below `original_context / high_freq_factor` are kept; between the two the share
    that is kept grows with the number of turns in the original context.
    """

    factor: float
    original_context: int
    low_freq_factor: float
    high_freq_factor: float

    def __post_init__(self) -> None:
        self._need_positive("factor", "original_context", "low_freq_factor", "high_freq_factor")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"llama3 high_freq_factor is {self.high_freq_factor!r}; it must be above "
                f"low_freq_factor, {self.low_freq_factor!r}"
            )

    def scale(self, plain: Frequencies, theta: float) -> Frequencies:
        turns = self.original_context * plain / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(kept, 0.0, 1.0)
        return plain * kept + plain / self.factor * (1 - kept)


@dataclass(frozen=True)
class DynamicNtk(RopeScaling):
    """A base that grows with the context, "dynamic NTK" in checkpoints.

    The engine resolves it once, from its `ctx` (`ModelConfig.for_context`); until then there are no
    frequencies. Below `original_context` positions nothing changes.
    """

    factor: float
    original_context: int

    def __post_init__(self) -> None:
        self._need_positive("factor", "original_context")

    def base(self, theta: float, head_dim: int, ctx: int) -> float:
        """The base for `ctx` positions; ValueError for a head of two elements."""
        if head_dim < 4:
            raise ValueError(f"head_dim is {head_dim}; dynamic NTK scaling needs 4 at least")
        length = max(ctx, self.original_context)
        growth = self.factor * length / self.original_context - (self.factor - 1)
        return float(theta * growth ** (head_dim / (head_dim - 2)))

    def scale(self, plain: Frequencies, theta: float) -> Frequencies:
        raise ValueError("dynamic NTK scaling depends on ctx; use ModelConfig.for_context first")


@dataclass(frozen=True)
class FrequencyFactors(RopeScaling):
    """Each frequency divided by a number of its own: what GGUF files keep of Llama 3 scaling."""

    divisors: tuple[float, ...]

    def __post_init__(self) -> None:
        for at, value in enumerate(self.divisors):
            if not (_is_number(value) and value > 0):
                raise ValueError(f"rope factor {at} is {value!r}; it must be positive")

    def scale(self, plain: Frequencies, theta: float) -> Frequencies:
        return plain / np.array(self.divisors)


@dataclass(frozen=True)
class Yarn(RopeScaling):
    """YaRN context extension (arXiv 2309.00071), with the names and defaults of checkpoints.

    `factor` is new context over `original_context` (positions). Dimensions that turn more than
    `beta_fast` times in the original context keep their frequency, those that turn less than
    `beta_slow` times are slowed down by `factor`, a linear ramp lies between. The cosines and sines
    are multiplied by `multiplier`: `attention_factor` if given, else m(mscale) / m(mscale_all_dim)
    with m(s) = 0.1 s ln(factor) + 1 if both are given and not zero, else m(1).
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        self._need_positive("factor", "original_context", "beta_fast", "beta_slow")
        for name in ("mscale", "mscale_all_dim"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and value >= 0):
                raise ValueError(f"yarn {name} is {value!r}; it must not be negative")
        if self.attention_factor is not None:
            self._need_positive("attention_factor")

    def length(self, positions: int) -> int:
        return max(positions, int(self.factor * self.original_context))

    @property
    def multiplier(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def _magnitude(self, scale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0

    def slow_share(self, head_dim: int, theta: float) -> Frequencies:
        """[head_dim / 2], 0 where a frequency is kept, 1 where it is divided by `factor`."""

        def dimension(turns: float) -> float:
            wavelength = self.original_context / (turns * 2 * math.pi)
            return head_dim * math.log(wavelength) / (2 * math.log(theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001  # a step instead of a ramp
        share = (np.arange(head_dim // 2, dtype=np.float64) - low) / (high - low)
        return np.asarray(np.clip(share, 0.0, 1.0), np.float64)

    def scale(self, plain: Frequencies, theta: float) -> Frequencies:
        slow = self.slow_share(2 * len(plain), theta)
        return np.asarray(plain * (1 - slow) + plain / self.factor * slow)


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Frequencies:
    """[head_dim / 2] radians per position, in float64."""
    plain = np.asarray(theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim))
    return plain if scaling is None else scaling.scale(plain, theta)


def rotation_table(
    head_dim: int, theta: float, scaling: RopeScaling | None, positions: int
) -> Frequencies:
    """[positions, 2, head_dim / 2]: cosines, then sines, times the multiplier, in float64."""
    angle = np.arange(positions)[:, None] * inverse_frequencies(head_dim, theta, scaling)
    multiplier = 1.0 if scaling is None else scaling.multiplier
    return np.stack([np.cos(angle), np.sin(angle)], axis=1) * multiplier
