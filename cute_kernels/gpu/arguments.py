"""The argument table of the persistent kernel: one device array of int64, read at the roles' start.

An address is a byte address in device memory unless it says host. Fields that a build does not use
(a service that has no script, a model without q/k norms) are 0. Free of cutlass, so that host,
device and tests share it.
"""

from enum import IntEnum


class Arg(IntEnum):
    """Places in the table."""

    # -- the model
    LAYERS = 0  # layers that run, a number: the shape's, fewer in tests
    STREAM = 1  # packed weights of all CTAs, pack.stream_index
    OFFSETS = 2  # int64 [ctas, phases]: where a CTA's units of a phase begin in STREAM
    PLAN = 3  # int32 [ctas, phases, 4]: tiles.make_plan
    EMBED_BASE = 4  # a token's row is found from EMBED_BASE + EMBED_TABLE[token >> 3]: embed.py
    EMBED_TABLE = 5  # int64 [tiles of the vocabulary]
    FINAL_NORM = 6  # bf16 [hidden], in pack.norm_row order
    QK_NORM = 7  # fp32 [layers, 2 (q, k), head_dim], dimensions in plain order
    ROPE = 8  # fp32 [positions, head_dim / 2, 2 (cos, sin)]
    # -- decode
    ACT = 16  # COPIES x tiles.Buffers.bytes, all EMPTY at the first launch
    LOGITS = 17  # fp32 [MAX_ROWS, Config.logit_stride]
    BOARD = 18  # int32 [board.WORDS]: zeros, RESULT all EMPTY, at the first launch
    KV_POOL = 19  # [pages, layers, kv heads] blocks of Config.kv_block_bytes
    PAGE_TABLE = 20  # int32 [pages]: the page of positions 64 i .. 64 i + 63
    TIMES = 21  # int64 [ctas, phases, 4] ns, with Config.timing
    # -- drafter; with DRAFT_LAYERS = 0 there is none
    DRAFT_LAYERS = 22  # numbers
    DRAFT_TAPS = 23
    DRAFT_KV = 24  # [pages, drafter's layers, kv heads] blocks; pages as in PAGE_TABLE
    DRAFT_QK_NORM = 25  # fp32 [drafter's layers, 2 (q, k), head_dim]
    DRAFT_ROPE = 26  # as ROPE
    DRAFT_NORM = 27  # as FINAL_NORM
    DRAFT_MASK = 28  # int32 [drafter's layers, 2]: window (0: all), 1 where causal
    DRAFT_TOKENS = 29  # int32 [columns]: token of a column of its logits; 0: each is its own
    TAP_OF = 30  # int32 [LAYERS]: which tap follows a layer, -1 for none
    FEATURES = 31  # bf16 [taps][hidden columns][256 rows] in the row form's order
    # -- prompt
    TOKENS = 32  # int32 [positions]: the prompt's tokens by absolute position
    PROMPT_ACT = 33  # prompt.py's activation buffers
    # -- a DRAFT step, and the decision
    FUSED = 34  # c = W_fc f of a DRAFT step's new positions: words, EMPTY at the first launch
    CONTEXT_KV = 35  # raw keys and values of new positions: bf16 in the row form's order
    DRAFT_LOGITS = 36  # fp32 [16, Config.draft_stride]
    RANKED = 37  # [16] rank_plan.RANKED_BYTES: a drafted position's candidates
    ROW_TABLE = 38  # int32 [MAX_ROWS, board.ROW_WORDS]
    DRAFT_SCRIPT = 39  # candidates by position that take the drafter's place; 0: none. rank_plan.py
    SAMPLING = 40  # how the slot's tokens are chosen: decide.py
    ALTERNATIVES = 41  # [MAX_ROWS, 20] (int32 id, fp32 log-probability)
    DRAFT_COLUMNS = 43  # a number: logits of a DRAFT_LOGITS row: DRAFT_TOKENS, or the vocabulary
    # -- service
    WIRE = 48  # host: the mapped wire
    SERVICE = 49  # the service's own state, kept across launches
    SCRIPT = 50  # int32 [steps, board.Desc words]: scripted.py
    SCRIPT_STEPS = 51  # a number
    SCRIPT_OUT = 52  # [steps, 16] records: scripted.Record
    # -- free for whoever adds a part
    SPARE = 60
    SPARE_TOO = 61


COUNT = 64
