"""Random weights of any shape: what the tests run when the numbers need not mean anything."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megadecode.config import ModelConfig
from megadecode.models.weights import FloatArray, tensor_shapes


class RandomModel:
    """Implements `Weights` with reproducible random values; it has no tokenizer.

    Linear weights are normal with variance 1 / inputs, so that activations keep their scale
    through any depth; norm weights are near 1, biases near 0. A tensor's values depend on the
    seed, its name and its shape alone: asking in another order gives the same model.
    """

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.config = config
        self._seed = seed
        self._shapes = tensor_shapes(config)
        self._made: dict[str, FloatArray] = {}

    def tensor(self, name: str) -> FloatArray:
        shape = self._shapes[name]
        if name == "head" and self.config.tied_embeddings:
            name = "embed"
        if name not in self._made:
            rng = np.random.default_rng([self._seed, *name.encode()])
            values = rng.standard_normal(shape, dtype=np.float32)
            if len(shape) == 1:
                values *= np.float32(0.1)
                if name.endswith("norm"):
                    values += np.float32(1.0)
            else:
                values *= np.float32(shape[1] ** -0.5)
            self._made[name] = values
        return self._made[name]

    def tensors(self) -> Iterator[tuple[str, FloatArray]]:
        for name in self._shapes:
            yield name, self.tensor(name)


def random_model(config: ModelConfig, seed: int) -> RandomModel:
    """A model of the given shape with random weights (see `RandomModel`)."""
    return RandomModel(config, seed)
