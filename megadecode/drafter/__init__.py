"""Drafters: block-diffusion models that propose the tokens a target then verifies.

This package needs no torch except for `megadecode.drafter.module`, the oracle and what is trained.
"""

from megadecode.drafter.config import DrafterConfig
from megadecode.drafter.io import Drafter, load_drafter, write_checkpoint, write_single_file
from megadecode.drafter.target import fingerprint
from megadecode.rope import Yarn

__all__ = [
    "Drafter",
    "DrafterConfig",
    "Yarn",
    "fingerprint",
    "load_drafter",
    "write_checkpoint",
    "write_single_file",
]
