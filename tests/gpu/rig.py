"""A scripted kernel with its buffers on the GPU. Needs torch; loads a cubin built beforehand."""

import numpy as np
import torch

from cute_kernels.gpu import pack
from cute_kernels.gpu.arguments import COUNT, Arg
from cute_kernels.gpu.board import MAX_ROWS, ROW_WORDS, Board, make_board
from cute_kernels.gpu.config import COPIES, Config
from cute_kernels.gpu.load import Kernel
from cute_kernels.gpu.prompt_plan import PromptBuffers
from cute_kernels.gpu.script import RECORD, as_script
from cute_kernels.gpu.tiles import Buffers
from cute_kernels.gpu.tree_rows import row_table
from tests.gpu.model import Context, column_order


class Rig:
    """Runs scripts; keeps the device state from launch to launch, as the engine does."""

    def __init__(
        self, kernel: Kernel, c: Config, packed: dict[str, torch.Tensor | int],
        ctx: Context | None = None, first: int = 0,
    ) -> None:  # fmt: skip
        """packed: of a Model, and whatever else a step needs, by the name of its Arg; a number is
        put into the table as it is. first: the tag and the counters begin here."""
        self.kernel, self.c, self.held, self.ctx = kernel, c, packed, ctx
        self.b, s = Buffers.of(c), c.shape
        self.act = torch.empty(self.b.bytes * COPIES, dtype=torch.uint8, device="cuda")
        self.logits = torch.empty(MAX_ROWS, c.logit_stride, device="cuda")
        self.board = torch.from_numpy(make_board(first, first)).cuda()
        self.row_table = torch.zeros(MAX_ROWS, ROW_WORDS, dtype=torch.int32, device="cuda")
        self.tokens = torch.zeros(1 << 14, dtype=torch.int32, device="cuda")  # of a prompt
        self.prompt_act = None
        if c.prompt:
            self.prompt_act = torch.full(
                (PromptBuffers.of(c).bytes,), 255, dtype=torch.uint8, device="cuda"
            )
        self.times = torch.zeros(c.ctas, 4 * s.layers + 1, 4, dtype=torch.int64, device="cuda")
        self.reset()

    def reset(self) -> None:
        """All words EMPTY, which as a number is a NaN: reading too early shows."""
        self.act.fill_(255)
        self.logits.fill_(float("nan"))

    def set_rows(self, tokens, position: int, parents=None) -> None:
        """The tree that ROWS steps find, until a DRAFT step makes another; see `row_table`."""
        self.row_table.copy_(torch.from_numpy(row_table(tokens, position, parents)))

    def table(self, script: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        values = np.zeros(COUNT, np.int64)
        values[Arg.LAYERS], values[Arg.SCRIPT_STEPS] = self.c.shape.layers, len(script)
        tensors = dict(
            ACT=self.act, LOGITS=self.logits, BOARD=self.board, TIMES=self.times, SCRIPT=script,
            SCRIPT_OUT=out, ROW_TABLE=self.row_table,
        )  # fmt: skip
        if self.prompt_act is not None:
            tensors |= dict(TOKENS=self.tokens, PROMPT_ACT=self.prompt_act)
        if self.ctx is not None:
            tensors |= dict(KV_POOL=self.ctx.pool, PAGE_TABLE=self.ctx.pages, ROPE=self.ctx.rope)
        for name, t in (tensors | self.held).items():
            values[Arg[name]] = t if isinstance(t, int) else t.data_ptr()
        return torch.from_numpy(values).cuda()

    def run(self, steps: list[np.ndarray]) -> np.ndarray:
        """One launch. Returns RECORD [steps, MAX_ROWS]; absent rows are zeros."""
        script = torch.from_numpy(as_script(steps)).cuda()
        size = len(steps) * MAX_ROWS * RECORD.itemsize
        out = torch.zeros(size, dtype=torch.uint8, device="cuda")
        table = self.table(script, out)
        torch.cuda.synchronize()
        self.kernel.launch([table.data_ptr()], "q", torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        return out.cpu().numpy().view(RECORD).reshape(len(steps), MAX_ROWS)

    def buffers(self, rows: int, copy: int = 0) -> dict[str, torch.Tensor]:
        """q (plain column order), a, y, h, x of a copy, fp32 [rows, columns]."""
        s, b, out = self.c.shape, self.b, {}
        act = self.act[copy * b.bytes : (copy + 1) * b.bytes].view(torch.bfloat16)
        places = dict(
            q=(b.q, s.qkv),
            y=(b.y, s.hidden),
            h=(b.h, s.ffn),
            x=(b.x, s.hidden),
            a=(b.a, s.attended),
        )
        for name, (at, cols) in places.items():
            flat = act[at // 2 : at // 2 + cols * 16]
            out[name] = pack.from_fragments(flat)[:rows].float()
        plain = torch.empty_like(out["q"])
        plain[:, column_order(self.c)] = out["q"]
        out["q"] = plain
        if not self.c.attention:
            out["a"] = plain[:, : s.attended]
        return out

    def clean(self) -> bool:
        """Is every activation word, every result and every decision back to EMPTY?"""
        results = self.board[Board.DECISION :]
        return bool((self.act == 255).all()) and bool((results == -1).all())


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """L2."""
    return float((a.double() - b.double()).norm() / b.double().norm())
