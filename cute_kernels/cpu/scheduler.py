"""What happens between steps: admission, aborts, the rows of the next step, commit.

Runs on the leader alone, before the first phase and after the last. Admission is first in, first
out, and reserves every page a request can ever touch, so nothing can run out of pages later.
"""

from __future__ import annotations

import numpy as np

from cute_kernels.cpu.service import (
    completion_room,
    emit_copied,
    emit_terminal,
    emit_token,
)
from cute_kernels.cpu.slots import Count, Stage
from cute_kernels.cpu.state import PAGE
from host.jit import jit
from host.wire import BLOCK_BYTES, FinishReason

_FREE, _PREFILL, _DECODE = int(Stage.FREE), int(Stage.PREFILL), int(Stage.DECODE)
_PENDING_HEAD, _PENDING_TAIL = int(Count.PENDING_HEAD), int(Count.PENDING_TAIL)
_SEEN, _FREE_PAGES, _ADMITTED = (
    int(Count.ABORTS_SEEN),
    int(Count.FREE_PAGES),
    int(Count.ADMITTED),
)
_FIRST_SLOT, _PREFILL_SLOT, _STEP = (
    int(Count.FIRST_SLOT),
    int(Count.PREFILL_SLOT),
    int(Count.STEP),
)
_STOP, _LENGTH = int(FinishReason.STOP), int(FinishReason.LENGTH)
_ABORT, _ERROR = int(FinishReason.ABORT), int(FinishReason.ERROR)
_BLOCK_INTS = BLOCK_BYTES // 4


@jit
def _is_marked(sched, request_id):
    return sched.marks[request_id % sched.marks.shape[0]] == request_id


@jit
def _finish(wire, sched, batch, s, reason, position):
    """Answer, and give the slot and its pages back."""
    slot = sched.slot[s]
    emit_terminal(
        wire, sched, slot.request_id, reason, slot.new_tokens, slot.steps, slot.pauses, position
    )
    for i in range(slot.pages):
        sched.free_pages[sched.count[_FREE_PAGES]] = batch.pages[s, i]
        sched.count[_FREE_PAGES] += 1
    slot.stage = _FREE
    slot.pages = 0


@jit
def apply_aborts(wire, sched, batch):
    """End marked requests wherever they are, as far as the completion ring has room."""
    if sched.count[_SEEN] == 0:
        return
    for s in range(sched.slot.shape[0]):
        if sched.slot[s].stage != _FREE and _is_marked(sched, sched.slot[s].request_id):
            if completion_room(wire, sched) < 1:
                return
            _finish(wire, sched, batch, s, _ABORT, 0)
    for i in range(sched.count[_PENDING_HEAD], sched.count[_PENDING_TAIL]):
        entry = sched.pending[i & (sched.pending.shape[0] - 1)]
        if entry.request_id >= 0 and _is_marked(sched, entry.request_id):
            if completion_room(wire, sched) < 1:
                return
            emit_terminal(wire, sched, entry.request_id, _ABORT, 0, 0, 0, 0)
            entry.request_id = -1
    sched.count[_SEEN] = 0


@jit
def _free_slot(sched):
    for s in range(sched.slot.shape[0]):
        if sched.slot[s].stage == _FREE:
            return s
    return -1


@jit
def admit(wire, sched, batch, limits):
    """Move requests from the head of the pending list into free slots while both exist.

    Reserves ceil((prompt + new + reserve_rows) / PAGE) pages, or waits: what stands first is
    admitted first. A request for no tokens is answered here.
    """
    while sched.count[_PENDING_HEAD] - sched.count[_PENDING_TAIL] < 0:
        entry = sched.pending[sched.count[_PENDING_HEAD] & (sched.pending.shape[0] - 1)]
        if entry.request_id < 0:
            sched.count[_PENDING_HEAD] += 1
            continue
        new_tokens = min(entry.max_new_tokens, limits.ctx - entry.prompt_tokens)
        if new_tokens == 0:
            if completion_room(wire, sched) < 1:
                return
            emit_terminal(wire, sched, entry.request_id, _LENGTH, 0, 0, 0, 0)
            sched.count[_PENDING_HEAD] += 1
            continue
        pages = (entry.prompt_tokens + new_tokens + limits.reserve_rows + PAGE - 1) // PAGE
        s = _free_slot(sched)
        if s < 0 or pages > sched.count[_FREE_PAGES]:
            return
        slot = sched.slot[s]
        slot.request_id = entry.request_id
        slot.order = sched.count[_ADMITTED]
        slot.stage = _PREFILL
        slot.prompt_tokens = entry.prompt_tokens
        slot.copied_tokens = 0
        slot.kv_tokens = 0
        slot.new_tokens = 0
        slot.max_new_tokens = new_tokens
        slot.block = entry.block
        slot.pages = pages
        slot.steps = 0
        slot.pauses = 0
        params = wire.params[entry.block]
        slot.stop_count = params.stop_count
        for i in range(params.stop_count):
            slot.stop_ids[i] = params.stop_ids[i]
        for i in range(pages):
            sched.count[_FREE_PAGES] -= 1
            batch.pages[s, i] = sched.free_pages[sched.count[_FREE_PAGES]]
        sched.count[_ADMITTED] += 1
        sched.count[_PENDING_HEAD] += 1


