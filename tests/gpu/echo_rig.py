"""A link to the echo kernel, and the oracle of what it answers. Needs torch and a GPU, no model."""

import threading

import numpy as np
import torch

from cute_kernels.gpu.arguments import COUNT, Arg
from cute_kernels.gpu.board import MAX_ROWS, ROW_WORDS, make_board
from cute_kernels.gpu.echo_rules import (
    BAD,
    LOGPROB,
    PHASE,
    SAID,
    SCRIPT_WORDS,
    SUM,
    VOCAB,
    digest,
    state_words,
)
from cute_kernels.gpu.service_block import Own, make_block, wire_constants
from host.cuda import CudaDevice, PinnedMemory, driver
from host.link import Link
from host.wire import MAX_ALTERNATIVES, PARAMS, SAMPLING, FinishReason, Wire, Word, make_wire

CTAS = 132
LAYERS = 2
OPERATIONS = [*(f"phase {i}" for i in range(4 * LAYERS)), "head"]
CTX = 16_384


class OnGpu:
    """The echo kernel where a rig finds a GPU; tests.emulator has another such place."""

    ctas, place = CTAS, "cuda"

    def __init__(self, kernel):
        self.kernel = kernel

    def memory(self):
        return PinnedMemory(driver())

    def device(self, args, **how):
        return CudaDevice(self.kernel, args, empty=[], **how)

    def wait(self):
        torch.cuda.synchronize()


def merged(ctas):
    """Log-probability of a token that the service warp merges; LOGPROB: of one that CTAs decide."""
    return float(-np.log(SUM * (2 + (ctas - 2) * np.exp(-1.0))))


