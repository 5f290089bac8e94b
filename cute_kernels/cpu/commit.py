"""What a step's decision changes: tokens out, lengths on, requests ended. Runs on the leader.

The decision phase has walked each slot's tree; here the stop rules are applied to the tokens of the
walk in order, and everything behind the first stop is as if it had never been decided.
"""

from __future__ import annotations

from cute_kernels.cpu.admission import finish
from cute_kernels.cpu.rows import add_row, add_segment
from cute_kernels.cpu.service import emit_tokens
from cute_kernels.cpu.slots import Count, Stage
from host.jit import jit
from host.wire import FinishReason

_FREE, _DECODE, _PREFILL = int(Stage.FREE), int(Stage.DECODE), int(Stage.PREFILL)
_STEP = int(Count.STEP)
_STOP, _LENGTH, _ERROR = int(FinishReason.STOP), int(FinishReason.LENGTH), int(FinishReason.ERROR)


@jit
def _is_stop(slot, token):
    for i in range(slot.stop_count):
        if slot.stop_ids[i] == token:
            return True
    return False


@jit
def _keep(slot, decision, s, tokens):
    """How many of the step's first `tokens` tokens count, and why the request ends (0: it goes on).

    Earliest position wins, and at the same position a stop id wins over the length: a stop on the
    last allowed token is a stop.
    """
    for k in range(tokens):
        token = decision.token[s, k]
        if token < 0:
            return k, _ERROR
        new_tokens = slot.new_tokens + k + 1
        if new_tokens >= slot.min_new_tokens and _is_stop(slot, token):
            return k + 1, _STOP
        if new_tokens == slot.max_new_tokens:
            return k + 1, _LENGTH
    return tokens, 0


@jit
def _commit_slot(wire, sched, batch, decision, s):
    """Append the kept tokens of one slot and end its request if a rule says so."""
    slot = sched.slot[s]
    slot.steps += 1
    kept, reason = _keep(slot, decision, s, decision.count[s])
    start = slot.prompt_tokens + slot.new_tokens
    for k in range(kept):
        sched.tokens[s, start + k] = decision.token[s, k]
    emit_tokens(wire, sched, decision, s, slot.request_id, kept, sched.sampling[s].logprobs)
    slot.new_tokens += kept
    slot.stage = _DECODE
    # Keys and values of all tokens but the newest are in place.
    position = slot.prompt_tokens + slot.new_tokens - 1
    slot.kv_tokens = position
    if reason:
        finish(wire, sched, batch, s, reason, position if reason == _ERROR else 0)
    return kept


@jit
def commit(wire, sched, batch, decision, context):
    """After the last phase: list the rows whose features the drafter has not seen, then commit;
    the committed tokens, for the policy."""
    _list_context(sched, batch, decision, context)
    tokens = 0
    for s in range(sched.slot.shape[0]):
        slot = sched.slot[s]
        if slot.first_row < 0:
            continue
        if slot.stage == _PREFILL and slot.kv_tokens + _rows(batch, s) < slot.prompt_tokens:
            slot.kv_tokens += _rows(batch, s)
        else:
            tokens += _commit_slot(wire, sched, batch, decision, s)
    sched.count[_STEP] += 1
    return tokens


@jit
def _rows(batch, s):
    for i in range(batch.count[2]):
        if batch.segment[i, 0] == s:
            return batch.segment[i, 2]
    return 0


@jit
def _list_context(sched, batch, decision, context):
    """Rows whose features become drafter keys and values next step: of a tree those on the path, in
    path order, of a chunk of prefill all. `token` is the row its features stand in.

    The slot's request is kept with them: by then the slot may belong to somebody else.
    """
    context.rows.count[:] = 0
    if context.request_id.shape[0] == 0:
        return
    for i in range(batch.count[2]):
        s, first, rows = batch.segment[i, 0], batch.segment[i, 1], batch.segment[i, 2]
        slot = sched.slot[s]
        is_chunk = slot.stage == _PREFILL
        start = context.rows.count[0]
        for k in range(rows if is_chunk else decision.count[s]):
            source = first + (k if is_chunk else decision.path[s, k])
            context.request_id[context.rows.count[0]] = slot.request_id
            add_row(context.rows, s, source, slot.kv_tokens + k, False)
        add_segment(context.rows, s, start)


@jit
def drop_stale_context(sched, context):
    """Before a step: forget the rows of requests that have left their slot."""
    rows = context.rows
    segments = rows.count[2]
    rows.count[:] = 0
    for i in range(segments):
        s, first, size = rows.segment[i, 0], rows.segment[i, 1], rows.segment[i, 2]
        slot = sched.slot[s]
        if size == 0 or slot.stage == _FREE or slot.request_id != context.request_id[first]:
            continue
        start = rows.count[0]
        for k in range(first, first + size):
            context.request_id[rows.count[0]] = slot.request_id
            add_row(rows, s, rows.token[k], rows.position[k], False)
        add_segment(rows, s, start)
