"""Rotary frequencies of a drafter: plain, or YaRN as published checkpoints describe it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Yarn:
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
        for name in ("factor", "original_context", "beta_fast", "beta_slow"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"yarn {name} is {value!r}; it must be positive")
        for name in ("mscale", "mscale_all_dim"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"yarn {name} is {value!r}; it must not be negative")
        if self.attention_factor is not None and not (
            math.isfinite(self.attention_factor) and self.attention_factor > 0
        ):
            raise ValueError(
                f"yarn attention_factor is {self.attention_factor!r}; it must be positive"
            )

    @property
    def multiplier(self) -> float:
        """What cosines and sines are multiplied by, so a score is multiplied by its square."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def _magnitude(self, scale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0

    def slow_share(self, head_dim: int, theta: float) -> NDArray[np.float64]:
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


def inverse_frequencies(head_dim: int, theta: float, yarn: Yarn | None) -> NDArray[np.float64]:
    """[head_dim / 2] radians per position, in float64."""
    plain = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if yarn is None:
        return np.asarray(plain)
    slow = yarn.slow_share(head_dim, theta)
    return np.asarray(plain * (1 - slow) + plain / yarn.factor * slow)


def rotation_table(
    head_dim: int, theta: float, yarn: Yarn | None, positions: int
) -> NDArray[np.float64]:
    """[positions, 2, head_dim / 2]: cosines, then sines, times YaRN's multiplier, in float64."""
    angle = np.arange(positions)[:, None] * inverse_frequencies(head_dim, theta, yarn)
    multiplier = 1.0 if yarn is None else yarn.multiplier
    return np.stack([np.cos(angle), np.sin(angle)], axis=1) * multiplier
