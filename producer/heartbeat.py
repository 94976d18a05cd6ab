"""What a rank's process says of itself while it measures, in memory that its supervisor reads: no step waits for it."""

import contextlib
import mmap
import os
from collections.abc import Iterator
from typing import NamedTuple

from schemas.errors import Refusal


class Pulse(NamedTuple):
    """`ready` is 1 once the engine runs, `steps` counts forwards, `benchmark_id` is the current point's
    (0 before the first), `points` and `rejections` count what this session finished and rejected."""

    ready: int = 0
    steps: int = 0
    benchmark_id: int = 0
    points: int = 0
    rejections: int = 0


FIELDS = 8 * len(Pulse._fields)
WORDS = 2000
SIZE = FIELDS + WORDS


class Heartbeat:
    """The pulse of one rank, as 64-bit integers in a shared memory file; behind them its refusal, as text."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        memory = memoryview(mmap.mmap(fd, SIZE))
        self._fields, self._words = memory[:FIELDS].cast("q"), memory[FIELDS:]

    @classmethod
    def create(cls, name: str) -> "Heartbeat":
        fd = os.memfd_create(name)
        os.ftruncate(fd, SIZE)
        return cls(fd)

    def read(self) -> Pulse:
        return Pulse(*self._fields.tolist())

    def refusal(self) -> str:
        """Why this rank refused, empty when it did not."""
        return bytes(self._words).rstrip(b"\0").decode(errors="replace")

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """A refusal inside is told to the supervisor, which has no other way to know its words."""
        try:
            yield
        except Refusal as refusal:
            words = str(refusal).encode()[:WORDS]
            self._words[: len(words)] = words
            raise

    def ready(self) -> None:
        self._fields[0] = 1

    def step(self) -> None:
        self._fields[1] += 1

    def started(self, benchmark_id: int) -> None:
        self._fields[2] = benchmark_id

    def finished(self) -> None:
        self._fields[3] += 1

    def rejected(self) -> None:
        self._fields[4] += 1
