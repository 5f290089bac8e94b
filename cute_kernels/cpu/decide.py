"""The decision: each slot's walk through its tree, one target token at a time, and what it moves.

A token is the target's own choice at a node, greedy or sampled with noise that depends on the seed,
the position and the token alone. If the tree has a child with that token, its row is already
computed and the walk goes on there; if not, the token ends the step. So the tokens are those of
plain decoding, whatever the tree was. Rows off the path are never decided.
"""

from __future__ import annotations

from cute_kernels.cpu import sampling
from cute_kernels.cpu.compact import compact_kv
from cute_kernels.cpu.policy import note_acceptance
from cute_kernels.cpu.slots import Stage
from cute_kernels.cpu.tree import child_with_token, tree_of
from host.atomics import fetch_add
from host.jit import jit

_PREFILL = int(Stage.PREFILL)


@jit
def decide(dims, sched, acts, trees, decision, space, worker, workers, counters, op):
    """One item per slot: fill `decision` with the tokens of its walk."""
    s = worker
    while s < sched.slot.shape[0]:
        slot = sched.slot[s]
        decision.count[s] = 0
        if slot.first_row >= 0 and not (
            slot.stage == _PREFILL and slot.copied_tokens < slot.prompt_tokens
        ):
            _walk(dims, sched, acts, tree_of(trees, s), decision, space, worker, s)
        s = workers + fetch_add(counters, op * 8, 1)


@jit
def _walk(dims, sched, acts, tree, decision, space, worker, s):
    slot, how = sched.slot[s], sched.sampling[s]
    row = 0
    k = 0
    while row >= 0:
        logits = acts.logits[slot.first_head + row]
        position = slot.prompt_tokens + slot.new_tokens + k
        token, logprob = sampling.decide(logits, dims.vocab, how, position, space, worker)
        decision.token[s, k] = token
        decision.logprob[s, k] = logprob
        decision.path[s, k] = row
        if how.logprobs > 0 and token >= 0:
            ids, logprobs = decision.alternative[s, k], decision.alternative_logprob[s, k]
            found = sampling.alternatives(
                logits, dims.vocab, how.logprobs, ids, logprobs, space, worker
            )
            ids[found : how.logprobs] = -1  # the vocabulary has no more
        k += 1
        row = child_with_token(tree, row, token) if token >= 0 and slot.nodes > 0 else -1
    decision.count[s] = k
    if slot.nodes > 0:
        note_acceptance(slot, k - 1, tree.expected[slot.nodes])


@jit
def compact(dims, sched, batch, kv, acts, decision, worker, workers, counters, op):
    """One item per slot and layer: keys and values of the path move behind the committed ones."""
    item = worker
    layers = dims.layers
    while item < sched.slot.shape[0] * layers:
        s, layer = item // layers, item % layers
        slot = sched.slot[s]
        if slot.nodes and decision.count[s] > 1:
            compact_kv(
                kv, layer, batch.pages[s], slot.kv_tokens, decision.path[s], decision.count[s],
                acts.scratch[worker],
            )  # fmt: skip
        item = workers + fetch_add(counters, op * 8, 1)
