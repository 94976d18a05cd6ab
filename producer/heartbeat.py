"""What a rank's process says of itself while it measures, in memory that its supervisor reads: no step waits for it."""

import mmap
import os
from typing import NamedTuple


class Pulse(NamedTuple):
    """`ready` is 1 once the engine runs, `steps` counts forwards, `benchmark_id` is the current point's
    (0 before the first), `points` and `rejections` count what this session finished and rejected."""

    ready: int = 0
    steps: int = 0
    benchmark_id: int = 0
    points: int = 0
    rejections: int = 0


SIZE = 8 * len(Pulse._fields)


class Heartbeat:
    """The pulse of one rank, as 64-bit integers in a shared memory file."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._fields = memoryview(mmap.mmap(fd, SIZE)).cast("q")

    @classmethod
    def create(cls, name: str) -> "Heartbeat":
        fd = os.memfd_create(name)
        os.ftruncate(fd, SIZE)
        return cls(fd)

    def read(self) -> Pulse:
        return Pulse(*self._fields.tolist())

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
