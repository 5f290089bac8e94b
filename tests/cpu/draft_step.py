"""Run the drafter's phases by hand, as a step of the engine would."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
from tiny_drafter import target

from cute_kernels.cpu import draft, draft_pack, pack, phases
from cute_kernels.cpu.state import PAGE, Batch, make_batch
from megadecode.drafter import Drafter

LAYER_PHASES = (
    phases.qkv, draft.draft_attend, phases.out_proj, phases.gate_up, phases.down
)  # fmt: skip
OF_DRAFTER = (draft.tap, draft.draft_fuse, draft.draft_context, draft.draft_attend)


class DraftStep:
    """A small device's drafter: `commit` features, then `draft`. Everything starts as NaN."""

    def __init__(
        self,
        of: Drafter,
        *,
        rows: int = 256,
        slots: int = 3,
        pages: int = 6,
        workers: int = 2,
        threads: bool = False,
        dtype: str = "fp32",
        seed: int = 1,
    ) -> None:
        self.config, self.workers, self.threads = of.config, workers, threads
        model, weights = of.config.as_model(), target()
        self.dims = pack.dims_of(model)
        theirs = pack.pack_weights(weights.config, weights.tensor, 1, dtype)
        self.weights, self.draft_state = draft_pack.pack_drafter(
            of.config, of.get, theirs, pages * PAGE, target_rows=rows, context_rows=rows,
        )  # fmt: skip
        assert self.weights.head is theirs.head and self.weights.embed is theirs.embed
        self.kv = pack.allocate_kv(model, slots * pages)
        self.acts = pack.allocate_acts(model, rows, rows, slots, pages, workers)
        for array in (*self.kv, *self.acts, self.draft_state.features, self.draft_state.context):
            array[:] = -7 if array.dtype == np.int32 else np.nan
        table = np.random.default_rng(seed).permutation(slots * pages).reshape(slots, pages)
        self.context, self.block = (
            make_batch(rows=rows, head_rows=rows, slots=slots, pages_per_slot=pages, items=1)
            for _ in range(2)
        )
        for batch in (self.context, self.block):
            batch.pages[:] = table
        self.committed = [0] * slots
        self.counters = np.zeros(16 * 8, np.int64)

    def phase(self, function: Callable[..., None], batch: Batch, layer: int = 0) -> None:
        self.counters[:] = 0
        own = (self.draft_state,) if function in OF_DRAFTER else ()

        def work(worker: int) -> None:
            function(
                self.dims, self.weights, *own, self.kv, batch, self.acts, layer, worker,
                self.counters, 3,
            )  # fmt: skip

        if not self.threads:
            for worker in range(self.workers):
                work(worker)
            return
        team = [threading.Thread(target=work, args=(i,)) for i in range(self.workers)]
        for thread in team:
            thread.start()
        for thread in team:
            thread.join()

    def commit(self, rows: Sequence[tuple[int, int]]) -> None:
        """Turn features into draft keys and values: (slot, row of the features), in order."""
        b = self.context
        for i, (slot, source) in enumerate(rows):
            b.token[i], b.slot[i], b.position[i] = source, slot, self.committed[slot]
            self.committed[slot] += 1
        b.count[:3] = len(rows), 0, 0
        self.phase(draft.draft_fuse, b)
        self.phase(draft.draft_context, b)

    def feed(self, slot: int, features: np.ndarray) -> None:
        """Commit features [rows, taps, hidden] of consecutive positions."""
        rows = len(self.draft_state.features)
        for first in range(0, len(features), rows):
            chunk = features[first : first + rows]
            flat = self.draft_state.features[: len(chunk), : self.config.feature_size]
            flat[:] = chunk.reshape(len(chunk), -1)
            self.commit([(slot, i) for i in range(len(chunk))])

    def draft(self, slots: Sequence[int], anchors: Sequence[int]) -> np.ndarray:
        """Logits [slots, drafted, vocab] of one block per slot."""
        c, b = self.config, self.block
        size, rows = c.block_size, c.block_size * len(slots)
        for i, (slot, anchor) in enumerate(zip(slots, anchors)):
            at = slice(i * size, (i + 1) * size)
            b.segment[i] = slot, i * size, size
            b.token[at] = c.mask_token_id
            b.token[i * size] = anchor
            b.slot[at] = slot
            b.position[at] = self.committed[slot] + np.arange(size)
        wanted = [i * size + k for i in range(len(slots)) for k in range(c.first_row, size)]
        b.head_row[: len(wanted)] = wanted
        b.count[:3] = rows, len(wanted), len(slots)
        self.phase(phases.embed, b)
        for layer in range(c.layers):
            for function in LAYER_PHASES:
                self.phase(function, b, layer)
        self.phase(phases.head, b)
        logits = self.acts.logits[: len(wanted), : c.vocab]
        return logits.reshape(len(slots), c.drafted, c.vocab).copy()

    def cache(self, slot: int, positions: int) -> np.ndarray:
        """Draft keys and values [2, layers, kv heads, positions, head_dim] of a slot."""
        pages = self.context.pages[slot]
        k = self.kv.k[:, pages].transpose(0, 2, 1, 3, 5, 4)
        v = self.kv.v[:, pages].transpose(0, 2, 1, 3, 4)
        shape = (*k.shape[:2], -1, self.dims.head_dim)
        return np.stack([k.reshape(shape), v.reshape(shape)])[..., :positions, :]
