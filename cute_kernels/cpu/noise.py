"""Counter-based noise: what a token's draw at a position is, whoever asks and in whatever order.

Philox-4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011).
The key is the request's seed. The number of token `id` at a position is word `id % 4` of the block
with the counter `(id // 4, position's low word, position's high word, 0)`.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cute_kernels.cpu.simd import I32, I64, LANES, pointer
from cute_kernels.cpu.vecmath import log
from host.jit import jit

GROUP = 4 * LANES
"""Tokens whose numbers are made together: 16 blocks of four words."""

_WIDE, _NARROW = ir.VectorType(I64, LANES), ir.VectorType(I32, LANES)
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def _every_lane(builder, word):
    one = builder.insert_element(ir.Constant(_WIDE, ir.Undefined), word, ir.Constant(I32, 0))
    zeros = ir.Constant(_NARROW, [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(_WIDE, ir.Undefined), zeros)


def _interleave(builder, a, b):
    """a0 b0 a1 b1 ... as two vectors."""
    return [
        builder.shuffle_vector(
            a, b, ir.Constant(_NARROW, [first + i // 2 + i % 2 * LANES for i in range(LANES)])
        )
        for first in (0, LANES // 2)
    ]


@intrinsic
def philox_blocks(typingctx, out, c0, c1, c2, c3, k0, k1):
    """64 words (uint32) at `out`: the blocks of counters `(c0 + i, c1, c2, c3)`, i < 16.

    Counter and key words are int64 whose low 32 bits count; `c0` wraps without a carry into `c1`.
    """

    def codegen(context, builder, signature, args):
        words = [
            _every_lane(builder, context.cast(builder, value, kind, types.int64))
            for value, kind in zip(args[1:], signature.args[1:])
        ]
        state, key = words[:4], words[4:]
        state[0] = builder.add(state[0], ir.Constant(_WIDE, list(range(LANES))))
        low = ir.Constant(_WIDE, [0xFFFFFFFF] * LANES)
        half = ir.Constant(_WIDE, [32] * LANES)
        # Only the low half of a word counts: the high one is left as it comes and masked where it
        # is multiplied, which is free (the instruction reads no more than the low half).
        for _ in range(_ROUNDS):
            products = [
                builder.mul(builder.and_(state[2 * i], low), ir.Constant(_WIDE, [m] * LANES))
                for i, m in enumerate(_MULTIPLIERS)
            ]
            high = [builder.lshr(product, half) for product in products]
            state = [
                builder.xor(builder.xor(high[1], state[1]), key[0]),
                products[1],
                builder.xor(builder.xor(high[0], state[3]), key[1]),
                products[0],
            ]
            key = [
                builder.add(k, ir.Constant(_WIDE, [step] * LANES))
                for k, step in zip(key, _KEY_STEPS)
            ]
        w0, w1, w2, w3 = (builder.trunc(word, _NARROW) for word in state)
        evens, odds = _interleave(builder, w0, w2), _interleave(builder, w1, w3)
        parts = [part for pair in zip(evens, odds) for part in _interleave(builder, *pair)]
        for i, part in enumerate(parts):
            at = builder.gep(args[0], [ir.Constant(I64, i * LANES)])
            builder.store(part, builder.bitcast(at, _NARROW.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(out, c0, c1, c2, c3, k0, k1), codegen


@jit
def noise_of_group(seed, position, group, out):
    """`out[i]` (uint32) = the number of token `GROUP * group + i` at `position`, for i < GROUP."""
    philox_blocks(pointer(out, 0), group * LANES, position, position >> 32, 0, seed, seed >> 32)


@jit
def exponential(word):
    """The standard exponential variate of a 32-bit number: -log(1 - w), w = (word + 1/2) 2^-32.

    1 - w needs 33 bits, so it is exact and no log1p is called for. Never 0: from 2^-33 to 22.9.
    """
    return -log((np.float64(4294967296.0) - (np.float64(word) + 0.5)) * 2.0**-32)
