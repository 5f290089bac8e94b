"""Speculating engines on a GPU, for tests and experiments: policies, scripts, pages' contents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from cute_kernels.gpu.kv_layout import PAGE, key_order, swizzle_rows
from megadecode import Engine, SamplingParams
from megadecode.acceptance import Candidates

WIDTH = 127
_all: list[Engine] = []


def make(model: Any, ctx: int = 2048, **options: Any) -> Engine:
    """An engine on the GPU that `turn` knows of. The others leave the GPU first: what packs the
    weights would wait for them."""
    for other in _all:
        if not other.is_lost:
            other.park()
    engine = Engine(model, ctx, **({"device": "cuda", "park_after_s": 60.0} | options))
    engine.park()
    _all.append(engine)
    return engine


def turn(engine: Engine) -> Engine:
    """The device for this engine: a kernel that still runs keeps any other waiting."""
    for other in _all:
        if other is not engine and not other.is_lost:
            other.park()
    return engine


def close_all() -> None:
    while _all:
        _all.pop().close()


def set_policy(engine: Engine, budget: int, chain: bool = False) -> None:
    """Another budget from the next request on."""
    turn(engine)
    with engine.parked():
        engine._parts.set_policy(budget, chain)


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": 40, "ignore_eos": True} | values))


def run(engine: Engine, jobs: Sequence[tuple[list[int], SamplingParams]]) -> list[Any]:
    """Results of [(prompt, params)], one after the other on the device."""
    turn(engine)
    requests = [engine.submit(prompt, how) for prompt, how in jobs]
    results = [request.result(120) for request in requests]
    assert [result.error for result in results] == [None] * len(jobs)
    return results


def one(engine: Engine, prompt: list[int], **values: Any) -> Any:
    return run(engine, [(prompt, params(**values))])[0]


def bits(values: Sequence[float]) -> list[int]:
    return np.array(values, np.float32).view(np.int32).tolist()


def exact(result: Any) -> tuple[Any, ...]:
    """Everything a request brings that must not depend on speculation, floats as bits."""
    top = [[(i, bits([p])[0]) for i, p in pairs] for pairs in result.top_logprobs]
    return result.token_ids, bits(result.logprobs), top, result.finish_reason, result.text


def first_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> str:
    """Where two lists of results part, for people; empty where they do not."""
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if exact(a) == exact(b):
            continue
        for at, (x, y) in enumerate(zip(a.token_ids, b.token_ids)):
            if x != y:
                return f"request {number}: token {at} is {x}, plainly {y}"
            if bits(a.logprobs[at : at + 1]) != bits(b.logprobs[at : at + 1]):
                p, q = a.logprobs[at], b.logprobs[at]
                return f"request {number}: log-probability of token {at} is {p!r}, plainly {q!r}"
        ends = [(len(r.token_ids), r.finish_reason) for r in (a, b)]
        return f"request {number}: ends as {ends[0]}, plainly {ends[1]}; or alternatives differ"
    return ""


def tau(results: Sequence[Any]) -> float:
    """Tokens a step, behind each answer's first token."""
    some = [r.stats for r in results if r.stats.tokens > 1]
    return sum(s.tokens - 1 for s in some) / max(sum(s.steps - 1 for s in some), 1)


# -- scripts -----------------------------------------------------------------------------------
def candidates(said: Mapping[int, Sequence[tuple[int, float]]], positions: int) -> Candidates:
    """From {position: [(id, log-probability), ...]}; nothing at other positions."""
    ids = np.zeros((positions, WIDTH), np.int32)
    logprobs = np.full((positions, WIDTH), -np.inf, np.float32)
    widths = np.zeros(positions, np.int32)
    for position, pairs in said.items():
        if position < positions:
            widths[position] = len(pairs)
            for i, (token, logprob) in enumerate(pairs):
                ids[position, i], logprobs[position, i] = token, logprob
    return Candidates(ids, logprobs, widths)


def play(engine: Engine, said: Mapping[int, Sequence[tuple[int, float]]] | Candidates) -> None:
    """What the drafter of a scripted engine says from now on."""
    if not isinstance(said, Candidates):
        said = candidates(said, engine.ctx)
    turn(engine)
    with engine.parked():
        engine._parts.play(said)


def truth(
    prompt: Sequence[int],
    tokens: Sequence[int],
    vocab: int,
    right: Callable[[int], bool] = lambda k: True,
) -> dict[int, list[tuple[int, float]]]:
    """Candidates that hold the text's own k-th token where `right(k)`, else another one."""
    said = {}
    for k, token in enumerate(tokens):
        guess = token if right(k) else (token + 1) % vocab
        said[len(prompt) + k] = [(guess, -0.1)]
    return said


# -- what the pages hold -------------------------------------------------------------------------
def keys_values(engine: Engine, positions: int, drafter: bool = False) -> list[torch.Tensor]:
    """Keys (rotated) and values of the first positions, fp32 [layers, kv heads, positions, d], in
    plain order, on the CPU: the GPU is the kernel's again as soon as they are read."""
    memory, c = engine._parts.memory, engine.config
    layers = engine.drafter.config.layers if drafter else c.layers
    with engine.parked():
        pool = memory["DRAFT_KV" if drafter else "KV_POOL"].view(torch.bfloat16)
        pool = pool.reshape(-1, layers, c.kv_heads, 2, PAGE, c.head_dim)
        pages = memory["PAGE_TABLE"][: -(-positions // PAGE)].long()
        blocks = pool[pages].cpu()
    blocks = swizzle_rows(blocks).permute(3, 1, 2, 0, 4, 5).flatten(3, 4)[..., :positions, :]
    stored, values = blocks.float()
    keys = torch.empty_like(stored)
    keys[..., torch.from_numpy(key_order(c.head_dim))] = stored
    return [keys, values]


def reference_keys_values(
    model: Any, drafter: Any, tokens: Sequence[int], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Keys and values of the target, then of the drafter, by torch on the GPU in `dtype`; shapes
    and place as above. No engine may hold the GPU."""
    from megadecode.drafter.module import DrafterModule, _rotate
    from megadecode.training.target import TorchTarget

    target, d = TorchTarget(model, "cuda", dtype), drafter.config
    cache = target.cache(1, len(tokens))
    ids = torch.tensor([list(tokens)], device="cuda")
    _, features = target.forward(ids, d.taps, cache=cache)
    module = DrafterModule(d, target.embed.float(), target.head.float()).load(drafter.tensors())
    module = module.requires_grad_(False).to("cuda", dtype)
    context = module.hidden_norm(module.fc(features.to(dtype).flatten(2)))
    turn_of = module._turn(len(tokens), context)[None, : len(tokens)]
    keys, values = [], []
    for layer in module.layers:
        attention = layer.self_attn
        k = attention.k_norm(attention._heads(attention.k_proj(context)))
        keys.append(_rotate(k, turn_of)[0])
        values.append(attention._heads(attention.v_proj(context))[0])
    found = [cache.keys[:, 0], cache.values[:, 0], torch.stack(keys), torch.stack(values)]
    return [x.float().cpu() for x in found]


def errors(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """Relative L2 over everything, and the largest of a single position's: a misplaced row has
    one of about 1."""
    square = (a - b).double().square()
    size = b.double().square()
    by_position = square.sum((0, 1, 3)) / size.sum((0, 1, 3))
    return float((square.sum() / size.sum()).sqrt()), float(by_position.max().sqrt())
