"""A drafter on the GPU beside a random target, and the torch module it is compared with."""

import importlib
import itertools
import json
import pathlib
import struct
import sys
import types

import numpy as np
import torch
import torch.nn.functional as F

from cute_kernels.gpu import pack
from cute_kernels.gpu.board import Board, Stamp
from cute_kernels.gpu.buffers import draft_buffers
from cute_kernels.gpu.config import PAGE, Config, DraftShape
from cute_kernels.gpu.kv_layout import key_order, rotary_rows, swizzle_rows
from cute_kernels.gpu.load import Kernel
from cute_kernels.gpu.script import decode_step, draft_phases, draft_step
from tests.gpu.model import Context, Model
from tests.gpu.rig import Rig

ROOT = pathlib.Path(__file__).parents[2]
SHIPPED = ROOT / "megadecode" / "drafter" / "shipped" / "smollm2-135m.safetensors"
FEATURE_ROWS = 256


def without_readers() -> None:
    """Where the packages that model files are read with are missing, `megadecode` is a bare
    package: the modules used here need nothing but numpy and torch."""
    try:
        importlib.import_module("megadecode")
    except ImportError:
        for name in [n for n in sys.modules if n.split(".")[0] == "megadecode"]:
            del sys.modules[name]
        for name in ("megadecode", "megadecode.drafter"):
            bare = types.ModuleType(name)
            bare.__path__ = [str(ROOT / name.replace(".", "/"))]
            sys.modules[name] = bare


without_readers()
from megadecode.cuda_weights import DRAFT_STREAM, pack_drafter  # noqa: E402
from megadecode.drafter.config import DrafterConfig  # noqa: E402
from megadecode.drafter.module import DrafterModule, _rotate  # noqa: E402

PARTS = {
    "attn_norm": "input_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj",
    "v": "self_attn.v_proj", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
    "o": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "gate": "mlp.gate_proj",
    "up": "mlp.up_proj", "down": "mlp.down_proj", "fc": "fc", "context_norm": "hidden_norm",
    "final_norm": "norm",
}  # fmt: skip


def module_name(canonical: str) -> str:
    *at, part = canonical.split(".")
    return ".".join([*at, PARTS[part], "weight"])


# -- drafters ------------------------------------------------------------------------------------
def shipped(c: Config, taps: tuple[int, ...]) -> tuple[DrafterConfig, dict[str, torch.Tensor]]:
    """SmolLM2's own drafter, for a target of as many layers as `c` has."""
    raw = SHIPPED.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    values = json.loads(header.pop("__metadata__")["config"])
    config = DrafterConfig.from_dict(values | dict(taps=list(taps), target_layers=c.shape.layers))
    tensors = {}
    for name, about in header.items():
        begin, end = (8 + size + at for at in about["data_offsets"])
        kind = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16}[about["dtype"]]
        flat = torch.frombuffer(bytearray(raw[begin:end]), dtype=kind)
        tensors[name] = flat.reshape(about["shape"]).float().cuda()
    return config, tensors


def random_drafter(
    c: Config, layers: int, taps: tuple[int, ...], seed: int, **changes
) -> tuple[DrafterConfig, dict[str, torch.Tensor]]:
    """Weights are multiples of bf16; the first layer sees all, the others windows."""
    s = c.shape
    config = DrafterConfig(
        name=s.name, layers=layers, hidden=s.hidden, heads=s.heads, kv_heads=s.kv_heads,
        head_dim=s.head_dim, ffn=s.ffn, vocab=s.vocab, block_size=16, taps=taps,
        target_layers=s.layers, mask_token_id=1, rms_eps=s.rms_eps,
        layer_types=("full_attention", *["sliding_attention"] * (layers - 1)), window=100,
        is_causal=False, **changes,
    )  # fmt: skip
    torch.manual_seed(seed)
    none = torch.zeros(s.vocab, s.hidden)
    tensors = {}
    for name, value in DrafterModule(config, none, none).state_dict().items():
        if value.dim() == 1:
            value = 1 + 0.2 * torch.randn_like(value)
        else:
            value = torch.randn_like(value) * value.shape[1] ** -0.5
        tensors[name] = value.bfloat16().float().cuda()
    return config, tensors


