"""A corpus on disk: conversations whose answers the target wrote, and which tokens those are.

One `.npz` of flat arrays, about 2 bytes a token. Held-out samples are marked by the hash of their
prompt, so that a prompt is on the same side in every corpus.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megadecode.errors import ModelError

DOMAINS = ("chat", "code", "rewrite", "list")
HELD_OUT_SHARE = 1 / 32
LOOP_GRAM, LOOP_TIMES = 16, 3
VERSION = 1


@dataclass(frozen=True)
class Sample:
    """tokens: prompt and answer. spans: [start, end) of the tokens the target wrote; the last span
    is the answer, earlier ones are answers of earlier turns. temperature: the answer's."""

    tokens: list[int]
    spans: list[tuple[int, int]]
    domain: str
    temperature: float
    held_out: bool

    @property
    def prompt_tokens(self) -> int:
        return self.spans[-1][0]


def is_held_out(prompt: Sequence[int]) -> bool:
    """Whether a prompt belongs to the held-out side: decided by its hash alone."""
    digest = hashlib.sha256(np.asarray(prompt, "<u4").tobytes()).digest()
    return int.from_bytes(digest[:8], "little") < HELD_OUT_SHARE * 2**64


def loop_start(tokens: Sequence[int]) -> int | None:
    """Where a 16-gram begins for the third time, or None: a small greedy model falls into loops,
    which flatter every drafter."""
    seen: dict[bytes, int] = {}
    flat = np.asarray(tokens, "<u4").tobytes()
    for start in range(len(tokens) - LOOP_GRAM + 1):
        gram = flat[4 * start : 4 * (start + LOOP_GRAM)]
        seen[gram] = seen.get(gram, 0) + 1
        if seen[gram] == LOOP_TIMES:
            return start
    return None


class Corpus:
    """Arrays over samples, and flat arrays over their tokens.

    tokens: [total] uint16, or uint32 for a large vocabulary. written: [total] bool.
    starts: [samples + 1], sample i is tokens[starts[i]:starts[i + 1]].
    prompt_tokens, domain (index into DOMAINS), temperature, held_out: [samples].
    """

    def __init__(self, arrays: dict[str, NDArray[Any]], about: dict[str, Any]) -> None:
        self.tokens, self.written = arrays["tokens"], arrays["written"]
        self.starts, self.prompt_tokens = arrays["starts"], arrays["prompt_tokens"]
        self.domain, self.temperature = arrays["domain"], arrays["temperature"]
        self.held_out = arrays["held_out"]
        self.about = about

    @classmethod
    def of(cls, samples: Iterable[Sample], about: dict[str, Any]) -> Corpus:
        """about: what the corpus came from, as JSON types."""
        all_samples = list(samples)
        widest = max((max(s.tokens) for s in all_samples), default=0)
        starts = np.cumsum([0, *(len(s.tokens) for s in all_samples)], dtype=np.int64)
        tokens = np.zeros(starts[-1], np.uint16 if widest < 1 << 16 else np.uint32)
        written = np.zeros(starts[-1], bool)
        for start, sample in zip(starts, all_samples):
            tokens[start : start + len(sample.tokens)] = sample.tokens
            for first, last in sample.spans:
                written[start + first : start + last] = True
        arrays = {
            "tokens": tokens,
            "written": written,
            "starts": starts,
            "prompt_tokens": np.array([s.prompt_tokens for s in all_samples], np.int32),
            "domain": np.array([DOMAINS.index(s.domain) for s in all_samples], np.uint8),
            "temperature": np.array([s.temperature for s in all_samples], np.float32),
            "held_out": np.array([s.held_out for s in all_samples], bool),
        }
        return cls(arrays, about)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[samples] tokens, prompt and answer together."""
        return np.diff(self.starts)

    @property
    def answer_tokens(self) -> int:
        """Tokens the target wrote, earlier turns included."""
        return int(self.written.sum())

    def sample(self, index: int) -> Sample:
        """One sample with its parts."""
        first, last = self.starts[index], self.starts[index + 1]
        edges = np.flatnonzero(
            np.diff(self.written[first:last].astype(np.int8), prepend=0, append=0)
        )
        return Sample(
            self.tokens[first:last].tolist(),
            [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2])],
            DOMAINS[self.domain[index]],
            float(self.temperature[index]),
            bool(self.held_out[index]),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all."""
        where = Path(path)
        part = where.with_name(where.name + ".part")
        about = json.dumps({**self.about, "version": VERSION}, sort_keys=True)
        with part.open("wb") as file:
            np.savez_compressed(
                file, tokens=self.tokens, written=np.packbits(self.written), starts=self.starts,
                prompt_tokens=self.prompt_tokens, domain=self.domain, held_out=self.held_out,
                temperature=self.temperature, about=np.frombuffer(about.encode(), np.uint8),
            )  # fmt: skip
        os.replace(part, where)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Corpus:
        """Read what `save` wrote. Raises ModelError."""
        try:
            with np.load(path) as file:
                arrays = {name: file[name] for name in file.files}
            about = json.loads(arrays.pop("about").tobytes())
            if about["version"] != VERSION:
                raise ValueError(f"version {about['version']}, expected {VERSION}")
            arrays["written"] = np.unpackbits(
                arrays["written"], count=len(arrays["tokens"])
            ).astype(bool)
            return cls(arrays, about)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{path}: cannot be read as a corpus: {error}") from None

    @classmethod
    def joined(cls, corpora: Sequence[Corpus]) -> Corpus:
        """One corpus of several for the same target, in order."""
        names = ("tokens", "written", "prompt_tokens", "domain", "temperature", "held_out")
        arrays = {n: np.concatenate([getattr(c, n) for c in corpora]) for n in names}
        arrays["starts"] = np.cumsum([0, *np.concatenate([c.lengths for c in corpora])])
        return cls(arrays, {"parts": [c.about for c in corpora]})
