"""What models on disk have in common, whatever their format: weights read when asked for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

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


def wrong_shape(
    path: Path, name: str, found: tuple[int, ...], expected: tuple[int, ...]
) -> ModelError:
    return ModelError(
        f"{path}: tensor {name!r} has shape {list(found)}; "
        f"its configuration asks for {list(expected)}"
    )
