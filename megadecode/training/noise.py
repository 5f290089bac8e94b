"""The engine's sampling noise in torch: texts sampled here are the texts an engine would sample.

The definition is that of `cute_kernels.cpu.noise`: Philox-4x32-10 (Salmon et al., SC 2011) keyed by
the seed, counted by token id and absolute position.
"""

from __future__ import annotations

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_ROUNDS = 10


def noise_words(seeds: torch.Tensor, positions: torch.Tensor, vocab: int) -> torch.Tensor:
    """[rows, vocab] int64 in 0..2^32-1, one row per (seed, position), both [rows] int64."""
    blocks = torch.arange(-(-vocab // 4), device=seeds.device)
    shape = (len(seeds), len(blocks))
    c0 = blocks.expand(shape)
    c1 = (positions & _LOW)[:, None].expand(shape)
    c2 = (positions >> 32 & _LOW)[:, None].expand(shape)
    c3 = torch.zeros((), dtype=torch.int64, device=seeds.device).expand(shape)
    k0, k1 = (seeds & _LOW)[:, None], (seeds >> 32 & _LOW)[:, None]
    for _ in range(_ROUNDS):
        # The products are unsigned: they wrap in int64, and the shift's sign bits are masked off.
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (b >> 32 & _LOW) ^ c1 ^ k0,
            b & _LOW,
            (a >> 32 & _LOW) ^ c3 ^ k1,
            a & _LOW,
        )
        k0, k1 = k0 + _KEY_STEPS[0] & _LOW, k1 + _KEY_STEPS[1] & _LOW
    return torch.stack((c0, c1, c2, c3), -1).flatten(1)[:, :vocab]


def choose(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """[rows] int64: the token that follows each row of logits [rows, vocab].

    temperature, seeds and positions are [rows]; a position is the absolute one the new token will
    have. At temperature 0 the likeliest token, else the winner of `logit / temperature - log E`
    with the standard exponential variate E of the token's noise; the lowest id of equals.
    """
    greedy = logits.argmax(-1)
    uniform = (noise_words(seeds, positions, logits.shape[1]).double() + 0.5) * 2.0**-32
    variate = -torch.log1p(-uniform)
    scale = torch.where(temperature > 0, temperature, 1.0).double()
    score = (logits.double() - logits.max(-1, True).values.double()) / scale[:, None]
    return torch.where(temperature > 0, (score - variate.log()).argmax(-1), greedy)
