"""What the persistent kernel computes: shapes and compile-time choices.

Host-side and free of cutlass: the same description drives packing, the device code, the tests and
the roofline columns of the reports. Who computes what: tiles.py.

Words. A matrix [N, K] is cut into *tiles* of 8 output columns. A tile's slice of K that one CTA
multiplies in one go is a *unit*: 8 x `slab` bf16 values, stored in MMA fragment order. The K of a
`down` tile may be split over a *team* of neighbouring CTAs, which exchange partial sums.
"""

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from cute_kernels.gpu import attention_plan
from cute_kernels.gpu.kv_layout import PAGE

TILE = 8  # output columns of an mma.sync m16n8k16
CHUNK = 32  # K values in one 16-byte vector of a lane: two k16 steps
CHUNK_BYTES = 1024  # a chunk of 16 rows of activations: two blocks of 8 rows
ROWS = 16  # most rows of a decode step
CHAINS = 2  # accumulators of a warp's partial sum: gemm.py
SMEM_LIMIT = {"sm_90a": 232448, "sm_100a": 232448, "sm_120a": 101376}  # bytes per block
KV_COPY = 16384  # bytes of KV in one stage of the ring
MAX_VOCAB = 1 << 18  # a token id is part of one number: topk.py, prefix.py, walk.py
COPIES = 3  # rotating copies of every activation buffer; see kernel.py


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder-only transformer of the Llama family, in elements.

    tied: the embedding is the head's matrix. qk_norm: RMSNorm of every head of q and k.
    """

    name: str
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layers: int
    rms_eps: float = 1e-5
    tied: bool = True
    qk_norm: bool = False

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def attended(self) -> int:
        """Columns of the attention's output."""
        return self.heads * self.head_dim


SMOLLM2 = Shape("smollm2-135m", 576, 1536, 9, 3, 64, 49152, 30)
LLAMA_1B = Shape("llama-3.2-1b", 2048, 8192, 32, 8, 64, 128256, 16)
LLAMA_8B = Shape("llama-3.1-8b", 4096, 14336, 32, 8, 128, 128256, 32, tied=False)
QWEN3_8B = Shape(
    "qwen3-8b", 4096, 12288, 32, 8, 128, 151936, 36, rms_eps=1e-6, tied=False, qk_norm=True
)
ODD_960 = Shape("odd-960", 960, 2560, 15, 5, 64, 30011, 6, tied=False)
ODD_768 = Shape("odd-768", 768, 2048, 12, 12, 64, 5003, 4)
SHAPES = {s.name: s for s in (SMOLLM2, LLAMA_1B, LLAMA_8B, QWEN3_8B, ODD_960, ODD_768)}
LAYER_KINDS = ("qkv", "o", "gu", "down")
KINDS = (*LAYER_KINDS, "lm")
DRAFT_KINDS = ("fc", "ckv")  # of a drafter, beside layers and a head like the target's


@dataclass(frozen=True)
class DraftShape:
    """What of a drafter is data to the kernel; its layers have the sizes of the target's.

    taps: target layers whose outputs it reads. columns: of a head of its own, a multiple of 8; 0:
    the target's head serves.
    """

    layers: int
    taps: int
    columns: int = 0

    @property
    def phases(self) -> int:
        """Those behind the target's head: fc by taps, ckv, the layers, the head."""
        return self.taps + 1 + 4 * self.layers + 1


@dataclass(frozen=True)
class Gemm:
    """One matrix of the step as the kernel sees it. `ckv` is that of one layer of the drafter."""

    name: str
    cols: int
    k: int
    split: int
    copies_per_unit: int

    @property
    def normed(self) -> bool:
        """RMSNorm in front: one factor per row, applied to the finished sums."""
        return self.name in ("qkv", "gu", "lm", "ckv")

    @property
    def owned(self) -> bool:
        """Its tiles belong to the CTAs that keep the residual's columns."""
        return self.name in ("o", "down", "fc")

    @property
    def slab(self) -> int:
        return self.k // self.split

    @property
    def unit_bytes(self) -> int:
        return TILE * self.slab * 2

    @property
    def copy_bytes(self) -> int:
        return self.unit_bytes // self.copies_per_unit

    @property
    def tiles(self) -> int:
        return self.cols // TILE


