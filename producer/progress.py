"""Progress that a person can follow: one line a point, and a small file that other programs can read."""

import contextlib
import os
import socket
import time
from pathlib import Path

from producer.exclusive import utc_now
from producer.heartbeat import Pulse
from producer.partition import request_shapes
from schemas.canonical import canonical_bytes
from schemas.journal import PointLine
from schemas.plan import FrozenCell
from schemas.points import DecodePoint

WRITE_SECONDS = 1.0


def point_name(cell: FrozenCell, benchmark_id: int) -> str:
    """A point in words: `point 17 (prefill, batch 4, 1024 new and 2048 cached tokens)`."""
    if not benchmark_id:
        return "no point"
    point = cell.points.points()[benchmark_id - 1]
    if isinstance(point, DecodePoint):
        what = f"decode, batch {point.batch_size}, contexts of {point.total_kv_read_tokens} tokens in all"
    else:
        shapes = request_shapes(point, cell.cache_hit_alignment_tokens)
        new, cached = sum(shape.new_tokens for shape in shapes), sum(shape.prefix for shape in shapes)
        what = f"prefill, batch {point.batch_size}, {new} new and {cached} cached tokens"
    return f"point {benchmark_id} ({what})"


class Rate:
    """Points a second since the first one began, and the seconds that are left at that rate."""

    def __init__(self, total: int, done: int) -> None:
        self.total, self.before = total, done
        self._began: float | None = None

    def begin(self) -> None:
        self._began = self._began or time.monotonic()

    def of(self, points: int) -> tuple[float, float | None]:
        """For `points` finished in this session."""
        if self._began is None or not points:
            return 0.0, None
        rate = points / (time.monotonic() - self._began)
        return rate, (self.total - self.before - points) / rate


def say(folder: Path, line: str) -> None:
    """A line for a person: on standard output, and with its time in the cell's `measuring.log`."""
    print(line, flush=True)
    with contextlib.suppress(OSError), (folder / "measuring.log").open("a") as log:
        log.write(f"{utc_now()}  {line}\n")


class PointLog:
    """Rank 0 says a line for each finished point."""

    def __init__(self, cell: FrozenCell, folder: Path, done: int) -> None:
        self._cell, self._folder, self._rate = cell, folder, Rate(len(cell.points.points()), done)
        self._points = self._rejections = 0

    def started(self) -> None:
        self._rate.begin()

    def finished(self, line: PointLine) -> None:
        self._points += 1
        self._rejections += len(line.ranks[0].rejections)
        rate, left = self._rate.of(self._points)
        # What the merge will keep: the slowest rank's middle value (of nine, the first sample left out).
        kept = max(
            sorted(r.end_monotonic - r.start_monotonic for r in rank.repetitions[1:])[len(rank.repetitions[1:]) // 2]
            for rank in line.ranks
        )
        rejected = f"  {self._rejections} rejected" if self._rejections else ""
        say(
            self._folder,
            f"{self._cell.name}  {self._rate.before + self._points}/{self._rate.total}  "
            f"{point_name(self._cell, line.benchmark_id)}: {kept * 1000:.2f} ms  "
            f"{rate:.2f} points/s  {left or 0:.0f} s left{rejected}",
        )
        for rejection in line.ranks[0].rejections:
            say(self._folder, f"  repetition {rejection.ordinal} rejected: {rejection.reason}")


class StatusFile:
    """`progress.json`: what the supervisor of a cell sees, written anew every second.

    `state` is starting, measuring, finished, failed or stopped; `reason` says why in the last two.
    """

    def __init__(self, cell: FrozenCell, folder: Path, done: int) -> None:
        self._cell, self._file = cell, folder / "progress.json"
        self._rate = Rate(len(cell.points.points()), done)
        self._written = 0.0
        self._pulse = Pulse()

    @property
    def current_point(self) -> str:
        return point_name(self._cell, self._pulse.benchmark_id)

    def watch(self, pulses: list[Pulse]) -> None:
        """The slowest rank's pulse, once a second."""
        self._pulse = min(pulses, key=lambda pulse: pulse.points)
        if self._pulse.ready:
            self._rate.begin()
        if time.monotonic() - self._written >= WRITE_SECONDS:
            self.write("measuring" if self._pulse.ready else "starting")

    def write(self, state: str, reason: str = "", done: int | None = None) -> None:
        """`done` is the journal's count, where it is newer than the last pulse."""
        pulse = self._pulse
        rate, left = self._rate.of(pulse.points)
        facts = {
            "cell": self._cell.name,
            "state": state,
            "points": self._rate.total,
            "points_done": self._rate.before + pulse.points if done is None else done,
            "current_point": pulse.benchmark_id,
            "points_per_second": round(rate, 3),
            "rejections": pulse.rejections,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "updated_at": utc_now(),
            **({} if left is None else {"seconds_left": round(left, 1)}),
            **({"reason": reason} if reason else {}),
        }
        # Not synced: after a crash an old status is as good as none.
        temporary = self._file.with_suffix(".tmp")
        with contextlib.suppress(OSError):  # a full disk ends a cell at its journal, in its own words
            temporary.write_bytes(canonical_bytes(facts))
            temporary.replace(self._file)
        self._written = time.monotonic()
