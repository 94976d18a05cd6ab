"""Seeded token streams: real ids, reproducible from a short specification."""

import hashlib
import random
from array import array

GENERATOR = "passgrid_tokens_v1"
"""Version of the stream; a change of the ids is a new version."""

FIRST_TOKEN = 3
"""Smallest id: below lie the padding, begin and end tokens of common vocabularies."""


class TokenStream:
    """Token ids of one cell, for a seed and a vocabulary [FIRST_TOKEN, vocab_size).

    Python promises the sequence of `random.Random(str).random()` over versions, so a reader can derive every
    prompt again from (generator, seed, vocab_size, purpose).
    """

    def __init__(self, seed: str, vocab_size: int, dp_rank: int = 0) -> None:
        self.seed, self.vocab_size, self.dp_rank = seed, vocab_size, dp_rank
        self._prefixes: dict[int, tuple[random.Random, array[int]]] = {}

    def _random(self, purpose: str) -> random.Random:
        return random.Random(f"{GENERATOR}:{self.seed}:dp{self.dp_rank}:{purpose}")  # noqa: S311

    def _draw(self, source: random.Random, count: int) -> "array[int]":
        span = self.vocab_size - FIRST_TOKEN
        draw = source.random
        return array("I", [FIRST_TOKEN + int(draw() * span) for _ in range(count)])

    def prefix(self, slot: int, length: int) -> "array[int]":
        """The first `length` ids of a slot's prefix stream: a longer prefix extends a shorter one."""
        source, ids = self._prefixes.setdefault(slot, (self._random(f"prefix:slot{slot}"), array("I")))
        if len(ids) < length:
            ids.extend(self._draw(source, length - len(ids)))
        return ids[:length]

    def unique(self, purpose: str, length: int) -> "array[int]":
        """`length` ids that belong to `purpose` alone."""
        return self._draw(self._random(purpose), length)

    def seed_prompt(self, slot: int, prefix: int, attempt: int) -> "array[int]":
        """A prefix and one token of its own, so the engine keeps the state of the last whole block."""
        return self.prefix(slot, prefix) + self.unique(f"seed:{prefix}:{attempt}:slot{slot}", 1)

    def prompt(self, point_key: str, repetition: int, slot: int, prefix: int, length: int) -> "array[int]":
        """The prompt of one slot in one repetition: shared prefix, then ids that no other repetition has."""
        suffix = self.unique(f"point:{point_key}:repetition{repetition}:slot{slot}", length - prefix)
        return self.prefix(slot, prefix) + suffix


def ids_sha256(ids: "array[int]") -> str:
    """sha256 of the ids as little-endian uint32 (`prompt_hash_encoding: uint32_le`)."""
    if ids.itemsize != 4:
        ids = array("I", ids)
    return hashlib.sha256(ids.tobytes()).hexdigest()
