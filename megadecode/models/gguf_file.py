"""A model from a GGUF file: its configuration, its weights in canonical form, its tokenizer.

Only what is understood is loaded: an architecture, metadata key or tensor that would change the
result and is not implemented is refused by name, never ignored.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from megadecode.config import ModelConfig
from megadecode.errors import ModelError
from megadecode.models.gguf_config import read_config
from megadecode.models.gguf_header import GgufHeader, TensorInfo, read_header
from megadecode.models.tokenizer import Tokenizer
from megadecode.models.weights import FloatArray, tensor_shapes

PIECE_ELEMENTS = 16384

# Canonical name -> name in the file.
_TOP_NAMES = {"embed": "token_embd", "final_norm": "output_norm", "head": "output"}
_LAYER_NAMES = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "ffn_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def load(path: str | os.PathLike[str]) -> LoadedModel:
    """Open a GGUF file and check it: every key, every tensor's name, shape, dtype and place.

    Reads the header only; weights are read when asked for. Raises ModelError.
    """
    header = read_header(path)
    config = read_config(header)
    return LoadedModel(header, config, _match(header, config))


class LoadedModel:
    """Implements `Weights` over a GGUF file that passed every check of `load`.

    `metadata` is the file's own, `chat_template` its Jinja source or None.
    """

    def __init__(
        self, header: GgufHeader, config: ModelConfig, sources: dict[str, TensorInfo]
    ) -> None:
        self.path: Path = header.path
        self.config = config
        self.metadata = header.metadata
        self._sources = sources
        self._embed: Callable[[], FloatArray | None] = lambda: None

    @property
    def chat_template(self) -> str | None:
        template = self.metadata.get("tokenizer.chat_template")
        return template if isinstance(template, str) else None

    def tokenizer(self) -> Tokenizer:
        """The tokenizer this file describes. Raises ModelError if it is missing or unsupported."""
        try:
            tokenizer = Tokenizer.from_gguf(self.metadata)
        except ModelError as error:
            raise ModelError(f"{self.path}: {error}") from None
        if tokenizer.vocab_size > self.config.vocab:
            raise ModelError(
                f"{self.path}: the tokenizer has {tokenizer.vocab_size} tokens, "
                f"the embedding only {self.config.vocab}"
            )
        return tokenizer

    def tensor(self, name: str) -> FloatArray:
        """fp32 values of one tensor (see `weights.tensor_shapes`); KeyError for an unknown name.

        Raises ModelError naming the tensor when the file changed under us or holds NaN or infinity.
        """
        if name == "head" and self.config.tied_embeddings:
            name = "embed"
        if name == "embed" and (kept := self._embed()) is not None:
            return kept
        values = _read_tensor(self.path, self._sources[name])
        kind = name.rpartition(".")[2]
        if kind in ("q", "k"):
            heads = self.config.heads if kind == "q" else self.config.kv_heads
            values = _half_split(values, heads)
        if name == "embed":
            self._embed = weakref.ref(values)
        return values

    def tensors(self) -> Iterator[tuple[str, FloatArray]]:
        """All tensors in order of use, each read when it is reached."""
        for name in tensor_shapes(self.config):
            yield name, self.tensor(name)


def _half_split(weight: FloatArray, heads: int) -> FloatArray:
    """[heads * d, n] rows from GGUF's interleaved rotary pairs (2j, 2j + 1) to (j, j + d / 2)."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def _read_tensor(path: Path, info: TensorInfo) -> FloatArray:
    try:
        with path.open("rb") as file:
            raw = np.fromfile(file, np.uint8, info.bytes, offset=info.offset)
    except OSError as error:
        raise ModelError(f"{path}: tensor {info.name!r} cannot be read: {error}") from None
    if raw.size != info.bytes:
        raise ModelError(f"{path}: tensor {info.name!r} is cut short; the file changed on disk")
    with np.errstate(all="ignore"):  # damaged scales overflow; judged below, by name
        values = dequantize(raw.reshape(_pieces(info), -1), info.dtype).reshape(info.shape)
    # min and max both carry a NaN, and need no temporary.
    if not (np.isfinite(values.min()) and np.isfinite(values.max())):
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ModelError(
            f"{path}: tensor {info.name!r} holds {values.flat[bad]} at element {bad}; "
            "the file is damaged"
        )
    return values


def _pieces(info: TensorInfo) -> int:
    """Into how many rows of whole blocks to cut the bytes.

    `dequantize` works on 16 rows at a time and is slow on a model's own short rows: 0.88 s for
    135 M elements, 0.31 s with these.
    """
    block, block_bytes = GGML_QUANT_SIZES[info.dtype]
    blocks = info.bytes // block_bytes
    pieces = max(1, blocks * block // PIECE_ELEMENTS)
    while blocks % pieces:
        pieces -= 1
    return pieces


@cache
def _can_dequantize(dtype: GGMLQuantizationType) -> bool:
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[dtype][1]), np.uint8), dtype)
    except NotImplementedError:
        return False
    return True


def _match(header: GgufHeader, config: ModelConfig) -> dict[str, TensorInfo]:
    """Canonical name -> its tensor in the file; nothing missing, nothing left over."""
    sources: dict[str, TensorInfo] = {}
    unused = set(header.tensors)
    for name, shape in tensor_shapes(config).items():
        if name == "head" and config.tied_embeddings:
            continue
        stored = _stored_name(name)
        info = header.tensors.get(stored)
        if info is None:
            raise ModelError(f"{header.path}: tensor {stored!r} is missing; expected {list(shape)}")
        if info.shape != shape:
            raise ModelError(
                f"{header.path}: tensor {stored!r} has shape {list(info.shape)}; "
                f"its configuration asks for {list(shape)}"
            )
        if not _can_dequantize(info.dtype):
            raise ModelError(
                f"{header.path}: tensor {stored!r} has dtype {info.dtype.name}, "
                "which cannot be converted to fp32"
            )
        sources[name] = info
        unused.discard(stored)
    if unused:
        raise ModelError(
            f"{header.path}: tensor {min(unused)!r} belongs to a variant of the model that is not "
            "supported (biases, rotary scaling factors or experts would change the result)"
        )
    return sources


def _stored_name(name: str) -> str:
    if name in _TOP_NAMES:
        return f"{_TOP_NAMES[name]}.weight"
    _, layer, kind = name.split(".")
    return f"blk.{layer}.{_LAYER_NAMES[kind]}.weight"
