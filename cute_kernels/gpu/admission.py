"""Who is in the slot: admission, prompts out of the pool, aborts, and the end of a request.

Admission is first in, first out. The one slot owns every page, and a request that needs more than
there are never gets here, so nothing can run out of pages.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.gpu import mapped
from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.control import (
    ENTRY,
    completion_room,
    emit,
    emit_terminal,
    get,
    get_int,
    is_marked,
    pending_at,
    put,
)
from cute_kernels.gpu.core import arg
from cute_kernels.gpu.service_block import PARAMS_AT, Own, Stage
from host.wire import (
    BLOCK_BYTES,
    ENTRY_WORDS,
    PARAMS,
    REQUEST,
    CompletionKind,
    FinishReason,
    sampling_at,
    step_worst_case,
)

CHUNK_TOKENS = 256
"""Prompt tokens copied, and prompt rows run, in one step."""


def _param(s, name):
    """A number of the request's parameters, from the copy in the block."""
    return mapped.ld_own_field(s.block + PARAMS_AT, PARAMS, name)


def stop_id(s):
    """The stop id of this lane."""
    kind, offset = PARAMS.fields["stop_ids"][:2]
    assert kind.shape == (32,)
    return mapped.ld_own_int(s.block + PARAMS_AT + offset + Int64(s.lane) * 4)


@cute.jit
def finish(s: cutlass.Constexpr, reason, position):
    """Answer, and give the slot back."""
    emit_terminal(
        s, get(s, Own.REQUEST_ID), reason, get_int(s, Own.NEW_TOKENS), get_int(s, Own.STEPS),
        get_int(s, Own.PAUSES), position,
    )  # fmt: skip
    put(s, Own.STAGE, int(Stage.FREE))


# -- aborts ------------------------------------------------------------------------------------
def is_aborted(s):
    """1 if the slot's request is to end; for a slot in use."""
    return is_marked(s, get(s, Own.REQUEST_ID))


@cute.jit
def abort_pending(s: cutlass.Constexpr, kept: Int64):
    """Answer marked requests in the pending list, as far as there is room beyond `kept` entries,
    and close the gaps: the host gives an answered request's place to another at once, so that with
    gaps a blocked head and enough aborts behind it would make the list longer than its memory."""
    if get(s, Own.ABORTS_SEEN) != 0:
        unanswered = Int32(0)
        if get(s, Own.STAGE) != int(Stage.FREE):
            if is_aborted(s) != 0:  # its turn comes between steps
                unanswered = Int32(1)
        to, i, tail = get(s, Own.PENDING_HEAD), get(s, Own.PENDING_HEAD), get(s, Own.PENDING_TAIL)
        while i - tail < 0:
            request_id = mapped.ld_own_field(pending_at(s, i), REQUEST, "request_id")
            keep = Int32(1)
            if is_marked(s, request_id) != 0:
                if completion_room(s) - kept >= 1:
                    none = Int32(0)
                    reason = Int32(int(FinishReason.ABORT))
                    emit_terminal(s, request_id, reason, none, none, none, none)
                    keep = Int32(0)
                else:
                    unanswered = Int32(1)
            if keep != 0:
                if to != i:
                    if s.lane < ENTRY_WORDS:
                        word = mapped.ld_own(pending_at(s, i) + 8 * s.lane)
                        mapped.st_own(pending_at(s, to) + 8 * s.lane, word)
                    cute.arch.sync_warp()
                to = to + 1
            i = i + 1
        put(s, Own.PENDING_TAIL, to)
        if unanswered == 0:
            put(s, Own.ABORTS_SEEN, 0)


# -- admission ---------------------------------------------------------------------------------
@cute.jit
def admit(s: cutlass.Constexpr):
    """Move the request at the head of the pending list into the slot, if both exist. Requests for
    no tokens are answered on the way."""
    more = Int32(1)
    while more != 0:
        head = get(s, Own.PENDING_HEAD)
        more = Int32(0)
        if get(s, Own.STAGE) == int(Stage.FREE):
            if head - get(s, Own.PENDING_TAIL) < 0:
                more = _admit_head(s, head)
    return more