# -- the case ------------------------------------------------------------------------------------
class DraftCase:
    """`n` positions whose features are random and have been given to the drafter 16 at a time, as
    DRAFT steps without rows do. module: fp32, of the same weights; half: the same in bf16."""

    def __init__(
        self, kernel: Kernel, c: Config, model: Model, drafter: tuple, n: int, seed: int, room=192
    ) -> None:
        """room: positions behind the first n that have pages."""
        self.c, self.n, self.model = c, n, model
        self.config, tensors = drafter
        config, s = self.config, c.shape
        self.shape = DraftShape(config.layers, len(config.taps), len(config.draft_tokens))
        made = DrafterModule(config, model.embed.float(), model.head.float()).cuda()
        self.module = made.load(tensors).eval()
        self.half = DrafterModule(config, model.embed, model.head).cuda().load(tensors).bfloat16()
        self.ctx = Context(s, n, room, seed)
        packed = model.packed(c)
        packed |= pack_drafter(
            config, lambda name: tensors[module_name(name)], packed, lambda: model.head.float(),
            c, self.shape, len(self.ctx.pages) * PAGE,
        )  # fmt: skip
        self.stream = packed.pop(DRAFT_STREAM)
        self.buffers = {
            name: torch.full((size,), 255, dtype=torch.uint8, device="cuda")
            for name, size in draft_buffers(c, self.shape).items()
        }
        self.pool = torch.full(
            (len(self.ctx.pages), config.layers, s.kv_heads, 2, PAGE, s.head_dim), float("nan"),
            dtype=torch.bfloat16, device="cuda",
        )  # fmt: skip
        numbers = dict(
            DRAFT_LAYERS=config.layers, DRAFT_TAPS=len(config.taps),
            DRAFT_COLUMNS=self.shape.columns or s.vocab,
        )  # fmt: skip
        held = packed | self.buffers | dict(DRAFT_KV=self.pool) | numbers
        phases = 4 * s.layers + 1 + self.shape.phases
        self.times = torch.zeros(c.ctas, phases, 4, dtype=torch.int64, device="cuda")
        self.rig = Rig(kernel, c, held | dict(TIMES=self.times), self.ctx)
        self.phases = draft_phases(s.layers, len(config.taps), config.layers)
        gen = torch.Generator("cuda").manual_seed(seed)
        size = (n, len(config.taps), s.hidden)
        self.features = torch.randn(size, generator=gen, device="cuda").bfloat16().float()
        for start in range(0, n, 16):
            self.give(start, min(16, n - start))

    # -- features by row
    def give(self, start: int, count: int) -> None:
        rows = torch.zeros(len(self.config.taps), FEATURE_ROWS, self.c.shape.hidden, device="cuda")
        rows[:, :count] = self.features[start : start + count].transpose(0, 1)
        flat = torch.cat([pack.to_fragments(x.bfloat16(), 32) for x in rows])
        self.buffers["FEATURES"].copy_(flat.view(torch.uint8))
        self.rig.run([draft_step([], start + count, self.phases, context=range(count))])

    def stored_features(self, rows: int) -> torch.Tensor:
        """What the last step left: fp32 [rows, taps, hidden]."""
        each = self.buffers["FEATURES"].view(torch.bfloat16).chunk(len(self.config.taps))
        return torch.stack([pack.from_fragments(x, 32)[:rows].float() for x in each], 1)

    # -- steps
    def steps(self, tokens: list[int], accepted: list[int], block: list[int]) -> list[np.ndarray]:
        """The target over a chain of tokens behind the context, of which some rows are accepted;
        then the drafter's block behind them."""
        return [
            decode_step(tokens, self.n, self.c.shape.layers),
            draft_step(
                block, self.n + len(accepted), self.phases, context=accepted, budget=15,
                first_drafted=self.config.first_row,
            ),
        ]  # fmt: skip

    def logits(self, rows: int) -> torch.Tensor:
        flat = self.buffers["DRAFT_LOGITS"].view(torch.float32).reshape(16, -1)
        return flat[:rows, : self.shape.columns or self.c.shape.vocab].clone()

    def stamps(self) -> dict[str, float]:
        """Microseconds of the parts of the last DRAFT step behind compaction (whose begin is lost:
        the gate's stamp is the next step's)."""
        at = self.rig.board[Board.STAMP : Board.STAMP + 32].cpu().numpy().view(np.int64)
        kinds = (Stamp.COMPACTED, Stamp.CONTEXT, Stamp.DRAFTED, Stamp.RANKED, Stamp.TREE)
        return {
            kind.name.lower(): (at[kind] - at[before]) / 1000
            for before, kind in itertools.pairwise(kinds)
        }

    # -- what torch says
    def forward(self, module: DrafterModule, features: torch.Tensor, block: list[int]):
        """Logits of all rows of a block behind `features` ([positions, taps, hidden])."""
        kind = module.fc.weight.dtype
        tokens = torch.tensor([block], device="cuda")
        # a module's block has block_size rows; a shorter one of ours is not made here
        hidden = module(features.to(kind), tokens, torch.tensor([len(features)], device="cuda"))[0]
        head = module.head
        if self.config.draft_tokens:
            head = head[torch.tensor(self.config.draft_tokens, device="cuda")]
        return F.linear(hidden, head).float()

    def context(self, module: DrafterModule, features: torch.Tensor):
        """(raw columns as in CONTEXT_KV, keys, values: [layers, kv heads, positions, d]), fp32."""
        s, kind = self.c.shape, module.fc.weight.dtype
        c = module.hidden_norm(module.fc(features.to(kind).flatten(1)))
        order = torch.from_numpy(rotary_rows(s.kv_heads, s.head_dim)).cuda()
        turn = module._turn(len(features), c)[None, : len(features)]
        raw, keys, values = [], [], []
        for layer in module.layers:
            at = layer.self_attn
            k, v = at.k_proj(c), at.v_proj(c)
            raw += [k[:, order], v]
            normed = at.k_norm(at._heads(k[None]))
            keys.append(_rotate(normed, turn)[0])
            values.append(at._heads(v[None])[0])
        return torch.cat(raw, 1).float(), torch.stack(keys).float(), torch.stack(values).float()

    # -- what the kernel left
    def raw_columns(self, rows: int) -> torch.Tensor:
        columns = 2 * self.c.shape.kv_heads * self.c.shape.head_dim * self.config.layers
        flat = self.buffers["CONTEXT_KV"].view(torch.bfloat16)
        return pack.from_fragments(flat, 32)[:rows, :columns].float()

    def cached(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of positions 0 .. n - 1, fp32 [layers, kv heads, n, d]."""
        plain = swizzle_rows(self.pool[self.ctx.pages.long()])
        plain = plain.permute(3, 1, 2, 0, 4, 5).flatten(3, 4)[..., :n, :].float()
        keys = torch.empty_like(plain[0])
        keys[..., torch.from_numpy(key_order(self.c.shape.head_dim)).cuda()] = plain[0]
        return keys, plain[1]

    def is_clean(self) -> bool:
        return self.rig.clean() and bool((self.buffers["FUSED"] == 255).all())
