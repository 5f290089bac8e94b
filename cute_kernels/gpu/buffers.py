"""What a step keeps in device memory beside weights, keys and values. Free of cutlass.

Sizes are bytes, by the names of arguments.Arg. Whoever adds a buffer to the table adds it here: the
engine and the tests allocate what they find.
"""

from cute_kernels.gpu.board import FEW_ROWS, MAX_ROWS, ROW_WORDS
from cute_kernels.gpu.config import CHUNK, CHUNK_BYTES, COPIES, Config, DraftShape
from cute_kernels.gpu.prompt_plan import COLUMNS_BYTES, PromptBuffers
from cute_kernels.gpu.rank_plan import RANKED_BYTES
from cute_kernels.gpu.tiles import Buffers
from host.wire import MAX_ALTERNATIVES, SAMPLING


def step_buffers(c: Config) -> dict[str, int]:
    """Of every engine. All begin as EMPTY words (bytes of 255), which as numbers are NaN."""
    return {
        "ACT": COPIES * Buffers.of(c).bytes,
        "LOGITS": MAX_ROWS * c.logit_stride * 4,
        "PROMPT_ACT": PromptBuffers.of(c).bytes,
        "ALTERNATIVES": MAX_ROWS * MAX_ALTERNATIVES * 8,
        "SAMPLING": SAMPLING.itemsize,
        "ROW_TABLE": MAX_ROWS * ROW_WORDS * 4,  # without a drafter it is looked at, and not used
    }


def draft_buffers(c: Config, draft: DraftShape) -> dict[str, int]:
    """Of an engine with a drafter, likewise."""
    columns = draft.layers * c.gemm("ckv").cols
    return {
        "FEATURES": draft.taps * -(-c.shape.hidden // CHUNK) * COLUMNS_BYTES,
        "FUSED": -(-c.shape.hidden // CHUNK) * CHUNK_BYTES,
        "CONTEXT_KV": -(-columns // CHUNK) * COLUMNS_BYTES,
        "DRAFT_LOGITS": FEW_ROWS * c.draft_stride * 4,
        "RANKED": FEW_ROWS * RANKED_BYTES,
    }
