"""The variants of the study by name. Every one is a Config; figures are reported under its name."""

import dataclasses

from cute_kernels.gpu.config import LLAMA_1B, SMOLLM2, Config

LLAMA = Config(LLAMA_1B)
SMOL = Config(
    SMOLLM2, ctas=72, warps=6, down_split=1, stage_bytes=9216, stages=20, red_buffers=2
)


def llama(**changes) -> Config:
    return dataclasses.replace(LLAMA, **changes)


def smol(**changes) -> Config:
    return dataclasses.replace(SMOL, **changes)


VARIANTS: dict[str, Config] = {
    "llama": LLAMA,
    "llama-t": llama(timing=True),
    "llama-128": llama(ctas=128),
    "llama-128-t": llama(ctas=128, timing=True),
    "llama-128-i3": llama(ctas=128, inflight=3, hungry=5),
    "llama-128-none": llama(ctas=128, handoff="none"),
    "llama-c2": llama(exchange="cluster", down_split=2, passes=2, stages=12),
    "llama-c4": llama(exchange="cluster", ctas=120, stages=12),
    "llama-rows8": llama(rows=8),
    "llama-128-hungry5": llama(ctas=128, hungry=5),
    "llama-128-noprobe": llama(ctas=128, probe=False),
    "smol": SMOL,
    "smol-t": smol(timing=True),
    "smol-noprobe": smol(probe=False),
    "smol-96": smol(ctas=96),
    "smol-132": smol(ctas=132),
    "smol-132-t": smol(ctas=132, timing=True),
    "smol-132-noprobe": smol(ctas=132, probe=False),
    "smol-132-free": smol(ctas=132, inflight=0),
    "smol-132-none": smol(ctas=132, handoff="none"),
    "smol-132-c2": smol(
        ctas=132, exchange="cluster", down_split=2, stage_bytes=12288, stages=15
    ),
    "smol-128-g4": smol(ctas=128, down_split=4),
    "smol-120-c4": smol(ctas=120, exchange="cluster", down_split=4),
}

# with attention: committed positions of the context
ATTENTION = llama(ctas=128, attention=True, stages=12, setmaxnreg=True, ask_at_once=5)
CONTEXTS = {"llama-1k": 1024, "llama-1k-notail": 1024, "llama-64k": 65536}
VARIANTS["llama-1k"] = VARIANTS["llama-64k"] = ATTENTION
VARIANTS["llama-1k-notail"] = dataclasses.replace(ATTENTION, tail=False)
VARIANTS["smol-1k"] = smol(
    ctas=132, attention=True, splits=32, stage_bytes=16384, stages=11
)
CONTEXTS["smol-1k"] = 1024
VARIANTS["llama-128-shared"] = llama(ctas=128, shared_code=True)
VARIANTS["smol-132-shared"] = smol(ctas=132, shared_code=True)
VARIANTS["llama-1k-shared"] = dataclasses.replace(ATTENTION, shared_code=True)
CONTEXTS["llama-1k-shared"] = 1024
VARIANTS["llama-1k-plain"] = dataclasses.replace(ATTENTION, setmaxnreg=False)
VARIANTS["llama-1k-i3"] = dataclasses.replace(ATTENTION, inflight=3, hungry=5)
VARIANTS["llama-1k-t"] = dataclasses.replace(ATTENTION, timing=True)
VARIANTS["smol-1k-t"] = dataclasses.replace(VARIANTS["smol-1k"], timing=True)
CONTEXTS |= {"llama-1k-t": 1024, "smol-1k-t": 1024}
VARIANTS["llama-1k-h6"] = dataclasses.replace(ATTENTION, hungry=6)
VARIANTS["llama-1k-h8"] = dataclasses.replace(ATTENTION, hungry=8, inflight=2)
CONTEXTS |= {"llama-1k-h6": 1024, "llama-1k-h8": 1024}
for _n in (4, 8, 16):
    VARIANTS[f"llama-1k-ahead{_n}"] = dataclasses.replace(ATTENTION, l2_copies=_n)
    CONTEXTS[f"llama-1k-ahead{_n}"] = 1024
VARIANTS["llama-128-ahead8"] = llama(ctas=128, l2_copies=8)
CONTEXTS |= {"llama-1k-plain": 1024, "llama-1k-i3": 1024}
for _n in (3, 6):
    VARIANTS[f"smol-132-once{_n}"] = smol(ctas=132, ask_at_once=_n)

# more rows
def _rows(n: int, stages: int = 21, **changes) -> Config:
    """As many stages of the ring as fit, `stages` at most."""
    while True:
        try:
            return llama(rows=n, stages=stages, **changes)
        except ValueError as e:
            if "fewer stages" not in str(e):
                raise
            stages -= 1


PAIRS = {"exchange": "cluster", "down_split": 2, "split": 2}
QUADS = {"exchange": "cluster", "down_split": 4, "split": 4, "ctas": 120}
VARIANTS |= {
    "rows32-whole": _rows(32, setmaxnreg=True, ctas=128),
    "rows32-whole-rw2": _rows(32, setmaxnreg=True, row_warps=2, ctas=128),
    "rows32-pairs": _rows(32, passes=4, **PAIRS),
    "rows32-quads": _rows(32, passes=4, stage_bytes=8192, row_warps=2,
                          inflight=3, hungry=8, **QUADS),
    "rows64-pairs": _rows(64, passes=4, row_warps=2, setmaxnreg=True, **PAIRS),
    "rows64-pairs-rw4": _rows(64, passes=4, row_warps=4, setmaxnreg=True, **PAIRS),
    "rows64-quads": _rows(64, passes=4, stage_bytes=8192, row_warps=2,
                          inflight=3, hungry=8, **QUADS),
    "rows64-quads-free": _rows(64, passes=4, stage_bytes=8192, row_warps=2,
                               inflight=0, **QUADS),
    "rows64-pairs-defer": _rows(64, passes=4, row_warps=2, setmaxnreg=True, inbox_slots=4, **PAIRS),
    "rows64-pairs-none": _rows(64, passes=4, row_warps=2, setmaxnreg=True, handoff="none", **PAIRS),
    "rows32-pairs-defer": _rows(32, passes=4, inbox_slots=4, setmaxnreg=True, **PAIRS),
    "rows128-quads": _rows(128, passes=4, stage_bytes=8192, row_warps=4,
                           setmaxnreg=True, inflight=3, hungry=6, **QUADS),
}  # fmt: skip

# graphs of phase kernels: (configuration, CTAs of one kernel that fit an SM, by phase)
ALL, PAIR = ("qkv", "o", "gu", "down", "lm"), {"exchange": "cluster", "down_split": 2}
GRAPHS: dict[str, tuple[Config, dict[str, int]]] = {
    "graph-smol-1": (smol(ctas=132), dict.fromkeys(ALL, 1)),
    "graph-smol-2": (smol(ctas=132, stages=8), dict.fromkeys(ALL, 2)),
    "graph-smol-4": (smol(ctas=132, stages=4), {**dict.fromkeys(ALL, 4), "down": 2}),
    "graph-llama-1": (llama(passes=2, stages=12, **PAIR), dict.fromkeys(ALL, 1)),
    "graph-llama-2": (llama(passes=2, stages=4, **PAIR), dict.fromkeys(ALL, 2)),
}
