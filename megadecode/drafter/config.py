"""The shape of a DFlash drafter: a block of positions drafted in one pass from target features.

A block holds `block_size` rows: row 0, the *anchor*, is the newest emitted token at position n, the
others are MASK. The rows attend to the draft keys and values of positions 0..n-1, which are made
from the target's residual stream after the layers `taps`, and to one another.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadecode.config import ModelConfig
from megadecode.errors import ModelError
from megadecode.rope import Yarn, rotation_table

FULL, SLIDING = "full_attention", "sliding_attention"
MAX_BLOCK = 16
MAX_DEPTH = 15
"""Deepest draft a target's verify rows may have; see `cute_kernels.cpu.attention.TAIL`."""

_SIZES = (
    "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "target_layers"
)  # fmt: skip


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes are in elements; `hidden` and `vocab` are the target's, whose embeddings are used.

    taps: 0-based target layers; tap l is the residual stream after decoder layer l. The order is
    that of the columns of `fc`. Never guessed: two drafters of one shape may differ in it.
    layer_types: per layer `full_attention` or `sliding_attention`; empty: all full.
    window: positions a sliding layer sees, its own included.
    is_causal: whether a block row is blind to later rows of its block; None: sliding layers are,
    full ones are not. Not causal and sliding: the window is symmetric.
    prediction: what row k of the block stands for. `same`: position n + k (the anchor row predicts
    nothing); `next`: position n + k + 1.
    target_fingerprint: see `megadecode.drafter.fingerprint`; None: the target is not known.
    draft_tokens: the tokens that are ever drafted, ascending, a multiple of 32 of them; empty: all.
    The head, which is most of a small drafter's cost, is computed for these alone.

    Raises ModelError, naming the key, what was found and what was expected.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    block_size: int
    taps: tuple[int, ...]
    target_layers: int
    mask_token_id: int
    rms_eps: float = 1e-6
    rope_theta: float = 10000.0
    yarn: Yarn | None = None
    layer_types: tuple[str, ...] = ()
    window: int | None = None
    is_causal: bool | None = None
    prediction: str = "same"
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    target_fingerprint: str | None = None
    draft_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for key in (*_SIZES, "block_size"):
            value = getattr(self, key)
            if not _is_integer(value) or value < 1:
                self._refuse(key, value, "a positive integer")
        if self.heads % self.kv_heads:
            self._refuse("heads", self.heads, f"a multiple of kv_heads, which is {self.kv_heads}")
        if self.head_dim % 2:
            self._refuse("head_dim", self.head_dim, "an even number, for rotary positions")
        self._check_block()
        self._check_taps()
        if not _is_integer(self.mask_token_id) or not 0 <= self.mask_token_id < self.vocab:
            self._refuse(
                "mask_token_id", self.mask_token_id, f"a token id from 0 to {self.vocab - 1}"
            )
        self._check_layers()
        self._check_draft_tokens()
        for key in ("rope_theta", "input_embedding_scale", "output_multiplier"):
            value = getattr(self, key)
            if not _is_number(value) or value <= 0:
                self._refuse(key, value, "a positive number")
        if not _is_number(self.rms_eps) or self.rms_eps < 0:
            self._refuse("rms_eps", self.rms_eps, "a number that is not negative")
        cap = self.final_logit_softcapping
        if cap is not None and (not _is_number(cap) or cap <= 0):
            self._refuse("final_logit_softcapping", cap, "a positive number or none")

    def _check_block(self) -> None:
        if self.prediction not in ("same", "next"):
            self._refuse("prediction", self.prediction, "'same' or 'next'")
        # Where the anchor predicts too, a block drafts as many positions as it has rows.
        most = MAX_BLOCK if self.prediction == "same" else MAX_DEPTH
        if not 2 <= self.block_size <= most:
            self._refuse(
                "block_size", self.block_size,
                f"2 to {most}, the anchor included, with prediction {self.prediction!r}",
            )  # fmt: skip

    def _check_taps(self) -> None:
        if not isinstance(self.taps, tuple) or not self.taps:
            self._refuse("taps", self.taps, "a tuple of target layers; they are never guessed")
        for tap in self.taps:
            if not _is_integer(tap) or not 0 <= tap < self.target_layers:
                self._refuse("taps", self.taps, f"target layers from 0 to {self.target_layers - 1}")
        if len(set(self.taps)) < len(self.taps):
            self._refuse("taps", self.taps, "target layers that differ")

    def _check_layers(self) -> None:
        kinds = self.layer_types
        if not isinstance(kinds, tuple) or (kinds and len(kinds) != self.layers):
            self._refuse("layer_types", kinds, f"one entry for each of {self.layers} layers")
        for kind in kinds:
            if kind not in (FULL, SLIDING):
                self._refuse("layer_types", kind, f"{FULL!r} or {SLIDING!r}")
        if SLIDING in kinds and (not _is_integer(self.window) or (self.window or 0) < 1):
            self._refuse("window", self.window, "a positive integer, as there are sliding layers")

    def _check_draft_tokens(self) -> None:
        tokens = self.draft_tokens
        if not tokens:
            return
        if not isinstance(tokens, tuple) or len(tokens) % 32:
            self._refuse("draft_tokens", f"{len(tokens)} ids", "a tuple of a multiple of 32 ids")
        if not all(_is_integer(t) and 0 <= t < self.vocab for t in tokens):
            self._refuse("draft_tokens", "a list with others", f"ids from 0 to {self.vocab - 1}")
        if any(a >= b for a, b in itertools.pairwise(tokens)):
            self._refuse("draft_tokens", "out of order", "ids that ascend")

    def _refuse(self, key: str, found: object, expected: str) -> None:
        raise ModelError(f"drafter {self.name!r}: {key} is {found!r}; expected {expected}")

    @property
    def drafted(self) -> int:
        """Positions one block predicts: L. The anchor counts only where it predicts too."""
        return self.block_size - (self.prediction == "same")

    @property
    def first_row(self) -> int:
        """The first block row that predicts; row `first_row + i` is for position n + 1 + i."""
        return self.block_size - self.drafted

    @property
    def feature_size(self) -> int:
        """Elements of one position's features: the taps' residual streams side by side."""
        return len(self.taps) * self.hidden

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by. YaRN acts through cosines and sines only."""
        return float(self.head_dim**-0.5)

    def window_of(self, layer: int) -> int | None:
        """Positions a layer sees, the row's own included; None: all."""
        return self.window if self.layer_types and self.layer_types[layer] == SLIDING else None

    def causal(self, layer: int) -> bool:
        """Whether a row of the block is blind to later rows."""
        return self.window_of(layer) is not None if self.is_causal is None else self.is_causal

    def as_model(self) -> ModelConfig:
        """The drafter's layers as a model's, for code that lays out weights and activations."""
        return ModelConfig(
            name=self.name, layers=self.layers, hidden=self.hidden, heads=self.heads,
            kv_heads=self.kv_heads, head_dim=self.head_dim, ffn=self.ffn, vocab=self.vocab,
            context_tokens=1, rope_theta=self.rope_theta, rope_scaling=self.yarn,
            rms_eps=self.rms_eps, tied_embeddings=False, qk_norm=True,
        )  # fmt: skip

    def rotations(self, positions: int) -> NDArray[np.float64]:
        """[positions, 2, head_dim / 2]: cosines, then sines, YaRN's multiplier in them."""
        return rotation_table(self.head_dim, self.rope_theta, self.yarn, positions)

    def check_target(self, target: ModelConfig) -> None:
        """ModelError unless the drafter's shape fits the target's."""
        pairs = (
            ("hidden", self.hidden, target.hidden),
            ("vocab", self.vocab, target.vocab),
            ("target_layers", self.target_layers, target.layers),
        )
        for key, found, expected in pairs:
            if found != expected:
                raise ModelError(
                    f"drafter {self.name!r}: {key} is {found}; its target {target.name!r} has "
                    f"{expected}. Use the drafter that was trained for this target"
                )

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON types; `from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DrafterConfig:
        """The inverse of `to_dict`. ModelError for an unknown or missing key."""
        known = dict(values)
        try:
            for key in ("taps", "layer_types", "draft_tokens"):
                known[key] = tuple(known.get(key, ()) if key == "draft_tokens" else known[key])
            if known.get("yarn") is not None:
                known["yarn"] = Yarn(**known["yarn"])
            return cls(**known)
        except ModelError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(
                f"drafter {values.get('name')!r}: bad configuration: {error}"
            ) from None


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
