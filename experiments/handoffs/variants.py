"""The variants of the study by name. Every one is a Config; figures are reported under its name."""

import dataclasses

from cute_kernels.gpu.config import LLAMA_1B, SMOLLM2, Config

LLAMA = Config(LLAMA_1B)
SMOL = Config(SMOLLM2, ctas=72, warps=6, down_split=1, stage_bytes=9216, stages=20, red_buffers=2)
ATTENTION = Config(LLAMA_1B, ctas=128, attention=True, stages=12, setmaxnreg=True, ask_at_once=5)
PAIRS = {"exchange": "cluster", "down_split": 2}
QUADS = {"exchange": "cluster", "down_split": 4, "ctas": 120}


def llama(**changes) -> Config:
    return dataclasses.replace(LLAMA, **{"ctas": 128, **changes})


def smol(**changes) -> Config:
    return dataclasses.replace(SMOL, **{"ctas": 132, **changes})


def attend(**changes) -> Config:
    return dataclasses.replace(ATTENTION, **changes)


def rows(n: int, stages: int = 21, **changes) -> Config:
    """As many stages of the ring as fit, `stages` at most."""
    while True:
        try:
            return llama(rows=n, stages=stages, **changes)
        except ValueError as e:
            if "fewer stages" not in str(e):
                raise
            stages -= 1


# 64 rows and more: every matrix is split over the cluster
OVER_PAIRS = {**PAIRS, "split": 2, "passes": 4, "ctas": 132}
OVER_QUADS = {**QUADS, "split": 4, "passes": 4, "stage_bytes": 8192, "inflight": 3, "hungry": 8}
WIDE = {"setmaxnreg": True, "row_warps": 2}

VARIANTS: dict[str, Config] = {
    # llama-3.2-1b, 16 rows, no attention
    "llama": LLAMA,
    "llama-128": llama(),
    "llama-128-t": llama(timing=True),
    "llama-c2": llama(passes=2, stages=12, ctas=132, **PAIRS),
    "llama-c4": llama(stages=12, **QUADS),
    "llama-rows8": llama(rows=8),
    "llama-128-hungry5": llama(hungry=5),
    "llama-128-i3": llama(inflight=3, hungry=5),
    "llama-128-noprobe": llama(probe=False),
    "llama-128-setmax": llama(setmaxnreg=True),
    "llama-128-shared": llama(shared_code=True),
    "llama-128-s11": llama(stages=11),
    "llama-128-ahead8": llama(l2_copies=8),
    "llama-128-dry": llama(dry=True),
    # with attention
    "llama-1k": ATTENTION,
    "llama-1k-t": attend(timing=True),
    "llama-64k": ATTENTION,
    "llama-1k-notail": attend(tail=False),
    "llama-1k-shared": attend(shared_code=True),
    "llama-1k-s11": attend(stages=11),
    "llama-1k-ahead8": attend(l2_copies=8),
    "llama-1k-dry": attend(dry=True),
    # more rows
    "rows32-whole": rows(32, setmaxnreg=True),
    "rows32-pairs": rows(32, **OVER_PAIRS),
    "rows32-quads": rows(32, row_warps=2, **OVER_QUADS),
    "rows64-pairs": rows(64, **WIDE, **OVER_PAIRS),
    "rows64-pairs-red2": rows(64, red_buffers=2, **WIDE, **OVER_PAIRS),
    "rows64-pairs-defer": rows(64, inbox_slots=4, **WIDE, **OVER_PAIRS),
    "rows64-pairs-rw4": rows(64, setmaxnreg=True, row_warps=4, **OVER_PAIRS),
    "rows64-quads": rows(64, row_warps=2, **OVER_QUADS),
    "rows64-pairs-none": rows(64, handoff="none", **WIDE, **OVER_PAIRS),
    "rows64-pairs-dry": rows(64, dry=True, red_buffers=2, **WIDE, **OVER_PAIRS),
    "rows128-quads": rows(128, setmaxnreg=True, row_warps=4, **OVER_QUADS),
    # SmolLM2, 16 rows
    "smol-72": SMOL,
    "smol-96": smol(ctas=96),
    "smol-132": smol(),
    "smol-132-t": smol(timing=True),
    "smol-132-noprobe": smol(probe=False),
    "smol-132-free": smol(inflight=0),
    "smol-132-shared": smol(shared_code=True),
    "smol-132-c2": smol(stage_bytes=12288, stages=15, **PAIRS),
    "smol-128-g4": smol(ctas=128, down_split=4),
    "smol-120-c4": smol(**QUADS),
    "smol-132-none": smol(handoff="none"),
    "smol-132-dry": smol(dry=True),
    "smol-1k": smol(attention=True, splits=32, stage_bytes=16384, stages=11),
}
# committed positions of the variants with attention
CONTEXTS = {n: 65536 if "64k" in n else 1024 for n, c in VARIANTS.items() if c.attention}

# graphs of phase kernels: (configuration, CTAs of one kernel that fit an SM, by phase)
ALL = ("qkv", "o", "gu", "down", "lm")
GRAPHS: dict[str, tuple[Config, dict[str, int]]] = {
    "graph-smol-1": (smol(), dict.fromkeys(ALL, 1)),
    "graph-smol-2": (smol(stages=8), dict.fromkeys(ALL, 2)),
    "graph-smol-4": (smol(stages=4), {**dict.fromkeys(ALL, 4), "down": 2}),
    "graph-llama-1": (llama(passes=2, stages=12, ctas=132, **PAIRS), dict.fromkeys(ALL, 1)),
    "graph-llama-2": (llama(passes=2, stages=4, ctas=132, **PAIRS), dict.fromkeys(ALL, 2)),
    "graph-rows64": (VARIANTS["rows64-pairs-red2"], dict.fromkeys(ALL, 1)),
}
