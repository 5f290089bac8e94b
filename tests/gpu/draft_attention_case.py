"""One block of a drafter's rows on random data: buffers for the kernel, and the same in torch."""

import torch

from cute_kernels.gpu.arguments import Arg
from cute_kernels.gpu.board import Desc
from cute_kernels.gpu.config import Config
from cute_kernels.gpu.load import Kernel
from tests.gpu.attention_case import Case, chain


class DraftCase(Case):
    """A block of `rows` rows at position n, after n cached keys; what else is as in Case.

    masks: (window, causal) of each layer. context: of the descriptor; the keys are there already.
    """

    def __init__(self, kernel: Kernel, c: Config, n: int, rows: int, masks: list[tuple[int, int]],
                 seed: int, context: int = 0) -> None:  # fmt: skip
        super().__init__(kernel, c, n, chain(rows), seed, len(masks))
        self.normed, self.masks, self.context = True, masks, min(context, n)
        self.mask_table = torch.tensor(masks, dtype=torch.int32, device="cuda")

    def _descriptor(self) -> torch.Tensor:
        words = super()._descriptor()
        words[Desc.CONTEXT] = self.context
        words[Desc.ROW_POSITION : Desc.ROW_POSITION + 48] = -1  # nobody may need them
        return words

    def _entries(self) -> dict[Arg, torch.Tensor]:
        return {
            Arg.ACT: self.act, Arg.BOARD: self.board, Arg.PAGE_TABLE: self.pages,
            Arg.DRAFT_KV: self.pool, Arg.DRAFT_ROPE: self.rope, Arg.DRAFT_QK_NORM: self.weights,
            Arg.DRAFT_MASK: self.mask_table,
        }  # fmt: skip

    def mask(self, layer: int) -> torch.Tensor:
        window, causal = self.masks[layer]
        row = torch.from_numpy(self.positions).cuda()[:, None]
        key = torch.arange(self.committed + len(self.parents), device="cuda")
        seen = (key <= row) if causal else torch.ones_like(key <= row)
        if window:
            seen &= (row - key).abs() < window
        return seen