class Answer:
    """A sink that keeps everything. `ids` and `logprobs` are the tokens', `others` their
    alternatives, `accepted` the tokens of each step. `merged`: see there."""

    request_id = -1

    def __init__(self, alternatives=0, ctas=CTAS):
        self.merged = merged(ctas)
        self.pairs, self.stamps, self.accepted, self.each = [], [], {}, alternatives + 1
        self.reason = self.details = self.error = None
        self.ended = threading.Event()

    ids = property(lambda self: [token for token, _ in self.pairs[:: self.each]])
    logprobs = property(lambda self: [value for _, value in self.pairs[:: self.each]])
    steps = property(lambda self: list(self.accepted))

    def others(self, token):
        """The alternatives of the token of that number."""
        return self.pairs[token * self.each + 1 : (token + 1) * self.each]

    def on_pairs(self, ids, logprobs, accepted, step, stamp_ns):
        assert self.accepted.setdefault(step, accepted) == accepted
        self.pairs += zip(ids, logprobs, strict=True)
        self.stamps.append(stamp_ns)

    def on_end(self, reason, details, stamp_ns):
        assert not self.ended.is_set(), "two terminal entries"
        self.reason, self.details = reason, details
        self.stamps.append(stamp_ns)
        assert sum(self.accepted.values()) * self.each == len(self.pairs)
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
        self, on, *, ctx=CTX, max_inflight=64, completion_entries=256, request_entries=64,
        park_after_s=-1.0, first=0, first_tag=0, deadline_s=4.0, pool_bytes=None, draft=None,
    ):  # fmt: skip
        """on: an OnGpu. draft: the drafter's constants, see `drafting`; None: there is none."""
        cuda, draft = torch.device(on.place), draft or {}
        self.on, self.pinned = on, on.memory()
        self.wire: Wire = make_wire(
            slots=1, workers=on.ctas, ctx=ctx, max_inflight=max_inflight,
            request_entries=request_entries, completion_entries=completion_entries,
            pool_bytes=pool_bytes, first_sequence=first, allocate=self.pinned,
            tokens_per_step=1 + draft.get(Own.DRAFTED, 0),
        )  # fmt: skip
        self.tokens = torch.full((ctx + 256,), -1, dtype=torch.int32, device=cuda)
        constants = wire_constants(
            self.wire, self.pinned.device_address, ctx=ctx, pages=-(-ctx // 64),
            park_after_ns=int(park_after_s * 1e9), tokens=self.tokens.data_ptr(),
        )  # fmt: skip
        block = make_block(constants | draft, first_sequence=first)
        self.block = torch.from_numpy(block).to(cuda)
        self.board = torch.from_numpy(make_board(first_tag, first_tag)).to(cuda)
        size = on.ctas * state_words(ctx) + 2  # the CTAs' memory, the delay, the plant
        self.own = torch.zeros(size, dtype=torch.int32, device=cuda)
        self.script = torch.zeros(ctx + 32, SCRIPT_WORDS, dtype=torch.int32, device=cuda)
        sizes = dict(
            ROW_TABLE=MAX_ROWS * ROW_WORDS, SAMPLING=SAMPLING.itemsize // 4,
            ALTERNATIVES=MAX_ROWS * MAX_ALTERNATIVES * 2,
        )  # fmt: skip
        self.areas = {
            name: torch.full((size,), -1, dtype=torch.int32, device=cuda)
            for name, size in sizes.items()
        }
        table = np.zeros(COUNT, np.int64)
        table[Arg.BOARD], table[Arg.SERVICE] = self.board.data_ptr(), self.block.data_ptr()
        table[Arg.TOKENS], table[Arg.SPARE] = self.tokens.data_ptr(), self.own.data_ptr()
        table[Arg.LAYERS], table[Arg.SPARE_TOO] = LAYERS, ctx
        table[Arg.DRAFT_SCRIPT] = self.script.data_ptr()
        for name, area in self.areas.items():
            table[Arg[name]] = area.data_ptr()
        self.table = torch.from_numpy(table).to(cuda)
        on.wait()
        self.device = on.device(
            self.table.data_ptr(), workers=on.ctas, control=self.wire.control,
            operations=OPERATIONS, keep=self.pinned.keep,
        )  # fmt: skip
        self.link = Link(self.wire, self.device, first_sequence=first, deadline_s=deadline_s)

    def plant(self, cta, kind=0):
        """Make a CTA hang in its next step, or in its next one of that Segment."""
        with self.link.parked():
            self.own[-1] = 1 + cta + (kind << 16)
            self.on.wait()

    def delay(self, ns):
        """How long each of the next DECODE steps takes."""
        with self.link.parked():
            self.own[-2] = ns
            self.on.wait()

    def play(self, said):
        """What the drafter says from now on: {position: (candidates, which of them goes on)}."""
        script = np.zeros(tuple(self.script.shape), np.int32)
        for position, (tokens, lead) in said.items():
            assert len(tokens) <= SAID
            script[position, :2] = len(tokens), lead
            script[position, 2 : 2 + len(tokens)] = tokens
        with self.link.parked():
            self.script.copy_(torch.from_numpy(script))
            self.on.wait()

    def splits(self):
        """The split of steps' time, by the words' names."""
        words = (w for w in Word if w.name.startswith("SPLIT"))
        return {w.name[6:].lower(): int(self.wire.control[w]) for w in words}

    def submit(self, prompt, new, *, stop=(), min_new=0, timeout_s=20, bias=None, **values):
        """values: of the request's parameters, such as a temperature. bias: {token: value}."""
        params = np.zeros(1, PARAMS)
        params["min_new_tokens"], params["stop_count"] = min_new, len(stop)
        params["stop_ids"][0, : len(stop)] = stop
        for name, value in values.items():
            params[name] = value
        pairs = None
        if bias:
            params["bias_count"] = len(bias)
            pairs = np.array([*bias], np.int32), np.array([*bias.values()], np.float32)
        answer = Answer(values.get("logprobs", 0), self.on.ctas)
        ids = np.asarray(prompt, np.int32)
        self.link.submit(ids, new, params[0], answer, bias=pairs, timeout_s=timeout_s)
        return answer

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.link.close()


def drafting(block=8, *, drafted=None, first_drafted=1, budget=15, chain=False, mask=7):
    """Constants of a drafter."""
    return {
        Own.DRAFT_BLOCK: block,
        Own.DRAFTED: block - first_drafted if drafted is None else drafted,
        Own.FIRST_DRAFTED: first_drafted, Own.MASK_TOKEN: mask, Own.BUDGET: budget,
        Own.CHAIN: int(chain),
    }  # fmt: skip


def shift_of(values):
    """What a request's parameters do to its tokens: echo._decide."""
    shift = 0
    bits = {name: np.float32(values.get(name, 0)).view(np.int32) for name in ("top_p", "min_p")}
    if values.get("temperature", 0):
        for part in (*bits.values(), values.get("top_k", 0), values.get("seed", 0)):
            shift = shift * 3 + int(part)
    for token, value in values.get("bias", {}).items():
        shift = shift * 3 + token + int(np.float32(value).view(np.int32))
    return shift


def expect(prompt, new, *, ctx=CTX, stop=(), min_new=0, **values):
    """(tokens, reason, position of an error) by the rules, one token after another."""
    h, shift = 0, shift_of(values)
    for position, token in enumerate(prompt):
        h = digest(h, token, position)
    tokens, most = [], min(new, ctx - len(prompt))
    while len(tokens) < most:
        if h % BAD == 0:
            return tokens, FinishReason.ERROR, len(prompt) + len(tokens) - 1
        tokens.append((h + shift) % 2**32 % VOCAB)
        if tokens[-1] in stop and len(tokens) >= min_new:
            return tokens, FinishReason.STOP, 0
        h = digest(h, tokens[-1], len(prompt) + len(tokens) - 1)
    return tokens, FinishReason.LENGTH, 0


def calm(length, new, ctx=CTX):
    """A prompt behind which `new` tokens come without a bad logit."""
    seeds = (prompt(length, seed) for seed in range(100))
    return next(p for p in seeds if expect(p, new, ctx=ctx)[1] == FinishReason.LENGTH)


def prompt(length, seed=0):
    return np.random.default_rng([length, seed]).integers(0, VOCAB, length).tolist()


def truth(prompt, tokens, right=lambda k: True, width=1, lead=lambda k: 0):
    """A drafter's script around the tokens behind a prompt: of the k-th `width` candidates, of
    which the one at `lead(k)` goes on, and is the true one where `right(k)`."""
    said = {}
    for k, token in enumerate(tokens):
        found = [(token + 1 + i) % VOCAB for i in range(width)]
        if right(k):
            found[lead(k)] = token
        said[len(prompt) + k] = (found, lead(k))
    return said


__all__ = ["BAD", "CTAS", "LAYERS", "LOGPROB", "OPERATIONS", "PHASE", "Answer", "Rig"]
