"""The descriptors that the service warp writes: which step comes next, and its words.

With a drafter a step of a request is two descriptors: DRAFT, which also moves what the last step
accepted to its places, and then DECODE or ROWS over the tree that came of it. Nothing is drafted
for a request's last token; where there is nothing to move either, DRAFT falls away.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.gpu import mapped, sync
from cute_kernels.gpu.admission import CHUNK_TOKENS, token_at
from cute_kernels.gpu.board import FEW_ROWS, Desc, Segment, desc_at
from cute_kernels.gpu.control import Service, get_int, put
from cute_kernels.gpu.descriptor import put_rows, put_tag
from cute_kernels.gpu.service_block import PATH_AT, Own

DECODE, PROMPT, DRAFT, ROWS, LEAVE = (
    int(kind)
    for kind in (Segment.DECODE, Segment.PROMPT, Segment.DRAFT, Segment.ROWS, Segment.LEAVE)
)


def path_at(s: Service):
    """Of the lane a row of the last step's path."""
    return s.block + PATH_AT + 4 * Int64(s.lane & (FEW_ROWS - 1))


@cute.jit
def choose_step(
    s: cutlass.Constexpr, prefill: Int32, kv: Int32, left: Int32, token: Int32, context: Int32,
    row: Int32, drafted: Int32,
):  # fmt: skip
    """The slot's next step: (kind, rows, token, depth).

    prefill: 1 before the first token is out; kv: positions in the pages; left: tokens that the
    request may still have; token: the newest; context: tokens of the last step, lane i's from `row`
    of its tree; drafted: positions that a block predicts, 0 where nothing is drafted.
    """
    kind, rows, depth = Int32(DECODE), Int32(1), Int32(0)
    if prefill != 0:
        ahead = get_int(s, Own.PROMPT_TOKENS) - 1 - kv
        if ahead > 0:
            kind, rows = Int32(PROMPT), cutlass.min(Int32(CHUNK_TOKENS), ahead)
        else:
            token = token_at(s, kv)
    elif (drafted > 0) & (context > 0):
        depth = cutlass.min(drafted, left - 1)
        moved = mapped.ballot(Int32(s.lane < context) & Int32(row != s.lane))
        if (depth > 0) | (moved != Uint32(0)):
            kind, rows = Int32(DRAFT), Int32(0)
            if depth > 0:
                rows = get_int(s, Own.DRAFT_BLOCK)
    return kind, rows, token, depth


@cute.jit
def publish(
    s: cutlass.Constexpr, tag: Int32, kind: Int32, rows: Int32, position: Int32, token: Int32,
    depth: Int32, context: Int32, row: Int32, drafted: Int32, decides: Int32, tree: Int32,
    words: cute.Tensor,
):  # fmt: skip
    """Open a step. tag: its own. decides: Own.DECIDES. tree: 1 where its rows are those of
    ROW_TABLE, of which `words` are the lane's (`descriptor.ask_rows`). The other values are those
    of `choose_step`.

    The fence in front of the tag orders all that this warp has written before it, such as cleared
    results and copied prompts.
    """
    layers4, decided = s.k.layers * 4, Int32(0)
    first, last, following = Int32(0), layers4, Int32(DECODE)
    budget, chain, first_drafted, mask = Int32(0), Int32(0), Int32(0), Int32(0)
    if kind == DRAFT:
        first, last = layers4 + 1, get_int(s, Own.DRAFT_LAST)
        budget, chain = get_int(s, Own.BUDGET), get_int(s, Own.CHAIN)
        first_drafted, mask = get_int(s, Own.FIRST_DRAFTED), get_int(s, Own.MASK_TOKEN)
    elif (kind == DECODE) | (kind == ROWS):
        last, decided = layers4 + 1, decides | Int32(rows > 1)
        if drafted != 0:
            following = Int32(DRAFT)
    fields = {
        Desc.KIND: kind, Desc.ROWS: rows, Desc.POSITION: position, Desc.COMMITTED: position,
        Desc.FIRST_PHASE: first, Desc.LAST_PHASE: last, Desc.NEXT: following,
        Desc.DECIDE: decided, Desc.CONTEXT: context, Desc.BUDGET: budget, Desc.DEPTH: depth,
        Desc.CHAIN: chain, Desc.FIRST_DRAFTED: first_drafted, Desc.TOKEN: token,
    }  # fmt: skip
    value = mask  # of a block's rows behind the anchor
    for field, v in fields.items():
        value = sync.select_int(s.lane == int(field), v, value)
    # lane i writes words i and 32 + i: the rows are their own ancestors' only ones here
    at = s.board + desc_at(0) + 4 * Int64(s.lane)
    few = Int32(s.lane < FEW_ROWS)
    if (s.lane > 0) & ((tree == 0) | (few != 0)):
        sync.st_word(at, Uint32(value))
    if tree == 0:
        sync.st_word(at + 4 * 32, Uint32(sync.select_int(few, position + s.lane, Int32(0))))
        if few != 0:
            sync.st_word(at + 4 * int(Desc.ACCEPTED), Uint32(row))
    else:
        put_rows(s.board, words, rows, s.lane)
    put_tag(s.board, tag, s.lane)
    put(s, Own.TAG, tag)
    put(s, Own.FLIGHT, kind)
    put(s, Own.FLIGHT_ROWS, rows)
    has_results = Int32((kind == DECODE) | (kind == ROWS)) | Int32((kind == DRAFT) & (rows > 0))
    if has_results == 0:
        put(s, Own.DONE, get_int(s, Own.DONE) + s.ctas)


assert int(Desc.ROW_POSITION) == 32 and int(Desc.PATH) == 48 and int(Desc.TOKEN) == 16
