"""What a step's decision changes: tokens out, lengths on, requests ended. Runs on the leader.

The decision phase has walked each slot's tree; here the stop rules are applied to the tokens of the
walk in order, and everything behind the first stop is as if it had never been decided.
"""

from __future__ import annotations

from cute_kernels.cpu.admission import finish
from cute_kernels.cpu.service import emit_tokens
from cute_kernels.cpu.slots import Count, Stage
from host.jit import jit
from host.wire import FinishReason

_DECODE, _PREFILL = int(Stage.DECODE), int(Stage.PREFILL)
_PREFILL_SLOT, _STEP = int(Count.PREFILL_SLOT), int(Count.STEP)
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
    emit_tokens(wire, sched, decision, s, slot.request_id, kept, slot.alternatives)
    slot.new_tokens += kept
    slot.stage = _DECODE
    # Keys and values of all tokens but the newest are in place.
    position = slot.prompt_tokens + slot.new_tokens - 1
    slot.kv_tokens = position
    if reason:
        finish(wire, sched, batch, s, reason, position if reason == _ERROR else 0)


@jit
def commit(wire, sched, batch, decision, features):
    """After the last phase: list the rows whose features the drafter has not seen, then commit."""
    _list_features(sched, batch, decision, features)
    for s in range(sched.slot.shape[0]):
        slot = sched.slot[s]
        if slot.first_row < 0:
            continue
        if slot.stage == _PREFILL and slot.kv_tokens + _rows(batch, s) < slot.prompt_tokens:
            slot.kv_tokens += _rows(batch, s)
        else:
            _commit_slot(wire, sched, batch, decision, s)
    sched.count[_STEP] += 1


@jit
def _rows(batch, s):
    for i in range(batch.count[2]):
        if batch.segment[i, 0] == s:
            return batch.segment[i, 2]
    return 0


@jit
def _list_features(sched, batch, decision, features):
    """Rows whose features become drafter keys and values next step: of a tree those on the path, in
    path order, of a chunk of prefill all. A slot's request id is kept with them: by then the slot
    may belong to somebody else."""
    features.count[0] = 0
    if features.row.shape[0] == 0:
        return
    for i in range(batch.count[2]):
        s, first, rows = batch.segment[i, 0], batch.segment[i, 1], batch.segment[i, 2]
        slot = sched.slot[s]
        chunk = slot.stage == _PREFILL
        for k in range(rows if chunk else decision.count[s]):
            at = features.count[0]
            features.row[at] = first + (k if chunk else decision.path[s, k])
            features.slot[at] = s
            features.position[at] = slot.kv_tokens + k
            features.request_id[at] = slot.request_id
            features.count[0] = at + 1


@jit
def drop_stale_features(sched, features):
    """Before a step: forget rows of requests that have left their slot; what remains keeps order."""
    kept = 0
    for i in range(features.count[0]):
        slot = sched.slot[features.slot[i]]
        if slot.stage != 0 and slot.request_id == features.request_id[i]:
            features.row[kept] = features.row[i]
            features.slot[kept] = features.slot[i]
            features.position[kept] = features.position[i]
            features.request_id[kept] = features.request_id[i]
            kept += 1
    features.count[0] = kept
