"""One launch with a step of every kind, for a checker of memory accesses:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --kernel-name kns=md_kernel \\
        python -m tests.gpu.every_step DIR                (tests.gpu.kernels builds DIR)

Without the cache every buffer is an allocation of its own, so that an access beyond it shows. A
prompt in two chunks with the drafter's context behind them, rows that leave features, blocks whose
trees are verified in the decode form and in the row form, accepted rows that move, a context alone,
sampled and greedy decisions with alternatives, wrong guesses of what comes next.
"""

import pathlib
import sys

import numpy as np
import torch

from cute_kernels.gpu.board import Desc, Segment
from cute_kernels.gpu.buffers import step_buffers
from cute_kernels.gpu.config import Config
from cute_kernels.gpu.load import Kernel
from cute_kernels.gpu.script import decode_step, draft_step, prompt_step, tree_step
from host.wire import SAMPLING
from tests.gpu.draft_case import DraftCase, random_drafter
from tests.gpu.kernels import drafting
from tests.gpu.model import Model

NAME = "draft-odd-768"
PROMPT = 70


def steps(case: DraftCase) -> list[np.ndarray]:
    layers, mask = case.c.shape.layers, case.config.mask_token_id
    block, n = [7] + [mask] * (case.config.block_size - 1), PROMPT

    def draft(position: int, context: list[int], budget: int, block=block) -> np.ndarray:
        return draft_step(block, position, case.phases, context=context, budget=budget)

    out = [prompt_step(64, 0, layers), prompt_step(n - 64, 64, layers)]
    out += [decode_step([5, 6, 7, 8, 9, 10], n, layers)]
    out += [draft(n + 3, [0, 2, 5], 40), tree_step(n + 3, layers)]  # 41 rows: the row form
    out += [draft(n + 5, [0, 17], 7), tree_step(n + 5, layers)]  # 8 rows
    out += [draft(n + 6, [0], 7, []), decode_step([7], n + 6, layers, decide=True)]
    out += [draft(n + 7, [0], 127), tree_step(n + 7, layers)]
    for d, kind in zip(out, (Segment.DECODE, Segment.DRAFT, Segment.ROWS), strict=False):
        d[Desc.NEXT] = kind
    return out


def run(kernel: Kernel, c: Config) -> np.ndarray:
    """The records of the launch, greedy and sampled: [2, steps, rows]."""
    model = Model(c.shape, seed=11)
    case = DraftCase(kernel, c, model, random_drafter(c, 2, (0, 1), seed=3), 1, seed=5, room=320)
    case.rig.held["ALTERNATIVES"] = torch.zeros(
        step_buffers(c)["ALTERNATIVES"], dtype=torch.uint8, device="cuda"
    )
    case.rig.tokens[:PROMPT] = torch.arange(PROMPT, device="cuda")
    out = []
    for temperature, top_k, top_p in ((0.0, 0, 1.0), (0.8, 50, 0.9)):
        record = np.zeros(1, SAMPLING)
        record["temperature"], record["top_k"], record["top_p"] = temperature, top_k, top_p
        record["seed"], record["logprobs"] = 3, 5
        case.rig.held["SAMPLING"] = torch.from_numpy(record.view(np.uint8)).cuda()
        out.append(case.rig.run(steps(case)))
        if not case.is_clean():
            raise RuntimeError("words were left over")
    return np.stack(out)


if __name__ == "__main__":
    torch.zeros(1, device="cuda")  # makes the context that kernels are loaded into
    records = run(Kernel.read(pathlib.Path(sys.argv[1]) / NAME), drafting()[NAME])
    print("rows of the trees", records[:, [3, 5, 9], 0]["token"].tolist())
    print("root tokens", records[:, [4, 6, 8, 10], 0]["token"].tolist())