@cute.jit
def _admit_head(s: cutlass.Constexpr, head: Int64):
    """1 when the next one is worth a look."""
    at = pending_at(s, head)
    request_id = mapped.ld_own_field(at, REQUEST, "request_id")
    prompt_tokens = mapped.ld_own_field(at, REQUEST, "prompt_tokens")
    asked = mapped.ld_own_field(at, REQUEST, "max_new_tokens")
    new_tokens = cutlass.min(asked, get_int(s, Own.CTX) - prompt_tokens)
    more = Int32(0)
    if new_tokens == 0:
        if completion_room(s) >= 1:
            none = Int32(0)
            emit_terminal(s, request_id, Int32(int(FinishReason.LENGTH)), none, none, none, none)
            put(s, Own.PENDING_HEAD, head + 1)
            more = Int32(1)
    else:
        block = mapped.ld_own_field(at, REQUEST, "block")
        # the parameters are one pool block: 8 bytes a lane
        source = s.pool + Int64(block) * BLOCK_BYTES + 8 * Int64(s.lane)
        mapped.st_own(s.block + PARAMS_AT + 8 * Int64(s.lane), mapped.ld_word(source))
        cute.arch.sync_warp()
        put(s, Own.REQUEST_ID, request_id)
        put(s, Own.PROMPT_TOKENS, prompt_tokens)
        put(s, Own.MAX_NEW, new_tokens)
        put(s, Own.MIN_NEW, _param(s, "min_new_tokens"))
        put(s, Own.STOP_COUNT, _param(s, "stop_count"))
        put(s, Own.BLOCK, block)
        take_sampling(s)
        zeroed = (Own.COPIED, Own.KV_TOKENS, Own.NEW_TOKENS, Own.STEPS, Own.PAUSES, Own.CONTEXT)
        for i in cutlass.range_constexpr(len(zeroed)):
            put(s, zeroed[i], 0)
        put(s, Own.STAGE, int(Stage.PREFILL))
        put(s, Own.PENDING_HEAD, head + 1)
    return more


@cute.jit
def take_sampling(s: cutlass.Constexpr):
    """How the slot's tokens are chosen, for decide.py, and what that means for its steps."""
    logprobs, biases = _param(s, "logprobs"), _param(s, "bias_count")
    heat = _param(s, "temperature")  # its bits, which are positive where it is
    put(s, Own.LOGPROBS, logprobs)
    put(s, Own.DECIDES, Int32((logprobs > 0) | (biases > 0) | (heat > 0)))
    put(s, Own.ENTRIES, step_worst_case(1, get_int(s, Own.DRAFTED) + 1, logprobs))
    if s.lane < len(_SAMPLING_WORDS):
        source = Int32((Int64(_SAMPLING_MAP) >> (4 * s.lane)) & 15)
        word = mapped.ld_own_int(s.block + PARAMS_AT + 4 * Int64(source))
        mapped.st_own_int(arg(s.k, Arg.SAMPLING) + 4 * Int64(s.lane), word)
    cute.arch.sync_warp()


def _words_of_sampling():
    """Which word of PARAMS the first words of the sampling record are."""
    found = {}
    for name in ("temperature", "top_p", "min_p", "top_k", "seed", "logprobs", "bias_count"):
        kind, at = PARAMS.fields[name][:2]
        for i in range(kind.itemsize // 4):
            found[sampling_at(name) // 4 + i] = at // 4 + i
    assert sorted(found) == list(range(sampling_at("bias_ids") // 4)) and max(found.values()) < 16
    return [found[i] for i in sorted(found)]


_SAMPLING_WORDS = _words_of_sampling()
_SAMPLING_MAP = sum(word << 4 * i for i, word in enumerate(_SAMPLING_WORDS))

assert BLOCK_BYTES == 8 * 32


# -- the prompt --------------------------------------------------------------------------------
@cute.jit
def copy_prompt(s: cutlass.Constexpr, upto: Int64):
    """Copy the next chunk of the prompt out of the pool unless `upto` tokens have been copied; all
    loads of a chunk are in flight together. With the last of them the host gets its blocks back.
    """
    copied, prompt_tokens = get(s, Own.COPIED), get(s, Own.PROMPT_TOKENS)
    if copied - cutlass.min(upto, prompt_tokens) < 0:
        end = cutlass.min(copied + CHUNK_TOKENS, prompt_tokens)
        source = s.pool + (get(s, Own.BLOCK) + 1) * BLOCK_BYTES
        lanes = CHUNK_TOKENS // (32 * 4)
        first = copied + 4 * s.lane
        vectors = []
        for i in cutlass.range_constexpr(lanes):
            # what lies behind the prompt's end is read with it (blocks are whole), not past that
            at = cutlass.min(first + 128 * i, (end - 1) & ~3)
            vectors.append(mapped.ld_words(source + 4 * at))
        for i in cutlass.range_constexpr(lanes):
            at = first + 128 * i
            if at < end:
                mapped.st_own_words(s.tokens + 4 * at, vectors[i])
        cute.arch.sync_warp()
        put(s, Own.COPIED, end)
        if end == prompt_tokens:
            copy_biases(s, source + 4 * prompt_tokens)
            emit(s, CompletionKind.COPIED, get(s, Own.REQUEST_ID))


@cute.jit
def copy_biases(s: cutlass.Constexpr, source: Int64):
    """The pairs behind the prompt: token ids, then as many biases."""
    count = _param(s, "bias_count")
    i, sampling = s.lane, arg(s.k, Arg.SAMPLING)
    while i < count:
        token, bias = mapped.ld_int(source + 4 * i), mapped.ld_int(source + 4 * (count + i))
        mapped.st_own_int(sampling + sampling_at("bias_ids") + 4 * Int64(i), token)
        mapped.st_own_int(sampling + sampling_at("bias") + 4 * Int64(i), bias)
        i = i + 32
    cute.arch.sync_warp()


def token_at(s, position):
    """A token of the prompt that has been copied."""
    return mapped.ld_own_int(s.tokens + 4 * position)


assert ENTRY == REQUEST.itemsize