@jit
def _add_row(batch, s, token, position, wants_logits):
    row = batch.count[0]
    batch.token[row] = token
    batch.slot[row] = s
    batch.position[row] = position
    batch.depth[row] = 0
    batch.count[0] = row + 1
    if wants_logits:
        batch.head_row[batch.count[1]] = row
        batch.count[1] += 1


@jit
def _add_segment(batch, s, first_row):
    batch.segment[batch.count[2], 0] = s
    batch.segment[batch.count[2], 1] = first_row
    batch.segment[batch.count[2], 2] = batch.count[0] - first_row
    batch.count[2] += 1


@jit
def _copy_prompt(wire, sched, s, upto):
    """Prompt tokens up to `upto` from the request pool into the slot."""
    slot = sched.slot[s]
    base = (slot.block + 1) * _BLOCK_INTS
    for i in range(slot.copied_tokens, upto):
        sched.tokens[s, i] = wire.pool[base + i]
    slot.copied_tokens = upto
    if upto == slot.prompt_tokens:
        emit_copied(wire, sched, slot.request_id)


@jit
def _is_empty(sched):
    for s in range(sched.slot.shape[0]):
        if sched.slot[s].stage != _FREE:
            return False
    return True


@jit
def build_rows(wire, sched, batch, limits):
    """The row table of the next step: decoding slots, then one chunk of prefill; rows in all.

    When more slots decode than `decode_rows`, they take turns. The prefill chunk belongs to the
    slot admitted first and starts on a multiple of PAGE. With nobody to serve, the last step's
    table is left as it was.
    """
    if _is_empty(sched):
        return 0
    batch.count[:] = 0
    slots = sched.slot.shape[0]
    first = sched.count[_FIRST_SLOT]
    prefill = -1
    for i in range(slots):
        s = (first + i) % slots
        slot = sched.slot[s]
        if slot.stage == _DECODE:
            if batch.count[0] < limits.decode_rows:
                _add_row(batch, s, sched.tokens[s, slot.kv_tokens], slot.kv_tokens, True)
                _add_segment(batch, s, batch.count[0] - 1)
                sched.count[_FIRST_SLOT] = (s + 1) % slots
        elif slot.stage == _PREFILL and (prefill < 0 or slot.order < sched.slot[prefill].order):
            prefill = s
    sched.count[_PREFILL_SLOT] = prefill
    if prefill >= 0:
        slot = sched.slot[prefill]
        start = slot.kv_tokens
        end = min(start + limits.chunk_rows, slot.prompt_tokens)
        _copy_prompt(wire, sched, prefill, end)
        first_row = batch.count[0]
        for position in range(start, end):
            last = position == slot.prompt_tokens - 1
            _add_row(batch, prefill, sched.tokens[prefill, position], position, last)
        _add_segment(batch, prefill, first_row)
    return batch.count[0]


@jit
def _is_stop(slot, token):
    for i in range(slot.stop_count):
        if slot.stop_ids[i] == token:
            return True
    return False


@jit
def _commit_token(wire, sched, batch, s, token, logprob):
    """Append one token, then the stop rules in order: a stop id first, then the length."""
    slot = sched.slot[s]
    slot.steps += 1
    if token < 0:
        _finish(wire, sched, batch, s, _ERROR, slot.kv_tokens - 1)
        return
    sched.tokens[s, slot.prompt_tokens + slot.new_tokens] = token
    slot.new_tokens += 1
    slot.stage = _DECODE
    emit_token(wire, sched, slot.request_id, token, logprob)
    if _is_stop(slot, token):
        _finish(wire, sched, batch, s, _STOP, 0)
    elif slot.new_tokens == slot.max_new_tokens:
        _finish(wire, sched, batch, s, _LENGTH, 0)


@jit
def commit(wire, sched, batch, acts):
    """After the last phase: advance what the step's rows covered, emit tokens, end what is done."""
    for i in range(batch.count[2]):
        sched.slot[batch.segment[i, 0]].kv_tokens += batch.segment[i, 2]
    for i in range(batch.count[1]):
        s = np.int64(batch.slot[batch.head_row[i]])
        _commit_token(wire, sched, batch, s, acts.token[i], acts.logprob[i])
    sched.count[_STEP] += 1
