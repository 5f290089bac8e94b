"""megadecode: low-latency decoding of language models without a host in the loop."""

from __future__ import annotations

from megadecode.config import ModelConfig
from megadecode.engine import Engine, EngineStats
from megadecode.errors import (
    DeviceError,
    DeviceHung,
    DeviceUnavailable,
    MegadecodeError,
    ModelError,
    ParameterError,
    PromptError,
    QueueFull,
)
from megadecode.request import Chunk, Generation, Request, Stats
from megadecode.run import run
from megadecode.sampling import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "Chunk",
    "DeviceError",
    "DeviceHung",
    "DeviceUnavailable",
    "Engine",
    "EngineStats",
    "Generation",
    "MegadecodeError",
    "ModelConfig",
    "ModelError",
    "ParameterError",
    "PromptError",
    "QueueFull",
    "Request",
    "SamplingParams",
    "Stats",
    "run",
]
