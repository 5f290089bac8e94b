"""Which target a drafter belongs to, as a fingerprint of its shape and of some of its weights."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

import numpy as np

from megadecode.models.weights import Weights

_IGNORED = ("name", "context_tokens", "bos_id", "stop_ids")
# Said only where they are used, so that the fingerprints of older models stay what they were.
_OPTIONAL = {"qkv_bias": False, "qk_norm": False, "rope_scaling": None}
_SAMPLED = ("attn_norm", "q", "v", "down")
_VALUES = 1021


def fingerprint(model: Weights) -> str:
    """`sha256:` + 64 hex digits of what a drafter depends on.

    Hashed: the configuration without names, limits and special tokens, and up to 1021 evenly spaced
    fp32 values of each of four tensors in the first, middle and last layer, and of the final norm.
    Models of one shape, fine-tuned or quantised differently, thus differ.
    """
    config = {
        key: value
        for key, value in asdict(model.config).items()
        if key not in _IGNORED and not (key in _OPTIONAL and value == _OPTIONAL[key])
    }
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    layers = sorted({0, model.config.layers // 2, model.config.layers - 1})
    names = [f"layers.{layer}.{part}" for layer in layers for part in _SAMPLED]
    for name in (*names, "final_norm"):
        values = model.tensor(name).reshape(-1)
        places = np.linspace(0, values.size - 1, min(values.size, _VALUES)).astype(np.int64)
        digest.update(name.encode() + b"\0" + values[places].astype("<f4").tobytes())
    return "sha256:" + digest.hexdigest()