@dataclass(frozen=True)
class Config:
    """Everything that changes the machine code of one kernel. Bad choices raise ValueError.

    warps: consumer warps; they share the K of every unit. down_split: CTAs that share the K of a
    tile of `down` (a team). stage_bytes, stages: the ring. inflight, hungry: see ring.py.
    probe_from: rows from which one vector per lane is polled before all are asked for, where there
    are more than `ask_at_once`: polling everything costs L2 bandwidth, polling first a round trip.
    red_buffers: buffers of partial sums; with 2 a barrier per group of tiles goes.
    setmaxnreg: registers move from the other warps to the consumers.
    attention: between qkv and o, in `splits` parts of the context (without it, for tests of the
    matrices alone, o reads q). prompt: PROMPT steps too. draft: speculation too; it needs both,
    and a ring that is not too short.
    timing: every CTA notes when its phases begin and end.
    """

    shape: Shape
    ctas: int = 132
    warps: int = 8
    down_split: int = 1
    stage_bytes: int = 16384
    stages: int = 12
    inflight: int = 2
    hungry: int = 4
    probe_from: int = 1
    ask_at_once: int = 1
    red_buffers: int = 1
    setmaxnreg: bool = False
    timing: bool = False
    attention: bool = True
    prompt: bool = True
    draft: bool = True
    splits: int = 16
    phase: str = ""  # one phase as a kernel of its own, for graph baselines
    arch: str = "sm_90a"
    gemms: tuple = field(init=False, default=())  # in the order of KINDS
    draft_gemms: tuple = field(init=False, default=())  # of DRAFT_KINDS

    def __post_init__(self) -> None:
        s = self.shape
        if s.vocab > MAX_VOCAB:
            raise ValueError(
                f"{s.name}: the vocabulary has {s.vocab} tokens; the GPU's kernels take up to"
                f" {MAX_VOCAB}"
            )
        sizes = {
            "qkv": (s.qkv, s.hidden),
            "o": (s.hidden, s.attended),
            "gu": (2 * s.ffn, s.hidden),
            "down": (s.hidden, s.ffn),
            "lm": (-(-s.vocab // TILE) * TILE, s.hidden),
            "fc": (s.hidden, s.hidden),
            "ckv": (2 * s.kv_heads * s.head_dim, s.hidden),
        }
        few = self.stages < attention_plan.tree_stages(self)
        if not (self.attention and self.prompt) or self.phase or few:
            object.__setattr__(self, "draft", False)
        self._check(self.warps % 2 == 0, "warps", "even")
        self._check(not self.setmaxnreg or self.warps % 4 == 0, "warps", "a multiple of 4")
        gemms = []
        for name, (cols, k) in sizes.items():
            split = self.down_split if name == "down" else 1
            step = CHUNK * self.warps * split
            self._check(k % step == 0, "warps", f"such that {step} divides K = {k} of {name}")
            unit = TILE * (k // split) * 2
            copies = -(-unit // self.stage_bytes)
            while unit % copies or unit // copies % (CHUNK * self.warps * TILE * 2):
                copies += 1
                self._check(copies <= unit // 512, "stage_bytes", f"fit for units of {unit} bytes")
            gemms.append(Gemm(name, cols, k, split, copies))
        object.__setattr__(self, "gemms", tuple(gemms[: len(KINDS)]))
        object.__setattr__(self, "draft_gemms", tuple(gemms[len(KINDS) :]))
        self._check(self.ctas % self.team == 0, "ctas", f"a multiple of {self.team}")
        fewest = min(self.gemm("gu").tiles, self.gemm("lm").tiles)
        self._check(self.ctas <= fewest, "ctas", f"at most the {fewest} tiles of gate/up and head")
        self._check(
            self.group % self.team == 0 or int(self.team_tiles("down").max()) <= self.team,
            "warps",
            f"2 x a multiple of the team's {self.team} CTAs",
        )
        if self.attention:
            self._check_attention()
        total = sum(self.smem_plan().values())
        limit = SMEM_LIMIT[self.arch]
        if total > limit:
            parts = ", ".join(f"{k} {v}" for k, v in self.smem_plan().items())
            raise ValueError(
                f"{s.name}: shared memory {total} B is over the {limit} B of {self.arch} ({parts});"
                f" use fewer stages (now {self.stages})"
            )

    def _check_attention(self) -> None:
        attention_plan.check(self)
        self._check(self.stage_bytes >= KV_COPY, "stage_bytes", f"at least {KV_COPY} for KV blocks")
        self._check(self.stage_bytes % 1024 == 0, "stage_bytes", "a multiple of 1024")

    def _check(self, ok: bool, name: str, wanted: str) -> None:
        if not ok:
            raise ValueError(
                f"{self.shape.name}: {name} is {getattr(self, name)}; it must be {wanted}"
            )

    # -- derived sizes
    @property
    def team(self) -> int:
        """CTAs that share the K of `down`. Neighbours; each finishes every team-th tile."""
        return self.down_split

    @property
    def group(self) -> int:
        """Tiles summed over the warps in one go: 64 threads (row, column pair) each."""
        return self.warps * 32 // 64

    @property
    def block(self) -> int:
        """Threads: consumers, the producer, the janitor and the service warp (a phase alone has
        but the producer); setmaxnreg wants whole warpgroups."""
        warps = self.warps + (1 if self.phase else 3)
        return (-(-warps // 4) * 4 if self.setmaxnreg else warps) * 32

    def gemm(self, name: str) -> Gemm:
        return next(g for g in (*self.gemms, *self.draft_gemms) if g.name == name)

    def team_tiles(self, name: str) -> np.ndarray:
        """Tiles of each team in a matrix whose tiles belong to teams."""
        tiles, teams = self.gemm(name).tiles, self.ctas // self.team
        size = np.full(teams, tiles // teams)
        extra = tiles % teams
        size[np.arange(extra) * teams // max(extra, 1)] += 1
        return size

    @property
    def own_tiles(self) -> int:
        """Most residual tiles (8 columns) that one CTA keeps."""
        return int(-(-self.team_tiles("down").max() // self.team))

    @property
    def logit_stride(self) -> int:
        """Columns of a row of logits: the vocabulary padded to tiles."""
        return self.gemm("lm").cols

    @property
    def draft_stride(self) -> int:
        """Columns of a row of the drafter's logits: room for a head over all tokens."""
        return self.logit_stride

    @property
    def group_heads(self) -> int:
        """Query heads that share a kv head."""
        return self.shape.heads // self.shape.kv_heads

    @property
    def kv_block_bytes(self) -> int:
        """K and V of one (page, layer, kv head)."""
        return 2 * PAGE * self.shape.head_dim * 2

    @property
    def part_bytes(self) -> int:
        """A split's words for a row and kv head: per head `head_dim` bf16 sums, maximum, sum."""
        return -(-self.group_heads * (2 * self.shape.head_dim + 8) // 16) * 16

    def smem_plan(self) -> dict[str, int]:
        """Bytes of dynamic shared memory by use, in order."""
        tile = ROWS * TILE * 4
        sums = self.red_buffers * self.group * self.warps * tile
        plan = {"ring": self.stages * self.stage_bytes}
        if self.attention:
            plan["attention"] = attention_plan.AttentionSmem.of(self).bytes
            sums = max(sums, attention_plan.exchange_bytes(self))
        if self.draft:  # verify.tail_task
            sums = max(sums, ROWS * self.group_heads * 2 * self.shape.head_dim)
        plan |= {
            "partial sums": sums,
            "row squares": self.red_buffers * self.warps * ROWS * 4,
            "residual": self.own_tiles * tile,
            "results": self.warps * ROWS * 16,
            "descriptor": 512,
            "barriers": (2 * self.stages + 8) * 8,
        }
        if self.team > 1:
            plan["own parts"] = self.own_tiles * tile
        return {k: -(-v // 128) * 128 for k, v in plan.items()}

    @property
    def smem_bytes(self) -> int:
        return sum(self.smem_plan().values())

    @cached_property
    def tag(self) -> str:
        """A readable name: the model and every field that is not at its default."""
        skip = {"shape", "gemms", "draft_gemms", "arch"}
        parts = [self.shape.name]
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name not in skip and value != f.default:
                parts.append(f"{f.name}={int(value) if isinstance(value, bool) else value}")
        return ",".join(parts)


# -- the forms that are built ------------------------------------------------------------------
# Teams of 4 share K where it is long: activations of a phase stay at 64 KiB a CTA (measured).
_WIDE = dict(ctas=128, down_split=4, setmaxnreg=True, ask_at_once=5)
# Short phases wait for latency, not bandwidth: polling first costs 2 % of a step of 1 row.
_NARROW = dict(red_buffers=2, probe_from=9)
PRODUCTS: dict[str, dict] = {
    "smollm2-135m": dict(warps=6, splits=32, **_NARROW),
    "llama-3.2-1b": dict(warps=8, splits=16, **_WIDE),
    "llama-3.1-8b": dict(warps=8, splits=16, **_WIDE),
    "qwen3-8b": dict(warps=8, splits=16, **_WIDE),
    "odd-960": dict(warps=10, splits=16, **_NARROW),
    "odd-768": dict(warps=8, splits=8, **_NARROW),
}
DEVICE_CTAS = {"sm_90a": 132, "sm_100a": 148, "sm_120a": 84}  # SMs that a device of it surely has
MOST_STAGES = 20


def product(shape: Shape | str, arch: str = "sm_90a", **changes) -> Config:
    """The configuration that is built for a preset, with as many ring stages as fit.

    shape: a preset's name, or its Shape with other `layers` or `vocab`. changes: fields of Config;
    `ctas` and `splits` come down to what the target has.
    """
    if isinstance(shape, str):
        if shape not in SHAPES:
            raise ValueError(f"unknown model {shape!r}; known: {', '.join(SHAPES)}")
        shape = SHAPES[shape]
    small = dict(red_buffers=1) if SMEM_LIMIT[arch] < 200_000 else {}
    fields = {**PRODUCTS[shape.name], "arch": arch, **small, **changes}
    team = fields.get("down_split", 1)
    most = DEVICE_CTAS[arch] // team * team
    fields["ctas"] = changes.get("ctas", min(fields.get("ctas", most), most))
    while fields["splits"] * shape.kv_heads > fields["ctas"]:
        fields["splits"] //= 2
    if "stages" in changes:
        return Config(shape, **fields)
    for stages in range(MOST_STAGES, 1, -1):
        try:
            return Config(shape, stages=stages, **fields)
        except ValueError as e:
            if "fewer stages" not in str(e) or stages == 2:
                raise
    raise AssertionError("unreachable")
