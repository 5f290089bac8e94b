"""How a drafter's candidates lie in device memory, and how ranking them and growing the tree use
shared memory. Free of cutlass, so that host, device and tests share it.

Candidates of a position: 4 words, the first of them their number; int32 ids [RANKS]; fp32
log-probabilities [RANKS], in the order of (logit descending, token id ascending). Arg.RANKED holds
16 of these, one a drafted position. A script (Arg.DRAFT_SCRIPT) holds 4 words, the first of them
its number of positions, then these by absolute position.
"""

import numpy as np

from cute_kernels.gpu.board import FEW_ROWS, RANKS

IDS = 16  # byte offsets of a position's candidates
LOGPROBS = IDS + 4 * RANKS
RANKED_BYTES = LOGPROBS + 4 * RANKS
SCRIPT_HEAD = 16  # bytes of a script before its first position
MOST = RANKS - 1  # candidates, and nodes of a tree: its rows are MAX_ROWS with the root

# Shared memory, byte offsets in attention's part.
WORDS = 0  # [16]: single values, named by their users
SORTED = 64  # [RANKS] (fp32 value, int32 column), in order
HOT = SORTED + 8 * RANKS  # [threads] int32: threads whose vectors hold candidates
FOUND = HOT + 4 * 320  # [ROOM] int64: a value and its column, as one number
ROOM = 768  # a multiple of 8
TABLE = SORTED  # of the tree: [FEW_ROWS][RANKS] fp32: the log-probabilities in use, else -inf
TUPLES = TABLE + FEW_ROWS * RANKS * 4  # [RANKS] 16 bytes: a row's ranks from 1, the first on top
ORIGINS = TUPLES + 16 * RANKS  # [RANKS] int32: a row's parent, and its place in TABLE from bit 8 on

SMEM_BYTES = max(FOUND + 8 * ROOM, ORIGINS + 4 * RANKS)
SEGMENT = RANKS + 4  # vectors with candidates that a warp notes


def hit_bytes(warps: int) -> int:
    """Of the scratch for partial sums: [warps][SEGMENT] int32."""
    return 4 * SEGMENT * warps


def pack_candidates(ids: np.ndarray, logprobs: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """uint8 [positions, RANKED_BYTES] of [positions, K] candidates, K <= MOST, and their widths."""
    n, k = ids.shape
    if k > MOST:
        raise ValueError(f"a position has {k} candidates; at most {MOST} are used")
    out = np.zeros((n, RANKED_BYTES // 4), np.int32)
    out[:, 0] = np.minimum(widths, k)
    out[:, IDS // 4 : IDS // 4 + k] = ids
    out[:, LOGPROBS // 4 : LOGPROBS // 4 + k] = np.asarray(logprobs, np.float32).view(np.int32)
    return out.view(np.uint8)


def pack_script(ids: np.ndarray, logprobs: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """A script of [positions, K] candidates by absolute position, and their widths: uint8."""
    head = np.zeros(SCRIPT_HEAD // 4, np.int32)
    head[0] = len(ids)
    return np.concatenate([head.view(np.uint8), pack_candidates(ids, logprobs, widths).ravel()])


def unpack_candidates(block: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids, log-probabilities [positions, RANKS], widths) of uint8 [positions, RANKED_BYTES]."""
    words = np.ascontiguousarray(block).view(np.int32).reshape(-1, RANKED_BYTES // 4)
    ids, logprobs = words[:, IDS // 4 : LOGPROBS // 4], words[:, LOGPROBS // 4 :]
    return ids, np.ascontiguousarray(logprobs).view(np.float32), words[:, 0]
