"""What can go wrong between the host and a device. `megadecode.errors` re-exports these."""

from __future__ import annotations


class MegadecodeError(Exception):
    """Base of every error this project raises on purpose."""


class DeviceError(MegadecodeError, RuntimeError):
    """The device cannot be used; the engine that owns it has to be closed."""


class DeviceHung(DeviceError):
    """A wait on the device outlived its deadline; the message says where and who was missing."""


class QueueFull(MegadecodeError, RuntimeError):
    """There is no room for another request now. Try again after one has finished."""
