"""Which rows a step has: the plan before it, the row tables of drafter and target.

Runs on the leader alone. The plan comes first, so that the completion ring's room can be checked
against the step's worst case before anything is changed. The target's rows are known only when the
drafter has spoken, so its table is a phase of the step.
"""

from __future__ import annotations

from cute_kernels.cpu.policy import suggested
from cute_kernels.cpu.service import emit_copied
from cute_kernels.cpu.slots import AUTO, Count, Stage
from cute_kernels.cpu.tree import tree_of
from host.jit import jit
from host.wire import BLOCK_BYTES, PAIRS

_FREE, _PREFILL, _DECODE = int(Stage.FREE), int(Stage.PREFILL), int(Stage.DECODE)
_FIRST_SLOT, _PREFILL_SLOT = int(Count.FIRST_SLOT), int(Count.PREFILL_SLOT)
_ENTRIES = int(Count.ENTRIES)
_BLOCK_INTS, _PAIRS = BLOCK_BYTES // 4, int(PAIRS)
_AUTO = int(AUTO)


@jit
def _entries(sched, s, tokens):
    """Completion entries for `tokens` tokens of a slot, and its terminal entry."""
    return (tokens * (1 + sched.sampling[s].logprobs) + _PAIRS - 1) // _PAIRS + 1


@jit
def plan_step(sched, limits):
    """Choose the step's slots; True when there is anything to do.

    Decoding slots get a budget of nodes, the step's decode rows divided among them: beyond the
    capacity budgets shrink first, then slots take turns. One chunk of prefill joins, of the slot
    admitted first. Counts the completion entries the step may write.
    """
    slots = sched.slot.shape[0]
    decoding = 0
    prefill = -1
    for s in range(slots):
        slot = sched.slot[s]
        slot.first_row = -1
        slot.drafts = 0
        slot.budget = 0
        slot.nodes = 0
        if slot.stage == _DECODE:
            decoding += 1
        elif slot.stage == _PREFILL and (prefill < 0 or slot.order < sched.slot[prefill].order):
            prefill = s
    sched.count[_PREFILL_SLOT] = prefill
    entries = 1
    if prefill >= 0:
        entries += _entries(sched, prefill, 1)
    if decoding == 0:
        sched.count[_ENTRIES] = entries
        return prefill >= 0
    share = max(limits.decode_rows // decoding, 1) - 1
    taken = 0
    first = sched.count[_FIRST_SLOT]
    for i in range(slots):
        s = (first + i) % slots
        slot = sched.slot[s]
        if slot.stage != _DECODE:
            continue
        if taken == limits.decode_rows:
            sched.count[_FIRST_SLOT] = s
            break
        _choose_budget(slot, limits, share)
        slot.first_row = 0
        taken += 1 + slot.budget
        entries += _entries(sched, s, 1 + slot.depth)
    sched.count[_ENTRIES] = entries
    return True


@jit
def _choose_budget(slot, limits, share):
    """Nodes and depth for one slot: no node beyond the request's last token is worth a row."""
    slot.depth = min(limits.drafted, slot.max_new_tokens - slot.new_tokens - 1)
    budget = suggested(slot) if limits.budget == _AUTO else limits.budget
    slot.budget = max(min(budget, share), 0)
    if slot.depth <= 0 or slot.budget <= 0:
        slot.depth = 0
        slot.budget = 0
    slot.drafts = 1 if slot.budget else 0


@jit
def add_row(batch, s, token, position, wants_logits):
    """One more row at depth 0; its number."""
    row = batch.count[0]
    batch.token[row] = token
    batch.slot[row] = s
    batch.position[row] = position
    batch.depth[row] = 0
    batch.count[0] = row + 1
    if wants_logits:
        batch.head_row[batch.count[1]] = row
        batch.count[1] += 1
    return row


@jit
def add_segment(batch, s, first_row):
    """The rows from `first_row` on belong together."""
    batch.segment[batch.count[2], 0] = s
    batch.segment[batch.count[2], 1] = first_row
    batch.segment[batch.count[2], 2] = batch.count[0] - first_row
    batch.count[2] += 1


@jit
def build_draft_rows(sched, draft, limits):
    """The drafter's rows: per drafting slot its newest token, then MASK, at the next positions."""
    draft.count[:] = 0
    for s in range(sched.slot.shape[0]):
        slot = sched.slot[s]
        if not slot.drafts:
            continue
        first = draft.count[0]
        for k in range(limits.block):
            token = sched.tokens[s, slot.kv_tokens] if k == 0 else limits.mask_token
            position = slot.kv_tokens + k
            drafted = 0 <= k - limits.first_drafted < slot.depth
            add_row(draft, s, token, position, drafted)
        add_segment(draft, s, first)
    return draft.count[0]


@jit
def _copy_prompt(wire, sched, s, upto):
    """Prompt tokens up to `upto`, and with the last of them the biases, out of the pool."""
    slot = sched.slot[s]
    base = (slot.block + 1) * _BLOCK_INTS
    for i in range(slot.copied_tokens, upto):
        sched.tokens[s, i] = wire.pool[base + i]
    slot.copied_tokens = upto
    if upto == slot.prompt_tokens:
        sampling = sched.sampling[s]
        for i in range(sampling.bias_count):
            sampling.bias_ids[i] = wire.pool[base + upto + i]
            sampling.bias[i] = wire.pool_floats[base + upto + sampling.bias_count + i]
        emit_copied(wire, sched, slot.request_id)


@jit
def build_rows(wire, sched, batch, trees, limits):
    """The target's row table: each planned slot's tree, root first, then the chunk of prefill.

    A tree row sits at position n + depth but keeps its key and value at n + index until the path is
    known. The chunk starts on a multiple of a page.
    """
    batch.count[:] = 0
    for s in range(sched.slot.shape[0]):
        slot = sched.slot[s]
        if slot.first_row < 0:
            continue
        n = slot.kv_tokens
        slot.first_row = batch.count[0]
        slot.first_head = batch.count[1]
        tree = tree_of(trees, s)
        add_row(batch, s, sched.tokens[s, n], n, True)
        for i in range(1, slot.nodes + 1):
            depth = tree.depth[i]
            row = add_row(batch, s, tree.token[i], n + depth, True)
            batch.depth[row] = depth
            for k in range(depth + 1):
                batch.path[row, k] = tree.path[i, k]
        add_segment(batch, s, slot.first_row)
    s = sched.count[_PREFILL_SLOT]
    if s >= 0:
        slot = sched.slot[s]
        start = slot.kv_tokens
        end = min(start + limits.chunk_rows, slot.prompt_tokens)
        _copy_prompt(wire, sched, s, end)
        slot.first_row = batch.count[0]
        slot.first_head = batch.count[1]
        for position in range(start, end):
            last = position == slot.prompt_tokens - 1
            add_row(batch, s, sched.tokens[s, position], position, last)
        add_segment(batch, s, slot.first_row)
