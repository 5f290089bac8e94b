"""Rows to decide, on the GPU: results as the CTAs would leave them, the kernel, what it says.

Needs torch; loads cubins built by decide_kernels.py.
"""

import numpy as np
import torch

from cute_kernels.gpu.arguments import COUNT, Arg
from cute_kernels.gpu.board import MAX_CTAS, MAX_ROWS, ROW_WORDS, Board, Desc, RowWord, Segment
from cute_kernels.gpu.board import make_board as fresh_board
from cute_kernels.gpu.config import Config
from cute_kernels.gpu.load import Kernel
from host.wire import MAX_ALTERNATIVES

LOG2_E = 1.4426950408889634
ANSWER = np.dtype([("token", "i4"), ("logprob", "f4"), ("flags", "i4"), ("spare", "i4")])
ALTERNATIVE = np.dtype([("token", "i4"), ("logprob", "f4")])


def results_of(logits: torch.Tensor, c: Config) -> torch.Tensor:
    """RESULT words, int32 [rows, MAX_CTAS, 4], of logits [rows, vocabulary]: shares of the columns
    that need not be the kernel's."""
    out = torch.full((len(logits), MAX_CTAS, 4), -1, dtype=torch.int32, device="cuda")
    ids = torch.arange(logits.shape[1], device="cuda", dtype=torch.int32)
    for cta, (z, i) in enumerate(zip(logits.tensor_split(c.ctas, 1), ids.tensor_split(c.ctas))):
        top = torch.where(z.isnan(), float("-inf"), z).amax(1)
        first = torch.where(z == top[:, None], i, 2**31 - 1).amin(1)
        safe = torch.where(top > float("-inf"), top, 0)
        # in fp64: torch's order of a sum depends on the number of rows
        total = torch.exp2((z - safe[:, None]) * LOG2_E).double().sum(1).float()
        out[:, cta, 0], out[:, cta, 1] = top.view(torch.int32), first.int()
        out[:, cta, 2] = total.view(torch.int32)
        out[:, cta, 3] = (~(z < float("inf"))).any(1).int()
    out[:, :, 1] = torch.where((out[:, :, 0] == -1) | (out[:, :, 1] != -1), out[:, :, 1], 2**31 - 1)
    return out


class Rig:
    """One model's kernel. After `decide`: answers [rows] ANSWER, alternatives [rows, 20]."""

    def __init__(self, kernel: Kernel, c: Config) -> None:
        self.kernel, self.c = kernel, c
        stride = c.logit_stride
        self.logits = torch.full((MAX_ROWS, stride), float("nan"), device="cuda")
        self.times = torch.zeros(c.ctas, 2, dtype=torch.int64, device="cuda")
        size = MAX_ROWS * MAX_ALTERNATIVES * ALTERNATIVE.itemsize
        self.written = torch.zeros(size, dtype=torch.uint8, device="cuda")

    def prepare(self, rows: np.ndarray, record: np.ndarray, positions: np.ndarray) -> None:
        """rows: fp32 [n, vocabulary]. positions: of the decided tokens. Up to 16 rows make a DECODE
        step, more a ROWS step."""
        n, vocab = rows.shape
        assert vocab == self.c.shape.vocab
        self.n, table = n, np.zeros((MAX_ROWS, ROW_WORDS), np.int32)
        self.logits[:n, :vocab] = torch.from_numpy(rows).cuda()
        board = fresh_board()
        board[Desc.ROWS] = n
        board[Desc.KIND] = Segment.DECODE if n <= 16 else Segment.ROWS
        table[:n, RowWord.POSITION] = positions - 1
        if n <= 16:
            board[Desc.ROW_POSITION : Desc.ROW_POSITION + n] = positions - 1
            table[:] = -5
        self.fresh = torch.from_numpy(board).cuda()
        results = results_of(self.logits[:n, :vocab], self.c)
        self.fresh[Board.RESULT : Board.RESULT + results.numel()] = results.flatten()
        self.board = self.fresh.clone()
        sampling = np.frombuffer(record.tobytes(), np.uint8).copy()
        self.tensors = dict(
            BOARD=self.board, LOGITS=self.logits, SAMPLING=torch.from_numpy(sampling).cuda(),
            ALTERNATIVES=self.written, ROW_TABLE=torch.from_numpy(table).cuda(), TIMES=self.times,
        )  # fmt: skip
        values = np.zeros(COUNT, np.int64)
        values[Arg.LAYERS] = self.c.shape.layers
        for name, t in self.tensors.items():
            values[Arg[name]] = t.data_ptr()
        self.table = torch.from_numpy(values).cuda()

    def launch(self) -> None:
        """Of what was prepared, any number of times."""
        self.board.copy_(self.fresh)
        self.written.fill_(0xEE)
        torch.cuda.synchronize()
        stream = torch.cuda.current_stream().cuda_stream
        self.kernel.launch([self.table.data_ptr()], "q", stream)
        torch.cuda.synchronize()

    def microseconds(self) -> float:
        """Of the last launch: the CTA that took longest."""
        ns = self.times[: self.n].cpu().numpy()
        return float((ns[:, 1] - ns[:, 0]).max()) / 1000

    def decide(self, rows: np.ndarray, record: np.ndarray, positions: np.ndarray) -> np.ndarray:
        self.prepare(rows, record, positions)
        self.launch()
        vocab, board = self.c.shape.vocab, self.board.cpu().numpy()
        assert (board[Board.RESULT :] == -1).all(), "results are not set back"
        after = self.logits[: self.n, :vocab].cpu().numpy()
        same = after.view(np.int32) == rows.view(np.int32)
        assert same.all(), f"logits have changed in rows {sorted(set(np.nonzero(~same)[0]))}"
        words = board[Board.DECISION : Board.RESULT].reshape(MAX_ROWS, 4)
        assert (words[self.n :] == -1).all(), "a decision of no row"
        flat = self.written.cpu().numpy().view(ALTERNATIVE)
        self.alternatives = flat.reshape(MAX_ROWS, MAX_ALTERNATIVES)[: self.n]
        return words[: self.n].copy().view(ANSWER)[:, 0]
