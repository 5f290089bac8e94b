"""Who is in a slot: admission, aborts, and the end of a request. Runs on the leader, between steps.

Admission is first in, first out, and reserves every page a request can ever touch, so nothing can
run out of pages later.
"""

from __future__ import annotations

from cute_kernels.cpu.policy import open_slot
from cute_kernels.cpu.service import completion_room, emit_terminal
from cute_kernels.cpu.slots import Count, Stage
from cute_kernels.cpu.state import PAGE
from host.jit import jit
from host.wire import FinishReason

_FREE, _PREFILL = int(Stage.FREE), int(Stage.PREFILL)
_PENDING_HEAD, _PENDING_TAIL = int(Count.PENDING_HEAD), int(Count.PENDING_TAIL)
_SEEN, _FREE_PAGES, _ADMITTED = (
    int(Count.ABORTS_SEEN),
    int(Count.FREE_PAGES),
    int(Count.ADMITTED),
)
_LENGTH, _ABORT = int(FinishReason.LENGTH), int(FinishReason.ABORT)


@jit
def _is_marked(sched, request_id):
    return sched.marks[request_id % sched.marks.shape[0]] == request_id


@jit
def finish(wire, sched, batch, s, reason, position):
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
            finish(wire, sched, batch, s, _ABORT, 0)
    if _abort_pending(wire, sched):
        sched.count[_SEEN] = 0


@jit
def _abort_pending(wire, sched):
    """Answer marked requests in the pending list and close the gaps; False for want of room.

    The host gives an answered request's place to another at once. Were the gaps left open, a
    blocked head and enough aborts behind it would make the list longer than its memory.
    """
    mask = sched.pending.shape[0] - 1
    kept = sched.count[_PENDING_HEAD]
    all_answered = True
    for i in range(sched.count[_PENDING_HEAD], sched.count[_PENDING_TAIL]):
        request_id = sched.pending[i & mask].request_id
        if _is_marked(sched, request_id):
            if completion_room(wire, sched) >= 1:
                emit_terminal(wire, sched, request_id, _ABORT, 0, 0, 0, 0)
                continue
            all_answered = False
        if kept != i:
            sched.pending[kept & mask] = sched.pending[i & mask]
        kept += 1
    sched.count[_PENDING_TAIL] = kept
    return all_answered


@jit
def _free_slot(sched):
    for s in range(sched.slot.shape[0]):
        if sched.slot[s].stage == _FREE:
            return s
    return -1


@jit
def _take_params(slot, sampling, params):
    sampling.seed = params.seed
    sampling.temperature = params.temperature
    sampling.top_k = params.top_k
    sampling.top_p = params.top_p
    sampling.min_p = params.min_p
    sampling.logprobs = params.logprobs
    sampling.bias_count = params.bias_count
    slot.min_new_tokens = params.min_new_tokens
    slot.stop_count = params.stop_count
    for i in range(params.stop_count):
        slot.stop_ids[i] = params.stop_ids[i]


@jit
def admit(wire, sched, batch, limits):
    """Move requests from the head of the pending list into free slots while both exist.

    Reserves ceil((prompt + new + reserve_rows) / PAGE) pages, or waits: what stands first is
    admitted first. A request for no tokens is answered here.
    """
    while sched.count[_PENDING_HEAD] - sched.count[_PENDING_TAIL] < 0:
        entry = sched.pending[sched.count[_PENDING_HEAD] & (sched.pending.shape[0] - 1)]
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
        open_slot(slot)
        _take_params(slot, sched.sampling[s], wire.params[entry.block])
        for i in range(pages):
            sched.count[_FREE_PAGES] -= 1
            batch.pages[s, i] = sched.free_pages[sched.count[_FREE_PAGES]]
        sched.count[_ADMITTED] += 1
        sched.count[_PENDING_HEAD] += 1
