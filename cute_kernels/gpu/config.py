"""What a decode step computes: shapes and compile-time choices.

Host-side and free of cutlass: the same description drives packing, the device code, the tests and
the roofline columns of the reports. Who computes what: tiles.py.

Words. A matrix [N, K] is cut into *tiles* of 8 output columns. A tile's slice of K that one CTA
multiplies in one go is a *unit*: 8 x `slab` bf16 values, stored in MMA fragment order. Where
`split` > 1 the CTAs of a cluster share the K of their tiles and exchange partial sums; where
`passes` > 1 a CTA walks its share of K slab by slab, so that a slab of activations fits registers.
"""

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

TILE = 8  # output columns of an mma.sync m16n8k16
CHUNK = 32  # K values in one 16-byte B vector of a warp: two k16 steps
SMEM_LIMIT = {"sm_90a": 232448, "sm_100a": 232448, "sm_120a": 101376}  # bytes per block
PAGE, BLOCK_BYTES = 64, 16384  # positions of a KV page; K and V of one (page, layer, kv head)
TAIL_KEYS = 96  # room for the keys c(p) .. p of a row, at most 15 + 64 of them
COPIES = 3  # rotating copies of every activation buffer; see step.py


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder-only transformer of the Llama family, in elements."""

    name: str
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layers: int
    rms_eps: float = 1e-5

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


LLAMA_1B = Shape("llama-3.2-1b", 2048, 8192, 32, 8, 64, 128256, 16)
SMOLLM2 = Shape("smollm2-135m", 576, 1536, 9, 3, 64, 49152, 30)
SHAPES = {s.name: s for s in (LLAMA_1B, SMOLLM2)}
LAYER_KINDS = ("qkv", "o", "gu", "down")
KINDS = (*LAYER_KINDS, "lm")


@dataclass(frozen=True)
class Gemm:
    """One matrix of the step as the kernel sees it. `index` is its place in KINDS."""

    name: str
    cols: int
    k: int
    split: int
    passes: int
    copies_per_unit: int

    @property
    def index(self) -> int:
        return KINDS.index(self.name)

    @property
    def normed(self) -> bool:
        """RMSNorm in front: one factor per row, applied to the finished sums."""
        return self.name in ("qkv", "gu", "lm")

    @property
    def slab(self) -> int:
        return self.k // self.split // self.passes

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
class Family:
    """Matrices whose phases may share one body of code: the same slab in the same copies; they
    differ at run time only. (Half the code; on an H200 no faster, and a shape of many short phases
    is slower by the branches: Config.shared_code.)"""

    gemms: tuple[Gemm, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(g.name for g in self.gemms)

    @property
    def slab(self) -> int:
        return self.gemms[0].slab

    @property
    def copies_per_unit(self) -> int:
        return self.gemms[0].copies_per_unit

    @property
    def split(self) -> int:
        """Of those that are split (they are split alike), else 1."""
        return max(g.split for g in self.gemms)

    @property
    def split_names(self) -> tuple[str, ...]:
        return tuple(g.name for g in self.gemms if g.split > 1)

    @property
    def whole_names(self) -> tuple[str, ...]:
        return tuple(g.name for g in self.gemms if g.split == 1)

    @property
    def passes(self) -> int:
        return max(g.passes for g in self.gemms)


@dataclass(frozen=True)
class Config:
    """Everything that changes the machine code of one step kernel. Bad choices raise ValueError.

    warps: consumer warps, `row_warps` of them side by side over the rows, the others over K.
    split / down_split: CTAs that share the K of a tile, in all other matrices / in `down`; they
    form a team. exchange: how a team adds its partial sums, "cluster" (DSMEM; a team is a cluster)
    or "global" (words as flags in device memory; `down` only).
    passes: slabs of `down` per CTA. inflight, hungry, l2_copies, l2_pace_ns: see ring.py.
    probe: poll one vector per lane before asking for all, where there are more than `ask_at_once`.
    attention: tree attention between qkv and o, in `splits` parts of the
    context (without it: a GEMM skeleton); tail: False leaves the key-by-key part out, wrong on
    purpose, to see what it costs.
    """

    shape: Shape
    rows: int = 16
    ctas: int = 132
    warps: int = 8
    row_warps: int = 1
    split: int = 1
    down_split: int = 4
    exchange: str = "global"
    passes: int = 1
    stage_bytes: int = 16384
    stages: int = 13
    inflight: int = 2
    hungry: int = 4
    l2_copies: int = 0
    l2_pace_ns: int = 300
    probe: bool = True
    ask_at_once: int = 1
    red_buffers: int = 1
    inbox_slots: int = 2
    setmaxnreg: bool = False
    timing: bool = False
    attention: bool = False
    splits: int = 16
    tail: bool = True
    handoff: str = "words"  # or "none": nobody waits, wrong on purpose
    dry: bool = False  # no copies into the ring: wrong on purpose, the consumers alone
    shared_code: bool = False  # one body of code per Family, not per matrix
    phase: str = ""  # one phase as a kernel of its own, for graph baselines
    arch: str = "sm_90a"
    gemms: tuple = field(init=False, default=())

    def __post_init__(self) -> None:
        s = self.shape
        sizes = {
            "qkv": (s.qkv, s.hidden),
            "o": (s.hidden, s.heads * s.head_dim),
            "gu": (2 * s.ffn, s.hidden),
            "down": (s.hidden, s.ffn),
            "lm": (s.vocab, s.hidden),
        }
        self._check(self.rows == 8 or self.rows % 16 == 0, "rows", "8 or a multiple of 16")
        self._check(self.warps % self.row_warps == 0, "row_warps", f"a divisor of {self.warps}")
        self._check(self.m_tiles % self.row_warps == 0, "row_warps", f"a divisor of {self.m_tiles}")
        gemms = []
        for name, (cols, k) in sizes.items():
            split = self.down_split if name == "down" else self.split
            passes = self.passes if name == "down" else 1
            step = CHUNK * self.k_warps * split * passes
            self._check(k % step == 0, "warps", f"such that {step} divides K = {k} of {name}")
            unit = TILE * (k // split // passes) * 2
            copies = -(-unit // self.stage_bytes)
            while unit % copies or unit // copies % (CHUNK * self.k_warps * TILE * 2):
                copies += 1
                self._check(copies <= unit // 512, "stage_bytes", f"fit for units of {unit} bytes")
            gemms.append(Gemm(name, cols, k, split, passes, copies))
        object.__setattr__(self, "gemms", tuple(gemms))
        self._check(self.ctas % self.team == 0, "ctas", f"a multiple of {self.team}")
        self._check(self.split in (1, self.down_split), "split", f"1 or {self.down_split}")
        self._check(self.exchange in ("cluster", "global"), "exchange", "'cluster' or 'global'")
        self._check(
            self.split == 1 or self.exchange == "cluster", "split", "1 with a global exchange"
        )
        self._check(self.split == 1 or not self.half, "split", "1 for 8 rows")
        if self.team > 1:
            most = self.group if self.exchange == "cluster" else self.team
            one_group = max(self.team_tiles("down")) <= most
            self._check(
                self.group % self.team == 0 or (one_group and self.split == 1),
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
        s = self.shape
        self._check(self.rows == 16, "rows", "16 with attention")
        self._check(self.split == 1, "split", "1 with attention")
        self._check(self.warps == 2 * self.group_heads, "warps", "2 per query head of a kv head")
        self._check(self.splits in (16, 32), "splits", "16 or 32: one lane's statistics each")
        self._check(
            s.kv_heads * self.splits <= self.ctas, "splits", f"at most {self.ctas // s.kv_heads}"
        )
        self._check(
            self.stage_bytes >= BLOCK_BYTES, "stage_bytes", f"at least {BLOCK_BYTES} for KV blocks"
        )
        if s.head_dim != 64:
            raise ValueError(f"{s.name}: head_dim is {s.head_dim}; attention is written for 64")

    def _check(self, ok: bool, name: str, wanted: str) -> None:
        if not ok:
            raise ValueError(
                f"{self.shape.name}: {name} is {getattr(self, name)}; it must be {wanted}"
            )

    # -- derived sizes
    @property
    def team(self) -> int:
        """CTAs that share the K of `down`. Neighbours; each finishes every team-th tile."""
        return max(self.split, self.down_split)

    @property
    def cluster(self) -> int:
        """CTAs of a launched cluster."""
        return self.team if self.exchange == "cluster" else 1

    @property
    def half(self) -> bool:
        """8 rows: one 16-byte A vector serves both k16 steps of a chunk."""
        return self.rows == 8

    @property
    def m_tiles(self) -> int:
        return max(self.rows // 16, 1)

    @property
    def tile_rows(self) -> int:
        return self.m_tiles * 16

    @property
    def k_warps(self) -> int:
        return self.warps // self.row_warps

    @property
    def group(self) -> int:
        """Tiles summed over the warps in one go: 64 threads (row, column pair) each."""
        return self.warps * 32 // 64

    @property
    def chunk_bytes(self) -> int:
        """One 32-wide K chunk of activations."""
        return 512 if self.half else 1024 * self.m_tiles

    @property
    def block(self) -> int:
        """Consumers, the producer and the janitor (a phase alone has nothing to clear); setmaxnreg
        wants whole warpgroups."""
        warps = self.warps + (1 if self.phase else 2)
        return (-(-warps // 4) * 4 if self.setmaxnreg else warps) * 32

    @property
    def families(self) -> list[Family]:
        groups: dict[tuple[int, int], list[Gemm]] = {}
        for g in self.gemms:
            if self.phase in ("", g.name):
                key = (g.slab, g.copies_per_unit) if self.shared_code else (g.index, 0)
                groups.setdefault(key, []).append(g)
        return [Family(tuple(v)) for v in groups.values()]

    def gemm(self, name: str) -> Gemm:
        return self.gemms[KINDS.index(name)]

    def team_tiles(self, name: str) -> np.ndarray:
        """Tiles of each team in a matrix whose tiles belong to teams."""
        tiles, clusters = self.gemm(name).tiles, self.ctas // self.team
        size = np.full(clusters, tiles // clusters)
        extra = tiles % clusters
        size[np.arange(extra) * clusters // max(extra, 1)] += 1
        return size

    @property
    def own_tiles(self) -> int:
        """Most residual tiles (8 columns) that one CTA keeps."""
        return int(-(-self.team_tiles("down").max() // self.team))

    @property
    def inbox_tiles(self) -> int:
        return -(-self.group // self.team)

    @property
    def group_heads(self) -> int:
        """Query heads that share a kv head."""
        return self.shape.heads // self.shape.kv_heads

    @property
    def part_bytes(self) -> int:
        """A split's words for a row and kv head: per head 64 bf16 sums, maximum, sum."""
        return -(-self.group_heads * (128 + 8) // 16) * 16

    @property
    def acc_groups(self) -> int:
        return -(-int(self.team_tiles("down").max()) // self.group) if self.passes > 1 else 0

    def smem_plan(self) -> dict[str, int]:
        """Bytes of dynamic shared memory by use, in order."""
        tile = self.tile_rows * TILE * 4
        plan = {"ring": self.stages * self.stage_bytes}
        if self.attention:
            self._check(self.stage_bytes % 1024 == 0, "stage_bytes", "a multiple of 1024")
            plan["attention"] = AttentionSmem.of(self.group_heads).bytes
        plan |= {
            "partial sums": self.red_buffers * self.group * self.k_warps * tile,
            "row squares": self.red_buffers * self.k_warps * self.tile_rows * 4,
            "residual": self.own_tiles * tile,
            "barriers": (2 * self.stages + 2 + 8) * 8,
        }
        if self.cluster > 1:
            plan["inbox"] = self.inbox_slots * self.inbox_tiles * self.team * tile
        elif self.team > 1:
            plan["own parts"] = self.own_tiles * tile
        if self.split > 1:
            plan["squares inbox"] = 2 * self.split * self.k_warps * self.tile_rows * 4
            plan["row factors"] = self.tile_rows * 4
        if self.acc_groups:
            plan["pass sums"] = self.acc_groups * self.group * tile
        return {k: -(-v // 128) * 128 for k, v in plan.items()}

    @property
    def smem_bytes(self) -> int:
        return sum(self.smem_plan().values())

    @cached_property
    def tag(self) -> str:
        """A readable name: the model and every field that is not at its default."""
        skip = {"shape", "gemms", "arch"}
        parts = [self.shape.name]
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name not in skip and value != f.default:
                parts.append(f"{f.name}={int(value) if isinstance(value, bool) else value}")
        return ",".join(parts)


@dataclass(frozen=True)
class AttentionSmem:
    """Offsets in the attention part: rotary factors of the rows, this step's K and V rows of one kv
    head, one row of Q per head (later the tail's sums), (probability, address) of the tail keys per
    head, the row table. The whole is aligned to 1,024 bytes."""

    rope: int
    new: int
    q: int
    p: int
    rows: int
    bytes: int

    @classmethod
    def of(cls, heads: int) -> "AttentionSmem":
        sizes = (16 * 32 * 8, 16 * 256, heads * 64 * 4, heads * TAIL_KEYS * 8, 16 * 16)
        ends = np.cumsum(sizes).tolist()
        return cls(0, *ends)
