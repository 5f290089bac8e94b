"""What can go wrong, as messages for people: what was wrong, the limit, what to do."""

from __future__ import annotations


class MegadecodeError(Exception):
    """Base of every error raised on purpose."""


class ModelError(MegadecodeError, ValueError):
    """A model cannot be found, fetched, read or used: the file, the tensor or the key is named."""


EMPTY = "the prompt is empty; give at least one character, token or message"


class PromptError(MegadecodeError, ValueError):
    """A prompt or a list of chat messages cannot be turned into tokens."""


class ParameterError(MegadecodeError, ValueError):
    """A parameter of a request or of the engine is unknown, of the wrong type or out of range."""


class DeviceUnavailable(MegadecodeError, RuntimeError):
    """The device that was asked for cannot be used here."""
