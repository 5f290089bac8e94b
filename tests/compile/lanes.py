"""A warp on numpy: plain device functions (those not `cute.jit`) run with a value per lane.

`on_lanes(monkeypatch, *modules)` replaces, in the modules, what they take from the DSL and from
`sync` and `fragments` by its meaning on arrays of 32. Shared memory is an array of bytes.
"""

from types import SimpleNamespace

import numpy as np

LANES = np.arange(32)


def to_bf16(x):
    """fp32 rounded to nearest even, as its upper 16 bits."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint32)


def from_bf16(bits):
    return (np.asarray(bits, np.uint32) << 16).view(np.float32)


def pack(lo, hi):
    return to_bf16(lo) | to_bf16(hi) << 16


def unpack(word):
    return from_bf16(word & 0xFFFF), from_bf16(word >> 16)


def full(value, dtype=np.float32):
    return np.broadcast_to(np.asarray(value, dtype), 32).copy()


def mma(d, a, b):
    """m16n8k16: see the fragment layouts of the PTX manual."""
    left, right, sums = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    g, t = LANES // 4, LANES % 4
    for i, word in enumerate(a):
        row, col = g + 8 * (i & 1), 2 * t + 8 * (i >> 1)
        left[row, col], left[row, col + 1] = unpack(full(word, np.uint32))
    for i, word in enumerate(b):
        row = 2 * t + 8 * i
        right[row, g], right[row + 1, g] = unpack(word)
    for i, v in enumerate(d):
        sums[g + 8 * (i >> 1), 2 * t + (i & 1)] = v
    sums = (sums + left @ right).astype(np.float32)
    return [sums[g + 8 * (i >> 1), 2 * t + (i & 1)] for i in range(4)]


class Memory:
    """Shared memory by byte address; a load or store takes an address per lane."""

    def __init__(self, n_bytes):
        self.bytes = np.zeros(n_bytes, np.uint8)

    def words(self, at, n):
        at = np.broadcast_to(at, 32)
        assert not (at % (4 * n)).any(), "misaligned"
        return [np.stack([self.bytes[a + 4 * i : a + 4 * i + 4] for a in at])
                .view(np.uint32)[:, 0] for i in range(n)]  # fmt: skip

    def floats(self, at, n):
        return [w.view(np.float32) for w in self.words(at, n)]

    def put(self, at, array):
        raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        self.bytes[at : at + len(raw)] = raw

    def ldmatrix(self, addr, transposed):
        assert not (addr % 16).any(), "misaligned"
        out = []
        for m in range(4):
            rows = np.stack(
                [self.bytes[a : a + 16].view(np.uint16) for a in addr[8 * m : 8 * m + 8]]
            )
            rows = (rows.T if transposed else rows).astype(np.uint32)
            row, col = LANES // 4, 2 * (LANES % 4)
            out.append(rows[row, col] | rows[row, col + 1] << 16)
        return out


def on_lanes(monkeypatch, memory, *modules):
    def choose(condition, a, b):
        return np.where(condition, full(a), full(b)).astype(np.float32)

    arch = SimpleNamespace(
        shuffle_sync=lambda v, lane: v[lane],
        shuffle_sync_bfly=lambda v, offset: v[LANES ^ offset],
    )
    sync = SimpleNamespace(
        choose=choose,
        warp_max=lambda v: full(v.max()),
        maximum=lambda values: np.maximum.reduce(values),
        select=lambda condition, a, b: np.where(condition, a, b).astype(np.uint32),
        as_float=lambda v: v.view(np.float32),
        lds_int=lambda at: memory.words(at, 1)[0].view(np.int32),
        lds_words=lambda at: memory.words(at, 4),
        lds_pair=lambda at: memory.floats(at, 2),
    )
    meanings = dict(
        sync=sync, cute=SimpleNamespace(arch=arch), mma=mma, bf16_pair=pack, unpack_pair=unpack,
        ldmatrix=memory.ldmatrix, constant=lambda v: full(v, np.uint32), Float32=full,
        Uint32=np.uint32, cutlass=SimpleNamespace(min=np.minimum, max=np.maximum),
        exp2=lambda x: np.exp2(x, dtype=np.float32),
    )  # fmt: skip
    for module in modules:
        for name, value in meanings.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
