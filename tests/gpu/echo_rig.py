"""A link to the echo kernel, and the oracle of what it answers. Needs torch and a GPU, no model."""

import threading

import numpy as np
import torch

from cute_kernels.gpu.arguments import COUNT, Arg
from cute_kernels.gpu.board import make_board
from cute_kernels.gpu.echo_rules import BAD, PHASE, SUM, VOCAB, digest
from cute_kernels.gpu.service_block import make_block, wire_constants
from host.cuda import CudaDevice, PinnedMemory, driver
from host.link import Link
from host.wire import PARAMS, FinishReason, Wire, make_wire

CTAS = 132
LAYERS = 2
OPERATIONS = [*(f"phase {i}" for i in range(4 * LAYERS)), "head"]


class Answer:
    """A sink that keeps everything."""

    request_id = -1

    def __init__(self):
        self.ids, self.logprobs, self.stamps, self.steps = [], [], [], []
        self.reason = self.details = self.error = None
        self.ended = threading.Event()

    def on_pairs(self, ids, logprobs, accepted, step, stamp_ns):
        assert accepted == len(ids) == 1
        self.ids += ids
        self.logprobs += logprobs
        self.steps.append(step)
        self.stamps.append(stamp_ns)

    def on_end(self, reason, details, stamp_ns):
        assert not self.ended.is_set(), "two terminal entries"
        self.reason, self.details = reason, details
        self.stamps.append(stamp_ns)
        self.ended.set()

    def on_lost(self, error):
        self.error = error
        self.ended.set()

    def wait(self, timeout_s=20):
        assert self.ended.wait(timeout_s), f"no end after {len(self.ids)} tokens"
        if self.error:
            raise self.error
        return self


class Rig:
    """The echo kernel behind a link."""

    def __init__(
        self, kernel, *, ctx=16_384, max_inflight=64, completion_entries=256, request_entries=64,
        park_after_s=-1.0, first=0, first_tag=0, deadline_s=4.0, pool_bytes=None,
    ):  # fmt: skip
        cuda = torch.device("cuda")
        self.pinned = PinnedMemory(driver())
        self.wire: Wire = make_wire(
            slots=1, workers=CTAS, ctx=ctx, max_inflight=max_inflight,
            request_entries=request_entries, completion_entries=completion_entries,
            pool_bytes=pool_bytes, first_sequence=first, allocate=self.pinned,
        )  # fmt: skip
        self.tokens = torch.full((ctx + 256,), -1, dtype=torch.int32, device=cuda)
        constants = wire_constants(
            self.wire, self.pinned.device_address, ctx=ctx, pages=-(-ctx // 64),
            park_after_ns=int(park_after_s * 1e9), tokens=self.tokens.data_ptr(),
        )  # fmt: skip
        self.block = torch.from_numpy(make_block(constants, first_sequence=first)).to(cuda)
        self.board = torch.from_numpy(make_board(first_tag, first_tag)).to(cuda)
        self.own = torch.zeros(CTAS + 1, dtype=torch.int32, device=cuda)  # digests, then the plant
        table = np.zeros(COUNT, np.int64)
        table[Arg.BOARD], table[Arg.SERVICE] = self.board.data_ptr(), self.block.data_ptr()
        table[Arg.TOKENS], table[Arg.SPARE] = self.tokens.data_ptr(), self.own.data_ptr()
        table[Arg.LAYERS] = LAYERS
        self.table = torch.from_numpy(table).to(cuda)
        torch.cuda.synchronize()
        self.device = CudaDevice(
            kernel, self.table.data_ptr(), empty=[], workers=CTAS, control=self.wire.control,
            operations=OPERATIONS, keep=self.pinned.keep,
        )  # fmt: skip
        self.link = Link(self.wire, self.device, first_sequence=first, deadline_s=deadline_s)

    def plant(self, cta):
        """Make a CTA hang in its next step; the kernel must be parked."""
        self.own[CTAS] = 1 + cta
        torch.cuda.synchronize()

    def submit(self, prompt, new, *, stop=(), min_new=0, timeout_s=20):
        params = np.zeros(1, PARAMS)
        params["min_new_tokens"], params["stop_count"] = min_new, len(stop)
        params["stop_ids"][0, : len(stop)] = stop
        answer = Answer()
        ids = np.asarray(prompt, np.int32)
        self.link.submit(ids, new, params[0], answer, timeout_s=timeout_s)
        return answer

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.link.close()


def expect(prompt, new, *, ctx=16_384, stop=(), min_new=0):
    """(tokens, reason, position of an error) by the rules, one token after another."""
    h = 0
    for position, token in enumerate(prompt):
        h = digest(h, token, position)
    tokens, most = [], min(new, ctx - len(prompt))
    while len(tokens) < most:
        if h % BAD == 0:
            return tokens, FinishReason.ERROR, len(prompt) + len(tokens) - 1
        tokens.append(h % VOCAB)
        if tokens[-1] in stop and len(tokens) >= min_new:
            return tokens, FinishReason.STOP, 0
        h = digest(h, tokens[-1], len(prompt) + len(tokens) - 1)
    return tokens, FinishReason.LENGTH, 0


def calm(length, new, ctx=16_384):
    """A prompt behind which `new` tokens come without a bad logit."""
    seeds = (prompt(length, seed) for seed in range(100))
    return next(p for p in seeds if expect(p, new, ctx=ctx)[1] == FinishReason.LENGTH)


LOGPROB = -np.log(SUM * (2 + (CTAS - 2) * np.exp(-1.0)))


def prompt(length, seed=0):
    return np.random.default_rng([length, seed]).integers(0, VOCAB, length).tolist()


__all__ = ["BAD", "CTAS", "LAYERS", "LOGPROB", "OPERATIONS", "PHASE", "Answer", "Rig"]
