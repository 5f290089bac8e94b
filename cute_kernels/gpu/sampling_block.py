"""How a slot's tokens are chosen: the record at Arg.SAMPLING. Free of cutlass.

The service warp writes it when it admits a request, before the descriptor of the request's first
step; decide.py reads it in every step that asks for decisions, and so do host and tests. Same bytes
as the record of the CPU device, so that a test can give one to both.
"""

import numpy as np

MAX_BIAS = 300
"""The most logit-bias pairs of a request."""

MAX_LOGPROBS = 20
"""The most alternatives a request gets with each token."""

SAMPLING = np.dtype(
    [
        ("temperature", "f4"),  # 0: greedy
        ("top_p", "f4"),  # 1: off
        ("min_p", "f4"),  # 0: off
        ("top_k", "i4"),  # 0: off
        ("seed", "i8"),
        ("logprobs", "i4"),  # alternatives to report with each token
        ("bias_count", "i4"),
        ("bias_ids", "i4", (MAX_BIAS,)),  # no id twice; ids outside the vocabulary do nothing
        ("bias", "f4", (MAX_BIAS,)),  # -inf removes a token
    ]
)
"""Little-endian and without gaps; the two arrays begin at multiples of 16 bytes."""


def offset(field: str) -> int:
    """Byte offset of a field of SAMPLING."""
    assert SAMPLING.fields is not None
    return int(SAMPLING.fields[field][1])


assert offset("bias_ids") % 16 == offset("bias") % 16 == 0 and SAMPLING.itemsize % 16 == 0
