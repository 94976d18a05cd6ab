"""Progress that a person can follow: one line a point, and a small file that other programs can read."""

import time
from pathlib import Path

from schemas.canonical import canonical_bytes, write_atomic
from schemas.journal import PointLine


class Progress:
    """Points done and total, rate, and the time that is left at that rate."""

    def __init__(self, file: Path, cell: str, total: int, done: int) -> None:
        self._file, self._cell, self._total, self._done, self._before = file, cell, total, done, done
        self._started = time.monotonic()

    def finished(self, line: PointLine) -> None:
        self._done += 1
        elapsed = time.monotonic() - self._started
        rate = (self._done - self._before) / elapsed
        left = (self._total - self._done) / rate
        walls = sorted(r.end_monotonic - r.start_monotonic for r in line.repetitions[1:])
        facts = {
            "cell": self._cell,
            "done": self._done,
            "total": self._total,
            "points_per_second": round(rate, 3),
            "seconds_left": round(left, 1),
            "last_point": line.benchmark_id,
        }
        write_atomic(self._file, canonical_bytes(facts))
        print(
            f"{self._cell}  {self._done}/{self._total}  point {line.benchmark_id}: "
            f"{walls[len(walls) // 2] * 1000:.2f} ms  {rate:.2f} points/s  {left:.0f} s left",
            flush=True,
        )
