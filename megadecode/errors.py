"""What can go wrong, as messages for people: what was wrong, the limit, what to do.

The classes are stable, and also the built-in ones that a reader would expect: catch
`MegadecodeError` for everything raised on purpose, ValueError for what was asked wrongly and
RuntimeError for what cannot be done here or now.
"""

from __future__ import annotations

from host.errors import DeviceError, DeviceHung, MegadecodeError, QueueFull

__all__ = [
    "EMPTY",
    "DeviceError",
    "DeviceHung",
    "DeviceUnavailable",
    "MegadecodeError",
    "ModelError",
    "ParameterError",
    "PromptError",
    "QueueFull",
]

EMPTY = "the prompt is empty; give at least one character, token or message"


class ModelError(MegadecodeError, ValueError):
    """A model cannot be found, fetched, read or used: the file, the tensor or the key is named."""


class PromptError(MegadecodeError, ValueError):
    """A prompt or a list of chat messages cannot be turned into tokens."""


class ParameterError(MegadecodeError, ValueError):
    """A parameter of a request or of the engine is unknown, of the wrong type or out of range."""


class DeviceUnavailable(MegadecodeError, RuntimeError):
    """The device that was asked for cannot be used here."""
