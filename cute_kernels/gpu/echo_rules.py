"""What the echo kernel answers, for the kernel and for the tests' oracle. Free of cutlass."""

VOCAB = 32_000
BAD = 29_989
PHASE = 3  # the phase its CTAs are in while they work
SUM = 1.5
LOGPROB = -0.75  # of a token that the CTAs decide
SAID = 8  # most candidates of a position in the drafter's script
SCRIPT_WORDS = 16  # of a position: how many candidates, which of them goes on, then the candidates
HOLE = 0x5555  # spoils the first key when the drafter was not shown a position
ROW_STATE = 128  # digests of the last step's rows


def digest(h: int, token: int, position: int) -> int:
    """The digest after one more token."""
    return ((0 if position == 0 else h) * 31 + token + 7 * position) % 2**32


def state_words(ctx: int) -> int:
    """int32 words of a CTA's memory, for a context of `ctx` positions; a multiple of 2 if it is."""
    return ROW_STATE + ctx + 256 + 4
