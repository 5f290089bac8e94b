"""What models on disk have in common, whatever their format: weights read when asked for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from megadecode.config import ModelConfig
from megadecode.errors import ModelError
from megadecode.models.tokenizer import Tokenizer
from megadecode.models.weights import FloatArray, tensor_shapes


class StoredModel:
    """Implements `Weights` over a file or folder whose every tensor has been checked by its loader.

    `sources` reads one tensor each, by canonical name (with tied embeddings there is no `head`).
    """

    def __init__(
        self, path: Path, config: ModelConfig, sources: Mapping[str, Callable[[], FloatArray]]
    ) -> None:
        self.path, self.config = path, config
        self._sources = sources
        self._embed: Callable[[], FloatArray | None] = lambda: None

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the model's chat template, or None."""
        raise NotImplementedError

    def _read_tokenizer(self) -> Tokenizer | None:
        raise NotImplementedError

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer stored with the model; None if there is none.

        Raises ModelError if it is damaged, unsupported or larger than the embedding.
        """
        tokenizer = self._read_tokenizer()
        if tokenizer is not None and tokenizer.vocab_size > self.config.vocab:
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
        values = self._sources[name]()
        if name == "embed":
            self._embed = weakref.ref(values)
        return values

    def tensors(self) -> Iterator[tuple[str, FloatArray]]:
        """All tensors in order of use, each read when it is reached."""
        for name in tensor_shapes(self.config):
            yield name, self.tensor(name)


def read_bytes(path: Path, name: str, dtype: str, count: int, offset: int) -> np.ndarray:
    """`count` elements of the stored tensor `name`; ModelError if they are not there any more."""
    try:
        with path.open("rb") as file:
            raw = np.fromfile(file, dtype, count, offset=offset)
    except OSError as error:
        raise ModelError(f"{path}: tensor {name!r} cannot be read: {error}") from None
    if raw.size != count:
        raise ModelError(f"{path}: tensor {name!r} is cut short; the file changed on disk")
    return raw


def check_finite(path: Path, name: str, values: FloatArray) -> FloatArray:
    """`values` themselves; ModelError if there is NaN or infinity among them."""
    # min and max both carry a NaN, and need no temporary.
    if not (np.isfinite(values.min()) and np.isfinite(values.max())):
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ModelError(
            f"{path}: tensor {name!r} holds {values.flat[bad]} at element {bad}; "
            "the file is damaged"
        )
    return values


def wrong_shape(
    path: Path, name: str, found: tuple[int, ...], expected: tuple[int, ...]
) -> ModelError:
    return ModelError(
        f"{path}: tensor {name!r} has shape {list(found)}; "
        f"its configuration asks for {list(expected)}"
    )
